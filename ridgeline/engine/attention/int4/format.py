"""Groups of 32 tokens in 4 bits: keys with a range per channel, values per token and 32 channels.

    key      x[t, d] ≈ code · scale[d] + min[d]            scale and min over the 32 tokens
    value    x[t, d] ≈ code · scale[t, c] + min[t, c]      c = d // 32; both over 32 channels

Keys have a few channels that are large in every token, values have not (KIVI, Liu et al. 2024,
arXiv 2402.02750, section 3), so each is divided where its outliers stay among themselves. A range
takes two float16, so a number takes 5 bits in all, and keys and values take the same.

A group can be coded only when its last token is known. Until then its tokens are *recent* and
stored in INT8 by the rules of `CodedKv`; `cache.py` says where. A group is coded from these INT8
rows, so that its bytes do not depend on how many tokens were computed at once.

Tiles (one block of one head) hold words of eight codes, in the order 0 4 1 5 | 2 6 3 7 of their
low and high halves, so that masks and shifts leave pairs of neighbours; ranges follow:

    keys     [D/8, B, 4 bytes]  scales [D]       mins [D]
    values   [B/8, D, 4 bytes]  scales [D/32, B] mins [D/32, B]

Shape legend: X any axes, K key heads, B = 32 tokens of a block, D head_dim, W bytes of a tile over
B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.attention.kv_format import CodedKv
from ridgeline.modelspec.format import KV_GROUP

LEVELS = 15
LARGEST = 65504.0  # of float16, in which ranges are stored
LOW, HIGH = (0, 4, 1, 5), (2, 6, 3, 7)


@dataclass(frozen=True)
class Int4Kv(CodedKv):
    """Recent tokens as INT8 rows (the methods of `CodedKv`), groups of tokens in 4 bits."""

    name: str = "int4"

    def width(self, head_dim: int) -> int:
        """Bytes of a group's tile, over its tokens."""
        return head_dim // 2 + 4 * head_dim // KV_GROUP

    def recent_width(self, head_dim: int) -> int:
        """Bytes of a recent row."""
        return super().width(head_dim)


def encode_groups(kv_X2KBD: Tensor) -> Tensor:
    """tiles_X2KBW of whole groups of keys and values."""
    keys, values = kv_X2KBD.float().unbind(-4)
    *axes, size, _ = keys.shape
    low, top = keys.amin(-2, keepdim=True), keys.amax(-2, keepdim=True)
    key_codes, key_range = _codes(keys, low, top)
    chunks = values.unflatten(-1, (-1, KV_GROUP))
    low, top = chunks.amin(-1, keepdim=True), chunks.amax(-1, keepdim=True)
    value_codes, value_range = _codes(chunks, low, top)
    key_words = _pack(key_codes.unflatten(-1, (-1, 8))).transpose(-3, -2)
    value_words = _pack(value_codes.flatten(-2).transpose(-1, -2).unflatten(-1, (-1, 8)))
    value_words = value_words.transpose(-3, -2)
    value_range = [part.squeeze(-1).transpose(-1, -2) for part in value_range]
    key_tile = _tile(key_words, key_range, len(axes))
    value_tile = _tile(value_words, value_range, len(axes))
    both_X2KP = torch.stack([key_tile, value_tile], -3)
    return both_X2KP.view(*both_X2KP.shape[:-1], size, -1)


def decode_groups(tiles_X2KBW: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """kv_X2KBD of whole groups."""
    size = tiles_X2KBW.shape[-2]
    num_codes, num_chunks = size * head_dim // 2, head_dim // KV_GROUP
    key_tile, value_tile = tiles_X2KBW.flatten(-2).unbind(-3)
    head_axes = key_tile.shape[:-1]
    words = key_tile[..., :num_codes].reshape(*head_axes, head_dim // 8, size, 4)
    codes = _unpack(words).transpose(-3, -2).flatten(-2)
    scale, low = _range(key_tile[..., num_codes:], (1, head_dim))
    keys = codes * scale + low
    words = value_tile[..., :num_codes].reshape(*head_axes, size // 8, head_dim, 4)
    codes = _unpack(words).transpose(-3, -2).flatten(-2).transpose(-1, -2)
    scale, low = _range(value_tile[..., num_codes:], (num_chunks, size))
    scale, low = (part.transpose(-1, -2).unsqueeze(-1) for part in (scale, low))
    values = (codes.unflatten(-1, (num_chunks, KV_GROUP)) * scale + low).flatten(-2)
    return torch.stack([keys, values], -4).to(dtype)


def _codes(x: Tensor, low: Tensor, top: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Codes, and the range (scale, least) as stored."""
    low16 = low.clamp(-LARGEST, LARGEST).half()
    scale16 = ((top - low) / LEVELS).clamp(max=LARGEST).half()
    scale = scale16.float()
    inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)
    codes = ((x - low16.float()) * inverse).round().clamp(0, LEVELS).to(torch.uint8)
    return codes, [scale16, low16]


def _pack(codes_X8: Tensor) -> Tensor:
    low, high = codes_X8[..., LOW], codes_X8[..., HIGH]
    return low | high << 4


def _unpack(words_X4: Tensor) -> Tensor:
    """codes_X8 in float32."""
    words = words_X4.view(torch.uint8)
    both = torch.cat([words & LEVELS, words >> 4], -1)
    order = sorted(range(8), key=(*LOW, *HIGH).__getitem__)
    return both[..., order].float()


def _tile(words: Tensor, ranges: list[Tensor], num_axes: int) -> Tensor:
    parts = [words, *(part.contiguous().view(torch.uint8) for part in ranges)]
    return torch.cat([part.flatten(num_axes) for part in parts], -1).view(torch.int8)


def _range(stored: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    scale, low = stored.contiguous().view(torch.float16).float().chunk(2, -1)
    return scale.unflatten(-1, shape), low.unflatten(-1, shape)
