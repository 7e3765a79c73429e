"""The record of one model family: transformers' defaults, and the features that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.modelspec.families import layer_kinds as kinds
from ridgeline.modelspec.families.config_fields import ConfigFields
from ridgeline.modelspec.families.rope_config import TOP_LEVEL, RopeFields
from ridgeline.modelspec.model import Activation, AttentionSpec, LayerSpec, NormPlaces, Scoring


@dataclass(frozen=True, kw_only=True)
class MoeFields:
    """The config fields that describe a family's experts.

    `norm_topk_key` None: scores of the chosen experts are always renormalised, but where they
    weigh the experts' inputs (`weighs_inputs`). `top_k_key`: how many a token uses.
    `routed_layers`: which layers have experts (None: all). `bias`: router and experts have biases.
    The shared expert has the size `shared_size_key`, or that of `shared_count_key` experts; with
    `shared_router` a sigmoid multiplies it. `scale_key` multiplies the weights; `groups`: fields
    `n_group` and `topk_group` limit the choice where it holds. `scoring`, `correction`: as in
    `RoutingSpec`.
    """

    num_experts_key: str
    expert_size_key: str
    top_k_key: str = "num_experts_per_tok"
    norm_topk_key: str | None = None
    routed_layers: Callable[[ConfigFields], list[bool]] | None = None
    bias: bool = False
    shared_size_key: str | None = None
    shared_count_key: str | None = None
    shared_router: bool = False
    scoring: Scoring = "softmax"
    correction: bool = False
    scale_key: str | None = None
    groups: Callable[[ConfigFields], bool] | None = None
    weighs_inputs: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    `defaults`: transformers' defaults, which also list the understood fields; None means "derive
    from other fields".
    `qkv_bias`, `o_bias`: whether these projections have a bias, or the field that says so;
    `mlp_bias`: the field that says so of the feed-forward layers. `qk_norm`: whether heads of q and
    k are normalised, or the field that says so. `latent`: attention is latent, by the fields
    `kv_lora_rank`, `q_lora_rank` and those of head sizes. `rotated`: which layers rotate q
    and k, given the kinds of all layers (None: all). `activation`: the one that the field
    `activation_key` does not name. `qk_norm_key`: the field that says whether each head is
    normalised with its own gain. `parallel`: blocks are parallel; `layer_norm`: norms are centred.
    `zero_centred_norms`: gains are stored as their difference from 1. `gated_attention`: q computes
    a gate of the output, too. `mlp_size_key`: the size of dense feed-forward layers.
    `adjust_attention` adds what follows from a layer's kind, `adjust_layers` what follows from its
    place. `mlp_size` reads a size that is no number. `scaled_embedding`: embeddings are multiplied
    by the root of their size, as with `gemma_norms`.
    `saved_as`: another class under which transformers saves it.
    `fixed`: fields that must have one of the
    listed values. `aliases`: other names of a field.
    """

    architecture: str
    saved_as: str | None = None
    defaults: Mapping[str, Any]
    layer_kinds: kinds.LayerKinds = kinds.all_full
    rotated: Callable[[ConfigFields, list[str]], list[bool]] | None = None
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: str = "mlp_bias"
    activation_key: str = "hidden_act"
    activation: Activation | None = None
    gated: bool = True
    rope: RopeFields = field(default_factory=RopeFields)
    moe: MoeFields | None = None
    latent: bool = False
    qk_norm: bool | str = False
    qk_norm_rows: bool = False
    qk_norm_key: str | None = None
    sinks: bool = False
    parallel: bool = False
    layer_norm: bool = False
    gemma_norms: bool = False
    zero_centred_norms: bool = False
    gated_attention: bool = False
    mlp_size_key: str = "intermediate_size"
    adjust_attention: Callable[[ConfigFields, AttentionSpec, str], AttentionSpec] | None = None
    adjust_layers: Callable[[ConfigFields, tuple[LayerSpec, ...]], tuple[LayerSpec, ...]] | None = (
        None
    )
    mlp_size: Callable[[ConfigFields], int] | None = None
    scaled_embedding: bool = False
    norms: NormPlaces = "before"
    gelu_is_tanh: bool = False
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def understood(self) -> frozenset[str]:
        """The config.json fields that this family interprets."""
        return frozenset(self.defaults) | frozenset(TOP_LEVEL) | self.aliases.keys()


COMMON: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
"""Defaults of fields that nearly every family has."""
