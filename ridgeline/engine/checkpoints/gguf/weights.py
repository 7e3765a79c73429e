"""A GGUF model as a weight source: memory-mapped, read part by part, blocks packed unchanged.

llama.cpp stores the q and k rows of some families in another order (its rotary embedding pairs
adjacent rows, ours the two halves of a head); they are reordered as whole rows, so nothing is
rounded.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from string import digits

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.checkpoints.family_layouts import XIELU_PARTS
from ridgeline.engine.checkpoints.gguf.decode_blocks import decode_blocks, nibbles
from ridgeline.engine.checkpoints.gguf.pack_blocks import READERS, packed_blocks
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.blocks import merge_blocks, pack
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import (
    EXPERTS,
    PREDICTION,
    SAFETENSORS,
    Architecture,
    architecture_of,
)
from ridgeline.modelspec.checkpoints.gguf_header import TYPES, Gguf, GgufTensor, read_gguf
from ridgeline.modelspec.checkpoints.gguf_spec import FUSED, tensor_name
from ridgeline.modelspec.model import LinearSpec, ModelSpec

_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "blk.{}.attn_norm",
    "mlp_norm": "blk.{}.ffn_norm",
    "after_attention_norm": "blk.{}.post_attention_norm",
    "after_mlp_norm": "blk.{}.post_ffw_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "o": "blk.{}.attn_output",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "sinks": "blk.{}.attn_sinks",
    "delta_q": "blk.{}.attn_q",
    "delta_k": "blk.{}.attn_k",
    "delta_v": "blk.{}.attn_v",
    "delta_z": "blk.{}.attn_gate",
    "delta_b": "blk.{}.ssm_beta",
    "delta_a": "blk.{}.ssm_alpha",
    "delta_o": "blk.{}.ssm_out",
    "delta_conv": "blk.{}.ssm_conv1d",
    "delta_a_log": "blk.{}.ssm_a",
    "delta_dt_bias": "blk.{}.ssm_dt",
    "delta_gain": "blk.{}.ssm_norm",
    "q_down": "blk.{}.attn_q_a",
    "q_down_norm": "blk.{}.attn_q_a_norm",
    "kv_down": "blk.{}.attn_kv_a_mqa",
    "kv_down_norm": "blk.{}.attn_kv_a_norm",
    "kv_up": "blk.{}.attn_kv_b",
    "k_up": "blk.{}.attn_k_b",
    "v_up": "blk.{}.attn_v_b",
    "router": "blk.{}.ffn_gate_inp",
    "expert_gate": "blk.{}.ffn_gate" + EXPERTS,
    "expert_up": "blk.{}.ffn_up" + EXPERTS,
    "expert_down": "blk.{}.ffn_down" + EXPERTS,
    "router_correction": "blk.{}.exp_probs_b",
    "router_norm": "blk.{}.ffn_gate_inp",
    "expert_scales": "blk.{}.ffn_down" + EXPERTS,
    "expert_norm": "blk.{}.pre_ffw_norm_2",
    "after_shared_norm": "blk.{}.post_ffw_norm_1",
    "after_expert_norm": "blk.{}.post_ffw_norm_2",
    "shared_gate": "blk.{}.ffn_gate_shexp",
    "shared_up": "blk.{}.ffn_up_shexp",
    "shared_down": "blk.{}.ffn_down_shexp",
    "shared_router": "blk.{}.ffn_gate_inp_shexp",
    "input_table": "per_layer_token_embd",
    "input_projection": "per_layer_model_proj",
    "input_projection_norm": "per_layer_proj_norm",
    "input_gate": "blk.{}.inp_gate",
    "input_up": "blk.{}.proj",
    "input_norm": "blk.{}.post_norm",
    "output_scale": "blk.{}.layer_output_scale",
    "laurel_down": "blk.{}.laurel_l",
    "laurel_up": "blk.{}.laurel_r",
    "laurel_norm": "blk.{}.laurel_post_norm",
    "altup_router": "blk.{}.altup_router",
    "altup_router_norm": "blk.{}.altup_router_norm",
    "altup_prediction": "blk.{}.altup_predict_coef",
    "altup_correction": "blk.{}.altup_correct_coef",
    "altup_gain": "blk.{}.altup_correct_scale",
}
_BIASES = ("router_correction", "delta_dt_bias")
_SCALES = ("router_norm", "expert_scales")
_STACKED = {"stream": "altup_proj", "unstream": "altup_unembd_proj"}
"""Parts with a number, which one tensor holds after one another."""
_SIZES = {name: (numbers, nbytes) for name, numbers, nbytes in TYPES.values()}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def name_of(part: Part, row: Architecture) -> str:
    """The tensor of a part, or of a part of every expert, where no tensor holds several."""
    key, _, bias = part.key.partition(".")
    if (numbered := key.rstrip(digits)) in _STACKED:
        return _STACKED[numbered] + ".weight"
    own = row.tensors.get(key)
    name = _NAMES[key].format(part.layer) if own is None else f"blk.{part.layer}.{own}"
    if key == "delta_a_log":
        return name
    if key in _SCALES:
        return name + ".scale"
    return name + (".bias" if bias or key in _BIASES else ".weight")


def stored_name(part: Part, file: Gguf) -> str:
    """The tensor of the file that holds a part."""
    name = name_of(part, architecture_of(file))
    if part.layer is None:
        return name
    return tensor_name(name.removeprefix(f"blk.{part.layer}."), part.layer, file)


def refuse_unexplained(file: Gguf, explained: set[str]) -> None:
    """Raise BadModel for a tensor that is neither a part of the model nor known to be harmless."""
    for name in sorted(file.tensors.keys() - explained):
        module = name.split(".")[2] if name.startswith("blk.") else name
        if name not in HARMLESS and module not in HARMLESS:
            raise BadModel(
                "the GGUF file holds a tensor that its metadata does not explain",
                value=f"{name} {list(file.tensors[name].shape)}",
                fix=SAFETENSORS,
            )


HARMLESS = {
    "rope_freqs.weight": "read with the metadata",
    "rope_factors_long.weight": "read with the metadata",
    "rope_factors_short.weight": "read with the metadata",
    "rope_freqs": "frequencies that follow from the metadata, in every layer of old files",
    "attn_rot_embd": "frequencies that follow from the metadata, in every layer of old files",
}
"""Tensors that hold no part of the decoder, by name or by the name after the layer's; and why."""


class GgufWeights:
    """The tensors of a GGUF model. A context manager like its siblings. Raises BadModel."""

    def __init__(self, name: str, spec: ModelSpec) -> None:
        self._file, self._spec = read_gguf(name), spec
        self._row = architecture_of(self._file)
        self._maps: dict[Path, mmap.mmap] = {}
        for path in {tensor.path for tensor in self._file.tensors.values()}:
            with path.open("rb") as stream:
                self._maps[path] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self._by_place: dict[tuple[int | None, int | None], list[Part]] = {}
        for part in parts(spec):
            if part.key in XIELU_PARTS:
                self._xielu(part)
            else:
                place = self._by_place.setdefault((part.layer, part.expert), [])
                place += self._halves(part) if self._is_split(part) else [part]
        self._check()

    def _check(self) -> None:
        explained = {
            f"blk.{i}.{name}.weight"
            for i, layer in enumerate(self._spec.layers)
            if layer.attention.shares_kv
            for name in ("attn_k", "attn_k_norm", "attn_v")
        }
        for siblings in self._by_place.values():
            for part in siblings:
                name = stored_name(part, self._file)
                explained.add(name)
                found, whole = self._file.tensors.get(name), self._whole(part)
                # a matrix of one row may be stored as a vector
                if found is None or found.shape not in (whole, whole[whole[:1] == (1,) :]):
                    raise BadModel(
                        f"the GGUF file's {name} ({part}) does not match its metadata",
                        value=None if found is None else list(found.shape),
                        limit=list(whole),
                    )
        beyond = tuple(f"blk.{i}." for i in range(len(self._spec.layers), self._depth()))
        explained |= {name for name in self._file.tensors if name.startswith(beyond)}
        refuse_unexplained(self._file, explained)

    def _xielu(self, part: Part) -> float:
        """A number of a layer's activation, which the file has in its metadata."""
        key = part.key.replace("xielu_", "xielu.")
        numbers = self._file.metadata.get(key)
        depth = len(self._spec.layers)
        if not isinstance(numbers, list) or len(numbers) != depth or part.layer is None:
            raise BadModel(
                f"the GGUF key {key} must be a list of one number per layer",
                value=str(numbers)[:80],
                limit=depth,
            )
        return float(numbers[part.layer])

    def _is_split(self, part: Part) -> bool:
        """Whether the up-projection of latent attention is two tensors, as since April 2025."""
        whole = f"blk.{part.layer}.attn_kv_b.weight"
        return part.key == "kv_up" and whole not in self._file.tensors

    def _halves(self, part: Part) -> list[Part]:
        """Keys [heads, rank, size], which are transposed, and values [heads, size, rank]."""
        assert part.layer is not None
        attention = self._spec.layers[part.layer].attention
        heads, rank = attention.num_heads, part.shape[1]
        k_shape = (heads, rank, attention.k.num_out // heads)
        v_shape = (heads, attention.v.num_out // heads, rank)
        return [Part("k_up", k_shape, part.layer), Part("v_up", v_shape, part.layer)]

    def _depth(self) -> int:
        """The number of layers with those that predict further tokens."""
        start = str(self._file.metadata["general.architecture"])
        further = self._file.metadata.get(f"{start}.{PREDICTION}", 0)
        return len(self._spec.layers) + (further if isinstance(further, int) else 0)

    def _whole(self, part: Part) -> tuple[int, ...]:
        """The shape of the tensor that holds a part."""
        if part.key.rstrip(digits) in _STACKED:
            return (len(self._stack(part)), *part.shape)
        if part.key == "delta_conv":
            return part.shape[::2]
        rows = sum(other.shape[0] for other in self._fused(part)), *part.shape[1:]
        if part.expert is None or part.layer is None:
            return rows
        return (self._spec.layers[part.layer].mlp.num_experts, *rows)

    def _stack(self, part: Part) -> list[Part]:
        """The parts of the same key with other numbers, in order."""
        key = part.key.rstrip(digits)
        siblings = self._by_place[part.layer, part.expert]
        return [other for other in siblings if other.key.rstrip(digits) == key]

    def _fused(self, part: Part) -> list[Part]:
        """The parts whose rows one tensor holds, in its order."""
        module, kind = stored_name(part, self._file).rsplit(".", 2)[-2:]
        inside = FUSED.get(module, ())
        siblings = self._by_place[part.layer, part.expert]
        by_name = {name_of(other, self._row).split(".", 2)[-1]: other for other in siblings}
        names = [f"{name}.{kind}" for name in inside]
        alone = any(f"blk.{part.layer}.{n}" in self._file.tensors for n in names[:1])
        if alone or not names or not all(name in by_name for name in names):
            return [part]
        return [by_name[name] for name in names]

    def _tensor(self, part: Part) -> GgufTensor:
        return self._file.tensors[stored_name(part, self._file)]

    def _extent(self, part: Part) -> tuple[int, int]:
        """Offset and length of a part's bytes."""
        tensor = self._tensor(part)
        row = (tensor.end - tensor.begin) * prod(part.shape[1:]) // prod(tensor.shape)
        in_stack = part.key.rstrip(digits) in _STACKED
        fused = self._stack(part) if in_stack else self._fused(part)
        before = sum(other.shape[0] for other in fused[: fused.index(part)])
        before += (part.expert or 0) * sum(other.shape[0] for other in fused)
        return tensor.begin + before * row, part.shape[0] * row

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, *error: object) -> None:
        """The mapping stays alive as long as tensors point into it."""

    def get(self, part: Part) -> Tensor:
        if part.key in XIELU_PARTS:
            return torch.full(part.shape, self._xielu(part))
        if self._is_split(part):  # rows of keys and values alternate by head
            k_HRK, v_HVR = (self.get(half) for half in self._halves(part))
            return torch.cat((k_HRK.transpose(1, 2), v_HVR), dim=1).reshape(part.shape)
        if part.key.startswith("delta_"):
            return self._delta(part)
        return self._stored(part)

    def _delta(self, part: Part) -> Tensor:
        """A part of a delta net."""
        assert part.layer is not None
        delta = self._spec.layers[part.layer].attention.delta
        assert delta is not None
        if part.key in ("delta_a", "delta_b") and stored_name(part, self._file).endswith(
            "ssm_ba.weight"
        ):
            places = [self._stored(other) for other in self._fused(part)]
            groups = torch.cat(places).view(delta.num_key_heads, 2, -1, part.shape[1])
            return groups[:, int(part.key == "delta_a")].reshape(part.shape).clone()
        value = self._stored(part)
        return torch.log(-value) if part.key == "delta_a_log" else value  # stored as the decay

    def _stored(self, part: Part) -> Tensor:
        """A part as the file has it, but for the order of q and k."""
        tensor = self._tensor(part)
        if tensor.kind in _PLAIN:
            flat = torch.frombuffer(
                self._maps[tensor.path],
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
        tensor = self._tensor(part)
        begin, size = self._extent(part)
        flat = np.frombuffer(self._maps[tensor.path], np.uint8, size, begin)
        return flat.reshape(-1, _SIZES[tensor.kind][1])

    def _order_of(self, part: Part) -> Callable[[Tensor], Tensor]:
        return lambda value: self._rows(value, part)

    def _rows(self, value: Tensor, part: Part) -> Tensor:
        """Rows of q and k in the order of our rotary embedding."""
        key = part.key.partition(".")[0]
        if not self._row.paired_rows or key not in ("q", "k") or part.layer is None:
            return value
        attention = self._spec.layers[part.layer].attention
        pairs = value.view(-1, attention.head_dim // 2, 2, *value.shape[1:])
        return pairs.transpose(1, 2).reshape(value.shape)

    def grid(self, part: Part) -> Grid | None:
        """The grid of a Q4_0 tensor; None for other types."""
        if self._tensor(part).kind != "Q4_0":
            return None
        blocks, shape = self._blocks(part), part.shape
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        q_OI = torch.from_numpy(nibbles(blocks[:, 2:])).view(shape)
        scale_OG = torch.from_numpy(scale).view(shape[0], -1)
        return Grid(self._rows(q_OI, part), self._rows(scale_OG, part), None, 4, 32)

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Packed | None:
        """The blocks as the kernels read them; None for dense weights."""
        if spec.format.kind == "dense":
            return None
        by_key = {part.key: part for part in self._by_place[layer, expert]}
        tied = keys == ["lm_head"] and self._spec.tied_embeddings
        names = ["embed"] if tied else list(keys)
        found = [by_key[key] for key in names]
        kinds = [self._tensor(part).kind for part in found]
        if not all(kind in READERS for kind in kinds):
            return None
        pieces = [
            packed_blocks(kind, self._blocks(part), part.shape[0]).rows(self._order_of(part))
            for kind, part in zip(kinds, found, strict=True)
        ]
        whole = merge_blocks(pieces)
        assert whole.format == spec.format, (whole.format, spec.format)
        return pack(whole)
