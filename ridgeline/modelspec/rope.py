"""Rotary frequencies of every kind of scaling, in plain Python floats.

A head's dimension pair (i, i + dim/2) is rotated by position · inv_freq[i]. The kinds extend the
context that a model was trained for: `linear` (kaiokendev, 2023) divides all frequencies;
`dynamic` (NTK-aware, 2023) raises theta with the length; `yarn` (Peng et al., arXiv:2309.00071)
and `llama3` divide only the slow ones; `longrope` (Ding et al., arXiv:2402.13753) has a searched
factor per pair, a short and a long set.

Invariant: equal to transformers' `ROPE_INIT_FUNCTIONS` for the same config and length. `dynamic`
and `longrope` depend on the longest position in use, so keys computed at two lengths do not mix
exactly.
"""

from __future__ import annotations

import math

from ridgeline.modelspec.model import RopeSpec


def inv_freq(rope: RopeSpec, seq_len: int = 0) -> list[float]:
    """Radians per position of each of the dim/2 pairs, for sequences up to `seq_len` tokens."""
    return _FREQUENCIES[rope.kind](rope, seq_len)


def attention_factor(rope: RopeSpec) -> float:
    """The factor that multiplies cos and sin (1 for most kinds)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        return _yarn_attention_factor(rope)
    if rope.kind == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(_original(rope)))
    return 1.0


def depends_on_length(rope: RopeSpec) -> bool:
    """True if `inv_freq` changes with `seq_len`."""
    return rope.kind in ("dynamic", "longrope")


def _powers(rope: RopeSpec, theta: float) -> list[float]:
    return [theta ** -(2 * i / rope.dim) for i in range(rope.dim // 2)]


def _original(rope: RopeSpec) -> int:
    assert rope.original_max_positions is not None, rope.kind
    return rope.original_max_positions


def _default(rope: RopeSpec, seq_len: int) -> list[float]:
    return _powers(rope, rope.theta)


def _linear(rope: RopeSpec, seq_len: int) -> list[float]:
    return [f / rope.factor for f in _powers(rope, rope.theta)]


def _dynamic(rope: RopeSpec, seq_len: int) -> list[float]:
    length = max(seq_len, _original(rope))
    stretch = rope.factor * length / _original(rope) - (rope.factor - 1)
    return _powers(rope, rope.theta * stretch ** (rope.dim / (rope.dim - 2)))


def _llama3(rope: RopeSpec, seq_len: int) -> list[float]:
    return [_llama3_one(rope, f) for f in _powers(rope, rope.theta)]


def _llama3_one(rope: RopeSpec, freq: float) -> float:
    """Keep high frequencies, divide low ones, and interpolate in between."""
    rotations = _original(rope) * freq / (2 * math.pi)
    if rotations < rope.low_freq_factor:
        return freq / rope.factor
    if rotations > rope.high_freq_factor:
        return freq
    share = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - share) * freq / rope.factor + share * freq


def _yarn(rope: RopeSpec, seq_len: int) -> list[float]:
    low, high = _yarn_range(rope)
    out = []
    for i, freq in enumerate(_powers(rope, rope.theta)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(ramp * freq / rope.factor + (1 - ramp) * freq)
    return out


def _yarn_range(rope: RopeSpec) -> tuple[float, float]:
    """The range of pairs over which frequencies go from unchanged to divided by the factor."""

    def pair_with(rotations: float) -> float:
        log_ratio = math.log(_original(rope) / (rotations * 2 * math.pi))
        return rope.dim * log_ratio / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, (high + 0.001 if high == low else high)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope(rope: RopeSpec, seq_len: int) -> list[float]:
    factors = rope.long_factor if seq_len > _original(rope) else rope.short_factor
    return [f / factor for f, factor in zip(_powers(rope, rope.theta), factors, strict=True)]


def _proportional(rope: RopeSpec, seq_len: int) -> list[float]:
    num_turned = int(rope.turned * rope.dim // 2)
    powers = [freq / rope.factor for freq in _powers(rope, rope.theta)[:num_turned]]
    return powers + [0.0] * (rope.dim // 2 - num_turned)


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
