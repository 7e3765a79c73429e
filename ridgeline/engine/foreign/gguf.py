"""A GGUF file as a source of weights: mapped, decoded part by part, Q4_0 packed as it is.

llama.cpp keeps the q and k rows of llama models in another order (its rotation pairs neighbours,
ours the two halves of a head); they are put back, whole rows, so that nothing is rounded.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.foreign.gguf_blocks import decode_blocks, nibbles
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.model.names import Part, parts
from ridgeline.engine.quant.grid import Grid, pack, side_by_side
from ridgeline.errors import BadModel
from ridgeline.spec.gguf import EXPERTS, TYPES, read_gguf
from ridgeline.spec.model import LinearSpec, ModelSpec

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
    """The tensor that holds a part, or a part of each expert."""
    key, _, bias = part.key.partition(".")
    return _NAMES[key].format(part.layer) + (".bias" if bias else ".weight")


class GgufWeights:
    """See the module's head. A context manager, as its siblings. Raises BadModel."""

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
        """Where the bytes of a part begin, and how many they are."""
        tensor = self._file.tensors[name_of(part)]
        size = (tensor.end - tensor.begin) * prod(part.shape) // prod(tensor.shape)
        return tensor.begin + (part.expert or 0) * size, size

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, *error: object) -> None:
        """The map lives as long as the tensors that point into it."""

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

    def _rows(self, value: Tensor, part: Part) -> Tensor:
        """Rows of q and k as we rotate them."""
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
        """Q4_0 as the INT4 kernel reads it; None for what is computed dense."""
        if spec.format.kind == "dense":
            return None
        size = spec.num_in
        by_key = {
            part.key: part
            for part in parts(self._spec)
            if part.layer == layer and part.expert == expert
        }
        tied = keys == ["lm_head"] and self._spec.tied_embeddings
        names = ["embed"] if tied else list(keys)
        grids = [self.grid(by_key[key]) for key in names]
        kept = [grid for grid in grids if grid is not None and grid.shape[1] == size]
        if len(kept) < len(names):
            return None
        return pack(side_by_side(kept))
