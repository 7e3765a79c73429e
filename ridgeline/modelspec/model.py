"""The frozen description of a model that engine, arithmetic, roofline, sizing and simulator share.

Nothing here knows a model's name in a branch: a family (`ridgeline.modelspec.families.registry`) is read into
these records once, and from then on only the records are looked at.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.modelspec.format import Format

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of one attention. `dim` leading dimensions of the head are rotated.

    `factor`, `low_freq_factor`, … are those of the Hugging Face `rope_scaling` of that kind;
    `attention_factor` multiplies cos and sin (yarn, longrope); None means the kind's own default.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class LinearSpec(msgspec.Struct, frozen=True, kw_only=True):
    """y[num_out] = W[num_out, num_in] x[num_in] (+ bias), with W stored in `format`."""

    num_out: int
    num_in: int
    format: Format
    bias: bool = False

    @property
    def num_params(self) -> int:
        return self.num_out * self.num_in + (self.num_out if self.bias else 0)

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.num_out, self.num_in) + (
            4 * self.num_out if self.bias else 0
        )


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one layer. `window` W: a query at position p sees keys p-W+1..p (None: all).

    `scale` multiplies q·k; `softcap` c bounds scores as c·tanh(s/c); `qk_norm` normalises each
    head of q and k (RMS over head_dim) before the rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    o: LinearSpec
    window: int | None = None
    softcap: float | None = None
    qk_norm: bool = False


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Gated feed-forward: down(act(gate(x)) · up(x)); with `num_experts` > 0, a routed set of them.

    The three linears describe ONE expert. `norm_topk` renormalises the chosen experts'
    probabilities.
    """

    activation: Activation
    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    num_experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = True
    router: LinearSpec | None = None


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder block. `sandwich_norms`: Gemma 2/3 normalise each branch's output too."""

    attention: AttentionSpec
    mlp: MlpSpec
    sandwich_norms: bool = False


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer and every technique applied to it.

    `stored_dtype` is what the checkpoint holds; `dtype` is that of embeddings, norms and
    activations as run. `embed_scale` is exact: the model rounds it to its compute dtype.
    `norm_plus_one`: the RMSNorm gain is (1 + w), as Gemma stores it. `embed_scale` multiplies the
    embedding rows. `embed_format`: how the embedding table is packed; None where it is plain; a
    tied LM head of the same format shares it. `rewrites` records the techniques applied, in order,
    each with its reason.
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_positions: int
    norm_eps: float
    lm_head: LinearSpec
    tied_embeddings: bool
    stored_dtype: str
    dtype: str = "float32"
    norm_plus_one: bool = False
    embed_scale: float = 1.0
    final_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    kv_dtype: str = "float32"
    embed_format: Format | None = None
    rewrites: tuple[str, ...] = ()
