"""Rank the causes of causes.toml by the latency losses of a run.

The score of a cause is the share of its own loss in the total latency plus the shares of the losses
that it explains, so that a queue behind slow steps counts towards the reason why they are slow.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

from ridgeline.diagnose.conditions import Condition, Facts, all_hold, fill, named_in, parse
from ridgeline.diagnose.losses.latency_losses import LOSSES, LatencyLosses
from ridgeline.stats import Interval

Verdict = Literal[
    "queue-bound",
    "overload-bound",
    "prefill-compute-bound",
    "decode-bandwidth-bound",
    "kv-capacity-bound",
    "host-overhead-bound",
    "client-bound",
    "prefix-miss-bound",
    "over-batching-bound",
    "scheduling-interference-bound",
    "machine-bound",
]
Server = Literal["ridgeline", "vllm", "sglang", "tgi", "tensorrt-llm", "llama.cpp", "another"]


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of causes.toml.

    It is a finding if `loss` is at least `least` of the latency, all conditions of `when` hold, and
    not all of `unless` do. `explains`: losses that are consequences of it. `flag`: what to change,
    by server. `first`: it ranks before all others, because they cannot be judged while it holds.
    """

    id: str
    verdict: Verdict
    loss: str
    least: float
    when: tuple[str, ...]
    explains: tuple[str, ...]
    sentence: str
    fix: str
    trade_off: str
    not_help: str
    flag: dict[str, str]
    unless: tuple[str, ...] = ()
    first: bool = False

    def __post_init__(self) -> None:
        for loss in (self.loss, *self.explains):
            if loss not in LOSSES:
                raise ValueError(f"cause {self.id!r}: no such loss: {loss!r}")


class RankedFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause that holds, with the numbers of the run.

    `gain`: upper bound of the share of latency that a fix recovers. `with_consequences`: the same
    including the losses that the cause explains.
    """

    cause: str
    verdict: Verdict
    sentence: str
    gain: Interval
    with_consequences: float
    evidence: dict[str, Any]
    fix: str
    flag: str
    trade_off: str
    not_help: str


@cache
def shipped_causes() -> tuple[Cause, ...]:
    """The causes of this package."""
    text = files("ridgeline.diagnose.rules").joinpath("causes.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["cause"], tuple[Cause, ...])


@cache
def _conditions(texts: tuple[str, ...]) -> tuple[Condition, ...]:
    return tuple(map(parse, texts))


def findings(
    losses: LatencyLosses, facts: Facts, server: Server = "ridgeline"
) -> tuple[RankedFinding, ...]:
    """All causes that hold, the one with the largest loss (with consequences) first."""
    known = {**facts, **{f"loss_{name}_share": s.mid for name, s in losses.shares.items()}}
    holding = [cause for cause in shipped_causes() if _holds(cause, losses.shares, known)]
    ranked = [(cause, _ranked(cause, losses.shares, known, server)) for cause in holding]
    ranked.sort(key=lambda pair: (not pair[0].first, -pair[1].with_consequences))
    return tuple(finding for _, finding in ranked)


def _holds(cause: Cause, shares: Mapping[str, Interval], facts: Facts) -> bool:
    if shares[cause.loss].mid < cause.least:
        return False
    if cause.unless and all_hold(_conditions(cause.unless), facts) is True:
        return False
    return all_hold(_conditions(cause.when), facts) is True


def _ranked(
    cause: Cause, shares: Mapping[str, Interval], facts: Facts, server: Server
) -> RankedFinding:
    own = shares[cause.loss]
    names = {condition.name for condition in _conditions(cause.when)} | named_in(cause.sentence)
    return RankedFinding(
        cause=cause.id,
        verdict=cause.verdict,
        sentence=fill(cause.sentence, facts),
        gain=own,
        with_consequences=own.mid + sum(shares[loss].mid for loss in cause.explains),
        evidence={
            name: facts[name]
            for name in sorted({*names, f"loss_{cause.loss}_share"})
            if name in facts
        },
        fix=cause.fix,
        flag=cause.flag.get(server) or cause.flag.get("all", "no known flag for this server"),
        trade_off=cause.trade_off,
        not_help=cause.not_help,
    )
