"""scripts/check_flags.py finds flags in sources without running them."""

from __future__ import annotations

from scripts.check_flags import flags_of_source

SOURCE = """
class Args:
    chunked_prefill_size: int = 8
    rank: A[int, Arg(cli_name="--base-rank", aliases=["--rank-id"])] = 0

parser.add_argument("--plain", "-p", help="not --this one")
raise SystemExit("never run")
"""


def test_flags_are_read_from_calls_fields_and_their_names() -> None:
    flags = set(flags_of_source(SOURCE))
    assert {"--plain", "-p", "--chunked-prefill-size", "--base-rank", "--rank-id"} <= flags
    assert "--this" not in flags
