"""Run schemathesis against a server process: the demo model, batches and the admin listener.

    python scripts/fuzz_api.py [--examples 200] [--model demo] [--seed N] [--workers 2]

Starts `ridgeline serve` with a batch store and tests both OpenAPI documents: boundary values of
every field (coverage), random valid and invalid requests (fuzzing), and sequences from an upload to
the results along the document's links (stateful). Fails on any 5xx, on any status, header, content
type or body outside the document, and on an undocumented method or id that is served. Afterwards
the server must be healthy, with all KV blocks free. A whole run takes some 15 minutes on two cores;
`--include-path PATH` or `--operators-only` run a part of it.
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
"""A short context limits the longest response."""


def fuzz(url: str, folder: str, args: argparse.Namespace, *more: str) -> int:
    """The exit code of one run of schemathesis, whose working directory is `folder`."""
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
def timed(name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


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
                with timed("public routes"):
                    codes["public"] = fuzz(server.url, folder, args, *only)
            rss = server.rss_bytes()
            if not only:
                with timed("admin routes"):
                    stop = ("--exclude-path", "/admin/drain")  # it would stop the server
                    codes["admin"] = fuzz(server.admin_url, folder, args, *stop)
            return report(server, codes, rss)


def report(server: Served, codes: dict[str, int], rss_bytes: int) -> int:
    """Print the result; the exit code is 1 for a failed run or a server with requests left."""
    server.settle()
    healthy = httpx.get(f"{server.url}/health").status_code == 200
    used = server.counters()["kv_cache_usage_perc"]
    failed = [name for name, code in codes.items() if code]
    print(f"healthy: {healthy} · KV blocks in use: {used:.0%} · RSS {rss_bytes / 2**20:.0f} MiB")
    print(f"outside the document: {', '.join(failed) or 'nothing'}")
    return 1 if failed or used or not healthy else 0


if __name__ == "__main__":
    sys.exit(main())
