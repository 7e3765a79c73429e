"""One result file in one form. Units: seconds, tokens, requests per second.

`samples` hold one value per request (in the order in which requests were sent) where the file has
them, by request id in `ids` where it names them. `figures` hold what the file only sums up, as
`metric_statistic`. `load` is what has to be equal for two results to be comparable; a fact that a
tool does not write down is absent, and is then not compared. `config` is how the server was set up.
"""

from __future__ import annotations

import msgspec

from ridgeline.errors import BadInput

LATENCIES = ("ttft", "tpot", "itl", "e2e")
RATES = ("output_tok_s", "request_rate", "goodput")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one file tells; see the module's head."""

    source: str
    tool: str
    samples: dict[str, tuple[float, ...]] = {}
    ids: tuple[str, ...] = ()
    figures: dict[str, float] = {}
    load: dict[str, str | float] = {}
    config: dict[str, str] = {}
    invalid: tuple[str, ...] = ()


class NotThisFormat(Exception):
    """The file is another tool's."""


def unreadable(path: object, why: str) -> BadInput:
    return BadInput(
        "not a result file that can be read",
        value=str(path),
        limit="Ridgeline event log or JSON, vLLM, GuideLLM, AIPerf, inference-perf, llmperf",
        fix=why,
    )
