"""schemathesis against a real server: the demo model, batches and the operators' listener.

    python scripts/fuzz_api.py [--examples 200] [--model demo] [--seed N] [--workers 2]

Starts `ridgeline serve` with a batch store, and has schemathesis work through both documents: the
boundary values of every field (coverage), random requests that fit the schema and such that do not
(fuzzing, positive and negative), and walks from upload to results along the document's links
(stateful). Fails on any 5xx, on any status, header, content type or body outside the document, on
a method or an id that is served and should not be. Afterwards the server must be healthy, with all
KV blocks free; a whole run takes some 15 minutes on two cores, `--include-path PATH` or
`--operators-only` a part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from serving import Served, serving

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
)
FLAGS = (
    *("--max-model-len", "128", "--max-num-seqs", "16", "--price-per-hour", "1"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--slo-classes", "chat=ttft:500 tpot:50", "--enable-per-request-metrics"),
)
"""A short context: an example that asks for everything that fits is no longer than it must be."""


def fuzz(url: str, folder: str, args: argparse.Namespace, *more: str) -> int:
    """The exit code of one run of schemathesis, which keeps its notes in `folder`."""
    linked = not args.include_path or any("files" in path for path in args.include_path)
    phases = "examples,coverage,fuzzing" + (",stateful" if linked else "")
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--phases", phases, "--mode", "all"),
        *("--checks", ",".join(CHECKS), "--continue-on-failure"),
        *("--max-examples", str(args.examples), "--workers", str(args.workers)),
        *("--suppress-health-check", "all", "--request-timeout", "120", "--warnings", "off"),
        *(("--seed", str(args.seed)) if args.seed is not None else ()),
        *more,
    ]
    return subprocess.run(command, check=False, cwd=folder).returncode


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--include-path", action="append", default=[])
    parser.add_argument("--operators-only", action="store_true")
    args = parser.parse_args()
    only = [part for path in args.include_path for part in ("--include-path", path)]
    with tempfile.TemporaryDirectory() as folder:
        store = ("--batch-store", str(Path(folder) / "batches.sqlite"))
        with serving(args.model, *FLAGS, *store, admin=True) as server:
            codes = {}
            if not args.operators_only:
                with told("public routes"):
                    codes["public"] = fuzz(server.url, folder, args, *only)
            rss = server.rss_bytes()
            if not only:
                with told("operators' routes"):
                    stop = ("--exclude-path", "/admin/drain")  # it would end the server
                    codes["admin"] = fuzz(server.admin_url, folder, args, *stop)
            return report(server, codes, rss)


def report(server: Served, codes: dict[str, int], rss_bytes: int) -> int:
    """What schemathesis said, and whether the server is as it was."""
    server.settle()
    healthy = httpx.get(f"{server.url}/health").status_code == 200
    used = server.counters()["kv_cache_usage_perc"]
    failed = [name for name, code in codes.items() if code]
    print(f"healthy: {healthy} · KV blocks in use: {used:.0%} · RSS {rss_bytes / 2**20:.0f} MiB")
    print(f"outside the document: {', '.join(failed) or 'nothing'}")
    return 1 if failed or used or not healthy else 0


if __name__ == "__main__":
    sys.exit(main())
