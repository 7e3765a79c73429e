"""The effect of the throttle: goodput of a server with and without --slo-throttle, by load.

    python benchmarks/bench_throttle.py [--model demo] [--rates 30 60 90] [--rounds 3]
        [--seconds 15] [--slo "ttft:300 tpot:20"] [--workload synthetic:input=64,output=64]
        [--serve-flags "--quantization int8"]

In every round both servers are started in turn, one at a time, with one class with that SLO, and
get the same requests at each rate, one rate after the other, at Poisson's instants. A refused
request counts as one that was not served in time. Prints a row per load, then medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from server import serving


class Load(NamedTuple):
    """The result of one rate: requests in time per second, and shares of the requests sent."""

    goodput: float
    in_time: float
    refused: float


def load(given: argparse.Namespace, url: str, rate: float, seed: int) -> Load:
    """`ridgeline bench` against the server at `url`."""
    count = round(rate * given.seconds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        words = ["bench", "--url", url, "--workload", given.workload, "--seed", str(seed)]
        words += ["--request-rate", str(rate), "--num-prompts", str(count)]
        words += ["--slo", given.slo, "--output-json", str(file)]
        code = "from ridgeline.cli.main import main; main()"
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():  # rejected requests are failures, but appear in a result
            raise SystemExit(f"no result of {' '.join(words)}\n{done.stderr}")
        found = json.loads(file.read_text(encoding="utf-8"))
    in_time = found["request_goodput"] * found["duration"] / count
    return Load(found["request_goodput"], in_time, found["failed"] / count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rates", nargs="+", type=float, default=[30.0, 60.0, 90.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of requests at each rate")
    parser.add_argument("--slo", default="ttft:300 tpot:20")
    parser.add_argument("--workload", default="synthetic:input=64,output=64")
    parser.add_argument("--serve-flags", default="", help="more words for `ridgeline serve`")
    given = parser.parse_args()
    words = ["serve", given.model, "--port", "0", "--slo-classes", f"slo={given.slo}"]
    words += shlex.split(given.serve_flags)
    found: dict[tuple[str, float], list[Load]] = defaultdict(list)
    for turn in range(given.rounds):
        arms = {"without": words, "with": [*words, "--slo-throttle"]}
        for name in sorted(arms, reverse=bool(turn % 2)):
            with serving(arms[name]) as (url, _):
                for rate in given.rates:
                    one = load(given, url, rate, seed=1000 * turn + round(rate))
                    found[name, rate].append(one)
                    text = f"{one.goodput:6.1f}/s in time ({one.in_time:.0%})"
                    text += f", {one.refused:.0%} refused"
                    print(f"round {turn + 1}, {name:>7}, {rate:g}/s: {text}")
    for rate in given.rates:
        pairs = [found[name, rate] for name in ("without", "with")]
        middle = [statistics.median(each.goodput for each in loads) for loads in pairs]
        print(f"{rate:g}/s: goodput {middle[0]:.1f} without, {middle[1]:.1f} with the throttle")


if __name__ == "__main__":
    main()
