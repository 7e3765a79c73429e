"""What telemetry costs per request: microseconds of the thread that ends it.

    python benchmarks/bench_telemetry.py

A collector on a loopback port takes the spans, as the SDK's own thread sends them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from ridgeline.records import Sampling
from ridgeline.serve.telemetry import open_telemetry
from ridgeline.serve.telemetry.base import RequestRecord

NUM_REQUESTS, NUM_ROUNDS = 1000, 7
RECORD = RequestRecord(
    operation="chat",
    model="demo",
    request_id="chatcmpl-1",
    began_ns=time.time_ns(),
    started_s=0.1,
    first_s=0.25,
    ended_s=1.25,
    input_tokens=100,
    output_tokens=100,
    finish_reasons=("stop",),
    sampling=Sampling(temperature=0.5, top_p=0.9, seed=3, max_tokens=100),
    is_streamed=True,
)


class Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def microseconds(otlp: str | None, emf: str | None) -> float:
    """CPU time of the calling thread per request: the median of rounds."""
    telemetry = open_telemetry(otlp, emf, service="ridgeline")
    rounds = []
    for _ in range(NUM_ROUNDS):
        start_ns = time.thread_time_ns()
        for _ in range(NUM_REQUESTS):
            telemetry.end_request(RECORD)
        rounds.append((time.thread_time_ns() - start_ns) / NUM_REQUESTS / 1000)
    telemetry.close()
    return statistics.median(rounds)


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with tempfile.TemporaryDirectory() as folder:
        emf = str(Path(folder) / "emf.log")
        for name, arguments in (
            ("none", (None, None)),
            ("otlp", (url, None)),
            ("emf", (None, emf)),
        ):
            print(f"{name}: {microseconds(*arguments):.1f} µs per request")
    server.shutdown()


if __name__ == "__main__":
    main()
