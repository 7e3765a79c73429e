"""From a speculative config as asked to one as used, with its derivation."""

from __future__ import annotations

import msgspec

from ridgeline.errors import BadInput
from ridgeline.settings import Settings, Speculative

NUM_SPECULATIVE_TOKENS = {"ngram": 4}
LOOKUP_MIN, LOOKUP_MAX = 2, 4


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation as used; the names are those of `ridgeline.settings.Speculative`."""

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int


def resolve_speculation(
    settings: Settings, max_model_len: int, why: dict[str, str]
) -> Speculation | None:
    """Every value of the config. Raises BadInput where it cannot be served."""
    asked = settings.speculative_config
    if asked is None:
        why["speculative_config"] = "default: one token per sequence and step"
        return None
    depth = asked.num_speculative_tokens or NUM_SPECULATIVE_TOKENS[asked.method]
    if depth + 2 > max_model_len:
        raise BadInput(
            "num_speculative_tokens does not fit in a sequence",
            value=depth,
            limit=f"{max_model_len - 2}: max_model_len {max_model_len} less a prompt and a token",
            fix="lower num_speculative_tokens",
        )
    low, high = _lengths(asked)
    why["speculative_config"] = f"asked for: {asked.method}; tokens stay those of plain decoding"
    return Speculation(
        method=asked.method,
        num_speculative_tokens=depth,
        prompt_lookup_min=low,
        prompt_lookup_max=high,
    )


def _lengths(asked: Speculative) -> tuple[int, int]:
    """Shortest and longest n-gram: one that was named alone bounds the other's default."""
    low, high = asked.prompt_lookup_min, asked.prompt_lookup_max
    low = min(LOOKUP_MIN, high or LOOKUP_MIN) if low is None else low
    high = max(LOOKUP_MAX, low) if high is None else high
    if low > high:
        raise BadInput(
            "prompt_lookup_min exceeds prompt_lookup_max",
            value=low,
            limit=high,
            fix="name a prompt_lookup_max that is not smaller",
        )
    return low, high
