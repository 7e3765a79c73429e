"""The rule book, rulebook.toml: one table for diagnosis, advice, the headline of bench, and alerts.

A rule has one name, one verdict and one remedy, and a condition for every place from which it can
be observed: the losses of a diagnosed run, the figures of a run, its headline, a server's metrics.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from ridgeline.diagnose.conditions import parse
from ridgeline.diagnose.losses.latency_losses import LOSSES

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
    "compute-bound",
    "overhead-bound",
    "not-bound",
]
Server = Literal["ridgeline", "vllm", "sglang", "tgi", "tensorrt-llm", "llama.cpp", "another"]
Bound = Literal[
    "machine",
    "client",
    "capacity",
    "queue",
    "idle",
    "bandwidth",
    "compute",
    "overhead",
    "planning",
    "unknown",
]


class LossCondition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Observed as lost latency.

    `loss` is at least `least` of the latency, all conditions of `when` hold, and not all of
    `unless` do. `explains`: losses that are consequences. `first`: ranks before all others, because
    they cannot be judged while it holds.
    """

    loss: str
    least: float
    sentence: str
    when: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    first: bool = False

    def __post_init__(self) -> None:
        for loss in (self.loss, *self.explains):
            if loss not in LOSSES:
                raise ValueError(f"no such loss: {loss!r}")
        for text in (*self.when, *self.unless):
            parse(text)


class FigureCondition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Observed in the figures of a run: all conditions of `when` hold."""

    when: tuple[str, ...]
    symptom: str
    cause: str
    gain: str

    def __post_init__(self) -> None:
        for text in self.when:
            parse(text)


class Headline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sentence on a run: if `when` holds, or if `share` is the largest of all such shares."""

    bound: Bound
    sentence: str
    when: tuple[str, ...] = ()
    share: str | None = None

    def __post_init__(self) -> None:
        if bool(self.when) == (self.share is not None):
            raise ValueError(f"headline {self.bound!r} needs either `when` or `share`")


class Alert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Observed in a server's metrics: PromQL with the names of alerts.py, for a time `lasts`."""

    expr: str
    lasts: str = msgspec.field(name="for")
    severity: Literal["info", "warning", "critical"] = "warning"


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row: a cause, its remedy, and where it is observed.

    `flag`: what to change, by server. `not_help`: what seems to help and does not. `not_when`: when
    the remedy is wrong. `rung`: the row of the ladder that applies it.
    """

    id: str
    verdict: Verdict
    fix: str
    trade_off: str
    not_help: str
    flag: dict[str, str]
    not_when: str = ""
    rung: str | None = None
    losses: LossCondition | None = None
    figures: FigureCondition | None = None
    headline: Headline | None = None
    alert: Alert | None = None

    def __post_init__(self) -> None:
        if not (self.losses or self.figures or self.headline or self.alert):
            raise ValueError(f"rule {self.id!r} is observed nowhere")

    def flag_for(self, server: Server) -> str:
        """What to change on this server."""
        return self.flag.get(server) or self.flag.get("all", "no known flag for this server")


@cache
def shipped_rules() -> tuple[Rule, ...]:
    """The rules of this package."""
    text = files("ridgeline.diagnose.rules").joinpath("rulebook.toml").read_text(encoding="utf-8")
    return read_rules(text)


def read_rules(text: str) -> tuple[Rule, ...]:
    """Parse rules from TOML. Raises ValueError, with the name of an unknown or missing key."""
    return msgspec.convert(tomllib.loads(text)["rule"], tuple[Rule, ...])
