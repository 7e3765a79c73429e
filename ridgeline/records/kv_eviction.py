"""Which keys and values a sequence keeps in its cache, where it does not keep all of them."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from ridgeline.errors import BadInput

EvictionMethod = Literal["full", "streaming", "snapkv", "adakv", "h2o"]
_KEYS: dict[str, tuple[str, ...]] = {
    "full": (),
    "streaming": ("budget", "sinks"),
    "snapkv": ("budget", "window", "pooling"),
    "adakv": ("budget", "window", "pooling"),
    "h2o": ("budget",),
}
MAX_BUDGET = 1 << 24
SINKS, WINDOW, POOLING = 4, 32, 5


class KvEviction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy that evicts keys and values from the KV cache of one sequence. Lossy, except "full".

    `budget`: what is kept, a whole number of tokens or a share of the prompt (0.5). `sinks`: the
    first tokens, which "streaming" always keeps, rounded up to whole blocks. `window`: the last
    tokens of the prompt, whose attention chooses what "snapkv" and "adakv" keep, and which are kept
    as well. `pooling`: scores are averaged over this many neighbouring tokens.

    "full" keeps everything: it switches a server's policy off for one request.
    """

    method: EvictionMethod
    budget: int | float | None = None
    sinks: int | None = None
    window: int | None = None
    pooling: int | None = None

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if name != "method" and value is not None and name not in _KEYS[self.method]:
                raise BadInput(
                    f"{name} means nothing to KV eviction by {self.method}",
                    value=value,
                    fix=f"leave {name} out",
                )
        if self.method == "full":
            return
        if self.budget is None:
            raise BadInput(
                f"KV eviction by {self.method} needs a budget",
                fix='add "budget": 1024 (tokens) or "budget": 0.5 (share of the prompt)',
            )
        is_share = isinstance(self.budget, float)
        if not (0 < self.budget <= 1 if is_share else 1 <= self.budget <= MAX_BUDGET):
            raise BadInput(
                "the budget of KV eviction is out of range",
                value=self.budget,
                limit=f"1..{MAX_BUDGET} tokens, or a share of the prompt in (0.0, 1.0]",
            )
        limits = {"sinks": (0, 4096), "window": (1, 4096), "pooling": (1, 255)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                what = f"{name} of KV eviction is out of range"
                raise BadInput(what, value=value, limit=f"{low}..{high}")
        if self.pooling is not None and self.pooling % 2 == 0:
            raise BadInput("pooling of KV eviction must be odd", value=self.pooling)

    @property
    def evicts(self) -> bool:
        return self.method != "full"

    @property
    def needs_scores(self) -> bool:
        """Whether attention scores choose what is kept."""
        return self.method in ("snapkv", "adakv", "h2o")

    def budget_tokens(self, num_prompt: int, least: int = 1) -> int:
        """The budget in tokens for a prompt; a share of a short one is `least` tokens."""
        assert self.budget is not None, "a policy that evicts has a budget"
        if isinstance(self.budget, float):
            return max(least, math.ceil(self.budget * num_prompt))
        return self.budget

    def as_dict(self) -> dict[str, Any]:
        """The keys that are set, as in JSON."""
        return {k: v for k, v in msgspec.structs.asdict(self).items() if v is not None}
