"""From losses to ranked findings: causes.toml read, judged and put in order.

A cause's score is its own share of all latency plus the shares of the losses that it explains, so
that a queue behind slow steps counts for what makes them slow. What has been explained that way is
listed after its cause, if at all, as a consequence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

from ridgeline.diagnose.conditions import Condition, Facts, all_hold, fill, named_in, parse
from ridgeline.diagnose.losses.latency_losses import LOSSES, Blame
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
    """One row of causes.toml; see its head."""

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

    def __post_init__(self) -> None:
        for loss in (self.loss, *self.explains):
            if loss not in LOSSES:
                raise ValueError(f"cause {self.id!r}: no such loss: {loss!r}")


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A finding. `gain` is the share of all latency that mending it gives back, at most;
    `with_consequences` adds what it explains.
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
    text = files("ridgeline.diagnose.rules").joinpath("causes.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["cause"], tuple[Cause, ...])


@cache
def _conditions(texts: tuple[str, ...]) -> tuple[Condition, ...]:
    return tuple(map(parse, texts))


def findings(found: Blame, facts: Facts, server: Server = "ridgeline") -> tuple[Ranked, ...]:
    """Every cause that holds, by what it is worth with its consequences; () for a healthy run."""
    known = {**facts, **{f"loss_{name}_share": s.mid for name, s in found.shares.items()}}
    holding = [cause for cause in shipped_causes() if _holds(cause, found.shares, known)]
    ranked = [_ranked(cause, found.shares, known, server) for cause in holding]
    ranked.sort(key=lambda each: -each.with_consequences)
    return tuple(ranked)


def _holds(cause: Cause, shares: Mapping[str, Interval], facts: Facts) -> bool:
    if shares[cause.loss].mid < cause.least:
        return False
    if cause.unless and all_hold(_conditions(cause.unless), facts) is True:
        return False
    return all_hold(_conditions(cause.when), facts) is True


def _ranked(cause: Cause, shares: Mapping[str, Interval], facts: Facts, server: Server) -> Ranked:
    own = shares[cause.loss]
    names = {condition.name for condition in _conditions(cause.when)} | named_in(cause.sentence)
    return Ranked(
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
        flag=cause.flag.get(server) or cause.flag.get("all", "no flag of this server is known"),
        trade_off=cause.trade_off,
        not_help=cause.not_help,
    )
