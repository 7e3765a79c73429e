"""EAGLE: one layer that continues from the target's last hidden state, token by token.

At each position the layer takes the embedding of its token and the state of the position before,
and predicts the target's last hidden state; the target's own LM head turns it into a distribution
over the next token. The first draft starts from a true state, further ones from the layer's own
output: unlike Medusa's heads, each sees the tokens drafted before it.

  position     t-1            t              n-1          n
  token               x_t         …      x_n-1 ──┐     draft 1 ──┐
  state       h_t-1 ───┴─▶ (h_t)  …  h_n-2 ──────┴▶ f_n-1 ───────┴▶ f_n ─▶ LM head ─▶ draft 2

It caches its own keys and values (one layer) of true states; drafts write behind them and are
overwritten. It reads as many of the latest states as the runner keeps (`WINDOW`): if a sequence
starts with a prefix hit, its context begins after the hit.

Source: EAGLE (Li et al. 2024, arXiv 2401.15077); trained on its own output for further positions as
in EAGLE-3 (Li et al. 2025, arXiv 2503.01840) by `ridgeline train-drafter --kind eagle`.

Invariants: those of the drafter interface; sampled drafts are verified by rejection. When it loses:
one pass per draft, each with the whole LM head: on a model of few layers that is a third of the
model's own pass.

Shape suffixes: T rows of a pass, S sequences, R rows of one sequence, C hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.base import Attention
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.model.layers import AttentionLayer, Block, GatedMlp, RmsNorm, no_norm
from ridgeline.engine.model.layers import no_qk_norm as plain
from ridgeline.engine.model.rope import RopeTables
from ridgeline.engine.quant.dense import DenseLinear
from ridgeline.engine.sampling.argmax_head import make_argmax_head
from ridgeline.engine.sampling.verify.verifier import DraftDistributions
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.checkpoint import DrafterConfig, check_target, read_tensors
from ridgeline.engine.speculate.drafters.hidden_states import HiddenStates
from ridgeline.engine.speculate.drafters.sampling import (
    PartialDraft,
    all_argmax,
    finished_drafts,
    numbers_for,
    take,
    take_named,
)
from ridgeline.errors import BadModel
from ridgeline.modelspec.format import dense
from ridgeline.modelspec.model import (
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
)

WINDOW = 256  # states of a sequence that wait to be read


class EagleShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layer: plain attention and a gated feed-forward (silu), without biases."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    norm_eps: float

    def shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors, for a target of hidden size `size`."""
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        inner = self.intermediate_size
        return {
            "fc.weight": (size, 2 * size),
            "q.weight": (wide, size),
            "k.weight": (narrow, size),
            "v.weight": (narrow, size),
            "o.weight": (size, wide),
            "gate.weight": (inner, size),
            "up.weight": (inner, size),
            "down.weight": (size, inner),
            "attention_norm.weight": (size,),
            "mlp_norm.weight": (size,),
            "norm.weight": (size,),
        }

    def spec(self, target: ModelSpec) -> ModelSpec:
        """The target's spec with this layer alone, for its cache and attention."""
        shapes = self.shapes(target.hidden_size)

        def linear(name: str) -> LinearSpec:
            num_out, num_in = shapes[f"{name}.weight"]
            return LinearSpec(num_out=num_out, num_in=num_in, format=dense(target.dtype))

        q, k, v, o, gate, up, down = map(linear, ("q", "k", "v", "o", "gate", "up", "down"))
        attention = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rope=RopeSpec(dim=self.head_dim, theta=self.rope_theta),
            q=q,
            k=k,
            v=v,
            o=o,
        )
        mlp = MlpSpec(activation="silu", gate=gate, up=up, down=down)
        layers = (LayerSpec(attention=attention, mlp=mlp),)
        return msgspec.structs.replace(target, layers=layers, kv_dtype=target.dtype)


def shape_of(config: DrafterConfig, name: str) -> EagleShape:
    """The layer's shape from the drafter's config. Raises BadModel."""
    try:
        return msgspec.convert(config.layer, EagleShape)
    except msgspec.ValidationError as error:
        raise BadModel(f"the drafter's layer is malformed: {error}", value=name) from None


class EagleLayer:
    """The layer's weights with the target's embedding and LM head. `spec` is the layer's."""

    def __init__(
        self, shape: EagleShape, tensors: Mapping[str, Tensor], decoder: Decoder, context: int
    ) -> None:
        self.decoder, self.spec = decoder, shape.spec(decoder.spec)
        device, dtype = decoder.device, decoder.compute_dtype
        own = {name.removesuffix(".weight"): t.to(device, dtype) for name, t in tensors.items()}
        self.nbytes = sum(tensor.nbytes for tensor in own.values())
        attention, eps = self.spec.layers[0].attention, shape.norm_eps
        qkv = DenseLinear(torch.cat([own["q"], own["k"], own["v"]]), None)
        gate_up = DenseLinear(torch.cat([own["gate"], own["up"]]), None)
        self.fc_CD = own["fc"]
        self.block = Block(
            AttentionLayer(attention, qkv, DenseLinear(own["o"], None), plain),
            GatedMlp("silu", gate_up, DenseLinear(own["down"], None)),
            (RmsNorm(own["attention_norm"], eps), RmsNorm(own["mlp_norm"], eps)),
            (no_norm, no_norm),
            0,
        )
        self.norm = RmsNorm(own["norm"], eps)
        self.ropes = RopeTables([attention.rope], context, dtype, device)

    def __call__(self, runs: Sequence[Run], h_TC: Tensor, attention: Attention) -> Tensor:
        """f_TC of the runs' tokens; `h_TC`: the state before each."""
        device = self.decoder.device
        tokens_T = torch.tensor([t for run in runs for t in run.tokens], device=device)
        places = [p for run in runs for p in range(run.start, run.start + len(run.tokens))]
        turns = self.ropes.at(torch.tensor(places, device=device), max(places) + 1)
        e_TC = self.decoder.table.rows(tokens_T).to(h_TC.dtype)
        x_TC = F.linear(torch.cat((normed(e_TC), h_TC), -1), self.fc_CD)
        return self.norm(self.block(x_TC, turns, attention.prepare(runs), 0))


def normed(e_TC: Tensor) -> Tensor:
    """Embeddings at the scale of hidden states."""
    return F.rms_norm(e_TC, e_TC.shape[-1:], None, 1e-6)


def load_layer(name: str, config: DrafterConfig, decoder: Decoder, context: int) -> EagleLayer:
    """The layer of a drafter trained for this decoder. Raises BadModel, CannotRun."""
    check_target(config, decoder, name)
    shape = shape_of(config, name)
    shapes = shape.shapes(config.hidden_size)
    tensors = read_tensors(name, "eagle", shapes, decoder.compute_dtype)
    return EagleLayer(shape, tensors, decoder, context)


@dataclass(slots=True)
class _EagleReader:
    """What was read of one sequence: `num` positions from `base` on, stored in `blocks`."""

    base: int
    num: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _EagleDraft(PartialDraft):
    reader: _EagleReader
    h_RC: Tensor
    """The states that the next pass starts from."""


class EagleDrafter:
    """Drafts with an EAGLE layer. `draws`: sample for requests without a seed.

    The runner fills `states`; `pool` numbers the blocks of the layer's own cache, read by
    `attention`.
    """

    name = "eagle"

    def __init__(
        self,
        layer: EagleLayer,
        attention: Attention,
        pool: BlockPool,
        states: HiddenStates,
        *,
        drawn: DraftDistributions,
        draws: bool,
    ) -> None:
        self._layer, self._attention, self._pool = layer, attention, pool
        self._states, self._drawn, self._draws = states, drawn, draws
        self._likeliest = make_argmax_head(layer.decoder)
        self._readers: dict[int, _EagleReader] = {}

    @torch.inference_mode()
    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        self._drawn.clear()
        begun = [self._begin(o, d) for o, d in zip(contexts, depths, strict=True) if d > 0]
        guesses = [guess for guess in begun if guess is not None]
        going = guesses
        while going:
            self._go_on(going)
            going = [guess for guess in going if not guess.is_done]
        return finished_drafts(contexts, guesses, self._drawn)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._states.forget(seq_id)
        reader = self._readers.pop(seq_id, None)
        if reader is not None:
            self._pool.release_all(reader.blocks)

    def _begin(self, context: DraftContext, depth: int) -> _EagleDraft | None:
        """Take the new states and allocate blocks; None without states or blocks."""
        known = self._states.of(context.seq_id, len(context.tokens))
        if known is None:
            return None
        start, h_RC = known
        reader = self._reader(context.seq_id, start)
        num_places = reader.num + len(h_RC) + depth
        num_missing = self._pool.num_blocks_for(num_places) - len(reader.blocks)
        if num_missing > self._pool.num_idle:
            return None
        reader.blocks += [self._pool.allocate() for _ in range(num_missing)]
        self._states.use_up(context.seq_id)
        own = numbers_for(context, depth, self._draws)
        return _EagleDraft(context, depth, own, reader=reader, h_RC=h_RC)

    def _reader(self, seq_id: int, start: int) -> _EagleReader:
        """Where reading continues; from the start if states in between are missing."""
        reader = self._readers.setdefault(seq_id, _EagleReader(start))
        if reader.base + reader.num != start:
            reader.base, reader.num = start, 0
        return reader

    def _go_on(self, guesses: Sequence[_EagleDraft]) -> None:
        """One pass: the next token of every draft."""
        runs = [_run(guess) for guess in guesses]
        h_TC = torch.cat([guess.h_RC for guess in guesses])
        f_TC = self._layer(runs, h_TC, self._attention)
        lasts = torch.tensor([len(run.tokens) for run in runs]).cumsum(0) - 1
        f_SC = f_TC[lasts.to(f_TC.device)]
        for guess, f_C in zip(guesses, f_SC, strict=True):
            if not guess.drafts:
                guess.reader.num += len(guess.h_RC)
            guess.h_RC = f_C[None]
        if all_argmax(guesses):
            take_named(guesses, self._likeliest(f_SC))
        else:
            take(guesses, self._layer.decoder.logits(f_SC))


def _run(guess: _EagleDraft) -> Run:
    """The tokens after the states, at the reader's own positions."""
    context, reader = guess.context, guess.reader
    start, tokens = reader.num, tuple(context.tokens[len(context.tokens) - len(guess.h_RC) :])
    if guess.drafts:
        start, tokens = reader.num + len(guess.drafts) - 1, tuple(guess.drafts[-1:])
    return Run(context.seq_id, start, tokens, tuple(reader.blocks), None)
