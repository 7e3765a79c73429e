"""A GGUF file as a weight source: memory-mapped, read part by part, blocks packed unchanged.

llama.cpp stores the q and k rows of llama models in another order (its rotary embedding pairs
adjacent rows, ours the two halves of a head); they are reordered as whole rows, so nothing is
rounded.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.checkpoints.gguf.decode_blocks import decode_blocks, nibbles
from ridgeline.engine.checkpoints.gguf.pack_blocks import READERS, packed_blocks
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.blocks import merge_blocks, pack
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_header import EXPERTS, TYPES, read_gguf
from ridgeline.modelspec.model import LinearSpec, ModelSpec

_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "blk.{}.attn_norm",
    "mlp_norm": "blk.{}.ffn_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "o": "blk.{}.attn_output",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "router": "blk.{}.ffn_gate_inp",
    "expert_gate": "blk.{}.ffn_gate" + EXPERTS,
    "expert_up": "blk.{}.ffn_up" + EXPERTS,
    "expert_down": "blk.{}.ffn_down" + EXPERTS,
}
_SIZES = {name: (numbers, nbytes) for name, numbers, nbytes in TYPES.values()}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def name_of(part: Part) -> str:
    """The tensor that holds a part, or a part of every expert."""
    key, _, bias = part.key.partition(".")
    return _NAMES[key].format(part.layer) + (".bias" if bias else ".weight")


class GgufWeights:
    """The tensors of a GGUF file. A context manager like its siblings. Raises BadModel."""

    def __init__(self, name: str, spec: ModelSpec) -> None:
        self._file, self._spec = read_gguf(name), spec
        self._permuted = self._file.metadata["general.architecture"] == "llama"
        with self._file.path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        for part in parts(spec):
            found = self._file.tensors.get(name_of(part))
            if found is None or found.shape != self._whole(part):
                raise BadModel(
                    f"the GGUF file's {name_of(part)} ({part}) is not what its metadata promises",
                    value=None if found is None else list(found.shape),
                    limit=list(self._whole(part)),
                )

    def _whole(self, part: Part) -> tuple[int, ...]:
        """The shape of the tensor that holds a part."""
        if part.expert is None or part.layer is None:
            return part.shape
        return (self._spec.layers[part.layer].mlp.num_experts, *part.shape)

    def _extent(self, part: Part) -> tuple[int, int]:
        """Offset and length of a part's bytes."""
        tensor = self._file.tensors[name_of(part)]
        size = (tensor.end - tensor.begin) * prod(part.shape) // prod(tensor.shape)
        return tensor.begin + (part.expert or 0) * size, size

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, *error: object) -> None:
        """The mapping stays alive as long as tensors point into it."""

    def get(self, part: Part) -> Tensor:
        tensor = self._file.tensors[name_of(part)]
        if tensor.kind in _PLAIN:
            flat = torch.frombuffer(
                self._map,
                dtype=_PLAIN[tensor.kind],
                count=prod(part.shape),
                offset=self._extent(part)[0],
            )
            value = flat.view(part.shape).clone()
        else:
            value = torch.from_numpy(decode_blocks(tensor.kind, self._blocks(part)))
            value = value.view(part.shape)
        return self._rows(value, part)

    def _blocks(self, part: Part) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        tensor = self._file.tensors[name_of(part)]
        nbytes = _SIZES[tensor.kind][1]
        begin, size = self._extent(part)
        flat = np.frombuffer(self._map, np.uint8, size, begin)
        return flat.reshape(-1, nbytes)

    def _order_of(self, part: Part) -> Callable[[Tensor], Tensor]:
        return lambda value: self._rows(value, part)

    def _rows(self, value: Tensor, part: Part) -> Tensor:
        """Rows of q and k in the order of our rotary embedding."""
        key = part.key.partition(".")[0]
        if not self._permuted or key not in ("q", "k") or part.layer is None:
            return value
        attention = self._spec.layers[part.layer].attention
        pairs = value.view(-1, attention.head_dim // 2, 2, *value.shape[1:])
        return pairs.transpose(1, 2).reshape(value.shape)

    def grid(self, part: Part) -> Grid | None:
        """The grid of a Q4_0 tensor; None for other types."""
        if self._file.tensors[name_of(part)].kind != "Q4_0":
            return None
        blocks, shape = self._blocks(part), part.shape
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        q_OI = torch.from_numpy(nibbles(blocks[:, 2:])).view(shape)
        scale_OG = torch.from_numpy(scale).view(shape[0], -1)
        return Grid(self._rows(q_OI, part), self._rows(scale_OG, part), None, 4, 32)

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Packed | None:
        """The blocks as the kernels read them; None for what is computed dense."""
        if spec.format.kind == "dense":
            return None
        by_key = {
            part.key: part
            for part in parts(self._spec)
            if part.layer == layer and part.expert == expert
        }
        tied = keys == ["lm_head"] and self._spec.tied_embeddings
        names = ["embed"] if tied else list(keys)
        found = [by_key[key] for key in names]
        kinds = [self._file.tensors[name_of(part)].kind for part in found]
        if not all(kind in READERS for kind in kinds):
            return None
        pieces = [
            packed_blocks(kind, self._blocks(part), part.shape[0]).rows(self._order_of(part))
            for kind, part in zip(kinds, found, strict=True)
        ]
        whole = merge_blocks(pieces)
        assert whole.format == spec.format, (whole.format, spec.format)
        return pack(whole)
