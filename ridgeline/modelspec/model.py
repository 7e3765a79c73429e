"""The frozen description of a model, shared by engine, cost model, roofline, planner and simulator.

No code branches on a model's name: a family (`ridgeline.modelspec.families`) turns a config.json
into these records, and everything downstream reads only the records.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.modelspec.format import Format

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu", "xielu"]
NormPlaces = Literal["before", "both", "after"]
Scoring = Literal["softmax", "sigmoid"]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of one attention; rotates the first `dim` dimensions of each head (0: none).

    Dimension i turns with i + dim/2, or, where the embedding is `interleaved`, 2i with 2i + 1.

    `factor`, `low_freq_factor`, … are the fields of Hugging Face's `rope_scaling` of that kind.
    `attention_factor` multiplies cos and sin (yarn, longrope); None means the kind's default.
    `query_floor` F, `query_offset` o and `query_scale` s multiply the query at position p by
    1 + s·log(1 + floor((p + o) / F)) (arXiv:2501.19399; in Llama 4 where nothing rotates, in
    Ministral 3 after the rotation). `proportional`: the share `turned` of the pairs turns, with the
    frequencies of the whole head (Gemma 4).
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
    interleaved: bool = False
    query_floor: int | None = None
    query_offset: int = 0
    turned: float = 1.0
    query_scale: float = 0.0


class LinearSpec(msgspec.Struct, frozen=True, kw_only=True):
    """y[num_out] = W[num_out, num_in] x[num_in] (+ bias), with W stored in `format`."""

    num_out: int
    num_in: int
    format: Format
    bias: bool = False

    @property
    def num_weights(self) -> int:
        """Entries of W."""
        return self.num_out * self.num_in

    @property
    def num_params(self) -> int:
        """Entries of W and of the bias."""
        return self.num_weights + (self.num_out if self.bias else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of W in its format, and of a float32 bias."""
        return self.format.nbytes(self.num_out, self.num_in) + (
            4 * self.num_out if self.bias else 0
        )


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    The keys and values of all heads are projected up from one latent vector of `rank` numbers per
    token; `rope_dim` further numbers hold the rotated part of the key, which all heads share. Only
    these rank + rope_dim numbers are cached. `kv_down` produces them. `q_down` compresses the
    query (None: it is not compressed). What either makes is normalised with `norm_eps`, but for the
    rotated part.
    """

    rank: int
    rope_dim: int
    kv_down: LinearSpec
    q_down: LinearSpec | None = None
    norm_eps: float = 1e-6


class DeltaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A gated delta net in place of attention (arXiv:2412.06464; Qwen3-Next, Qwen3.5).

    A sequence keeps a matrix [key_dim, value_dim] per value head and the last `conv_size` - 1
    inputs of a convolution over q, k and v, whatever its length. `z` gates the output, `b` gives
    the write strength and `a` the decay of each value head. Value heads of a key head stand next to
    each other; where they are `tiled`, the first one of every key head comes first (GGUF files).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    z: LinearSpec
    b: LinearSpec
    a: LinearSpec
    tiled: bool = False

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: those of q, k and v."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return 2 * keys + values

    @property
    def state_size(self) -> int:
        """Numbers that a sequence keeps."""
        matrices = self.num_value_heads * self.key_dim * self.value_dim
        return matrices + self.conv_width * (self.conv_size - 1)


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one layer. `window` W: a query at position p sees keys p-W+1..p (None: all).
    `chunk` C: it sees the keys of its own chunk, from p//C*C on (Llama 4).

    `scale` multiplies q·k; `softcap` c bounds scores as c·tanh(s/c); `qk_norm` normalises each
    head of q and k (RMS over head_dim) before the rotation, or with `qk_norm_rows` q and k each as
    one row over all heads; with `qk_norm_heads` the norm subtracts the mean and each head has its
    own gain (Command R+), and with `qk_norm_plain` there is no gain (Llama 4). `sinks` adds one
    learned logit per head to the softmax. With
    `shares_kv` the layer has no k and v projections and reads the KV cache of an earlier layer,
    whose projections `k` and `v` then describe: the last one before it that has the same window and
    keeps a cache. `v_norm`: values are RMS-normalised without a gain; `v_is_k`: they are the keys
    before their norm, and the layer has no v projection (Gemma 4). With `latent`, q, k and v are
    the up-projections, `head_dim` is the size of a query head, and `num_kv_heads` is 1: the latent
    vector serves every head. With `gated`, `q` also computes a gate for the output, head by head.
    With `delta` the layer is no attention: it has no KV cache, `num_kv_heads` is 0, its heads are
    the value heads.
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
    chunk: int | None = None
    softcap: float | None = None
    qk_norm: bool = False
    qk_norm_rows: bool = False
    qk_norm_heads: bool = False
    qk_norm_plain: bool = False
    sinks: bool = False
    shares_kv: bool = False
    latent: LatentSpec | None = None
    gated: bool = False
    delta: DeltaSpec | None = None
    v_norm: bool = False
    v_is_k: bool = False


class RoutingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a router's logits become chosen experts and their weights.

    Scores are the softmax or the sigmoids (`scoring`) of the logits. With a `correction` a learned
    number per expert is added where experts are chosen, but not to their weights (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2). With `num_groups` > 1 only the experts of the
    `groups_per_token` best groups can be chosen; a group is as good as its best expert, or with
    sigmoids as the sum of its two best. `scale` multiplies the weights. `weighs_inputs`: weights
    multiply the experts' inputs in place of their outputs (Llama 4).
    """

    scoring: Scoring = "softmax"
    correction: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    weighs_inputs: bool = False


class SharedExpertSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An expert that every token passes through; the sigmoid of `router`, if any, multiplies it."""

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    router: LinearSpec | None = None


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Feed-forward layer: down(act(gate(x)) · up(x)), or down(act(up(x))) where it is not `gated`.

    `clamped_swiglu` (gpt-oss) bounds gate and up by 7 and is down(g · sigmoid(1.702 g) · (u + 1)).
    `xielu` (Apertus, arXiv:2411.13010) has two learned numbers per layer.

    With `num_experts` > 0 a router picks `experts_per_token` of them for each token, by `routing`;
    every token also passes through the `shared` one. The three linears then describe ONE expert.
    `norm_topk` renormalises the chosen experts' scores. With `own_norms` (Gemma 4) the shared
    expert and the routed ones normalise their inputs and outputs apart, the router reads a third
    norm of the same state, and a learned number per expert multiplies its weight.

    With a `sparsity` s > 0 the gate keeps the part of each row's values that exceeds the quantile s
    of a normal distribution with the row's mean and deviation (Gemma 3n).
    """

    activation: Activation
    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    gated: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    shared: SharedExpertSpec | None = None
    routing: RoutingSpec = RoutingSpec()
    norm_topk: bool = True
    router: LinearSpec | None = None
    own_norms: bool = False
    sparsity: float = 0.0


class LayerInputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An input of each layer that depends on the token alone (per-layer embeddings, Gemma 3n).

    A table has a row of `size` numbers per layer for each of `vocab_size` tokens. The sum of this
    row and a projection of the token's embedding multiplies the `gate`, and `up` leads the product
    back to the hidden size. `table_format`: of a packed table (None: as the checkpoint has it).
    """

    vocab_size: int
    size: int
    gate: LinearSpec
    up: LinearSpec
    table_format: Format | None = None


class AltUpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Several hidden states, of which a layer computes one (AltUp, arXiv:2301.13310).

    The layer predicts `num_streams` states as mixtures of the previous ones, runs on the one
    numbered `active`, and corrects all by what it changed there. `scales_active`: a learned gain
    precedes the per-layer input. `laurel_down` and `laurel_up` are a low-rank branch parallel to
    attention (LAuReL, arXiv:2411.07501).
    """

    num_streams: int
    active: int
    scales_active: bool
    laurel_down: LinearSpec
    laurel_up: LinearSpec


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder block.

    `norms`: each branch's input is normalised ("before"), its output ("after", OLMo 2), or both
    (Gemma 2). `residual_scale` multiplies a branch's output before it is added (Granite). In a
    `parallel` block attention and MLP read the same normalised input: it has one norm (Cohere).
    `layer_input` and `altup` as in Gemma 3n; `output_scale`: a learned number multiplies the
    layer's output (Gemma 4).
    """

    attention: AttentionSpec
    mlp: MlpSpec
    norms: NormPlaces = "before"
    residual_scale: float = 1.0
    parallel: bool = False
    layer_input: LayerInputSpec | None = None
    altup: AltUpSpec | None = None
    output_scale: bool = False


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer and every technique applied to it.

    `stored_dtype` is the dtype of the checkpoint; `dtype` that of embeddings, norms and activations
    at run time. `norm_plus_one`: the RMSNorm gain is 1 + w (Gemma); `norm_centred`: norms subtract
    the mean first (LayerNorm); `norm_bias`: they have a bias, too. `embed_scale` multiplies
    embedding rows and is rounded to the compute dtype by the model; `logit_scale` multiplies logits
    before `final_softcap` bounds them. `embed_format` is the
    format of a packed embedding table (None: plain); a tied LM head of the same format shares the
    table. `learned_positions` counts rows of a position table (0: none). `rewrites` lists the
    techniques applied, in order, each with its reason. `unsupported` says why the engine cannot run
    the model; planning still can ("": the engine runs it).
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
    norm_centred: bool = False
    norm_bias: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    kv_dtype: str = "float32"
    embed_format: Format | None = None
    learned_positions: int = 0
    rewrites: tuple[str, ...] = ()
    unsupported: str = ""
