"""Builds what scheduler and runner need from a resolved speculative config."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention import choose as choose_attention
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.dtype import DTYPES
from ridgeline.engine.execution.base import HiddenStatesObserver, NoObserver
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling.verify.verifier import DraftDistributions, RowObserver, Verifier
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import UnusedTables
from ridgeline.engine.scheduler.plan import Runner
from ridgeline.engine.scheduler.speculation.base import DraftContext, DraftProposer, NoDrafts
from ridgeline.engine.speculate.config import (
    LOOKUP_MAX,
    LOOKUP_MIN,
    ResolvedSpeculation,
    draft_spec,
)
from ridgeline.engine.speculate.depth_control.controller import DepthController
from ridgeline.engine.speculate.depth_control.fixed_depth import FixedDepth
from ridgeline.engine.speculate.depth_control.step_cost import DraftCost, StepTimeCurve, measure
from ridgeline.engine.speculate.drafters.base import Drafter, Lookup
from ridgeline.engine.speculate.drafters.checkpoint import read_config
from ridgeline.engine.speculate.drafters.combined import Combined, Lookups
from ridgeline.engine.speculate.drafters.draft_model import DraftModelDrafter
from ridgeline.engine.speculate.drafters.eagle import WINDOW, EagleDrafter, load_layer
from ridgeline.engine.speculate.drafters.hidden_states import HiddenStates
from ridgeline.engine.speculate.drafters.layer_skip import SelfDrafter, choose_layers
from ridgeline.engine.speculate.drafters.lookahead import LookaheadDrafter
from ridgeline.engine.speculate.drafters.medusa import MedusaDrafter, load_heads
from ridgeline.engine.speculate.drafters.ngram import NgramDrafter
from ridgeline.engine.speculate.drafters.suffix import SuffixDrafter
from ridgeline.engine.speculate.drafters.target_model import TargetModel
from ridgeline.engine.speculate.drafters.tokenizer_check import check_same_tokens
from ridgeline.engine.speculate.token_tree import FixedTree, parse_tree
from ridgeline.engine.tokenization import NoTokenizer, Tokenizer, load_tokenizer
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.records import Sampling

if TYPE_CHECKING:
    from ridgeline.engine.config import ResolvedSettings

_GREEDY = Sampling(temperature=0.0)
_LOG = logging.getLogger(__name__)
NUM_SAMPLED = 192  # tokens of text on which layers are chosen
CHOOSING_S = 3.0
MEASURED, DRAFTED = 72, (1, 4)  # tokens of a text that drafting is timed on; depths


def _nothing(_runner: Runner) -> None:
    """The calibration of a fixed depth: none."""


@dataclass(frozen=True, slots=True)
class SpeculationParts:
    """The scheduler's part, the runner's part, and the bytes of a draft model's weights."""

    drafts: DraftProposer
    verifier: Verifier
    weight_bytes: int = 0
    calibrate: Callable[[Runner], None] = _nothing
    observer: HiddenStatesObserver = field(default_factory=NoObserver)


@dataclass(frozen=True, slots=True)
class _BuiltDrafter:
    """A drafter (None: lookups only), the bytes of its weights, and the hidden states it reads."""

    drafter: Drafter | None
    nbytes: int = 0
    states: HiddenStates | None = None


def build_speculation(
    used: ResolvedSpeculation | None,
    tokenizer: Tokenizer,
    resolved: ResolvedSettings,
    clock: Callable[[], float],
    target: Callable[[], TargetModel],
) -> SpeculationParts:
    """The parts for `used`. Raises CannotRun if a draft model has a different vocabulary.

    `target` loads the target model once, when first needed. If the depth is chosen by measured
    cost, `calibrate` measures once, before requests are served.
    """
    if used is None:
        return SpeculationParts(NoDrafts(), Verifier())
    drawn = DraftDistributions()
    lookup, row_observer = _lookup(used)
    verifier = Verifier(used.rejection_sample_method or "block", drawn, row_observer)
    made = _drafter(used, tokenizer, resolved, drawn, target, clock)
    observer, most = made.states or NoObserver(), used.num_speculative_tokens
    if used.speculative_token_tree is not None:
        assert isinstance(made.drafter, MedusaDrafter)
        tree = FixedTree(made.drafter, parse_tree(used.speculative_token_tree))
        return SpeculationParts(tree, verifier, made.nbytes, observer=observer)
    if not used.automatic:
        alone = made.drafter if lookup is None else None
        fixed = FixedDepth(alone or Combined(lookup, made.drafter), most)
        return SpeculationParts(fixed, verifier, made.nbytes, observer=observer)
    controller = DepthController(made.drafter, most, clock, lookup, drawn.clear)

    def calibrate(runner: Runner) -> None:
        steps = StepTimeCurve(measure_steps(runner, resolved, clock))
        if made.drafter is None:
            controller.calibrate(steps)
        elif drafts := measure_drafts(made.drafter, resolved, clock, made.states):
            controller.calibrate(steps, DraftCost(drafts))

    return SpeculationParts(controller, verifier, made.nbytes, calibrate, observer)


def measure_steps(
    runner: Runner, resolved: ResolvedSettings, clock: Callable[[], float]
) -> dict[tuple[int, int], float]:
    """Seconds of decode steps by (runs, rows)."""
    return measure(
        runner,
        clock,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_seqs=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        layout=kv_layout(resolved.spec),
    )


def measure_drafts(
    drafter: Drafter,
    resolved: ResolvedSettings,
    clock: Callable[[], float],
    states: HiddenStates | None = None,
) -> list[tuple[int, int, float]]:
    """(sequences, depth, seconds) of drafts on repetitive text.

    `states`: where the drafter looks up hidden states of the target. Empty if contexts are too
    short for one sequence; then nothing is drafted either.
    """
    like_C = torch.zeros(resolved.spec.hidden_size, dtype=DTYPES[resolved.dtype])
    like_C = like_C.to(resolved.device)
    most, turns, found = min(8, resolved.max_num_seqs), 4, []
    num_blocks = resolved.num_blocks // kv_layout(resolved.spec).num_groups
    places = num_blocks // most * resolved.block_size
    length = max(1, min(MEASURED, places, resolved.max_model_len) - turns - max(DRAFTED))
    if states is not None and length < 2:
        return []
    for sequences, depth in itertools.product((1, most), DRAFTED):
        texts = [[5 + (i + j) % 7 for j in range(length)] for i in range(sequences)]
        times = []
        for turn in range(turns):
            contexts = [_open(i, text, resolved) for i, text in enumerate(texts)]
            if states is not None:
                for context in contexts:
                    states.pretend(context.seq_id, len(context.tokens), like_C)
            begun_s = clock()
            drafter.draft(contexts, [depth] * sequences)
            times.append(clock() - begun_s)
            for i, text in enumerate(texts):
                text.append(5 + (i + turn + length) % 7)
        found.append((sequences, depth, sorted(times[1:])[1]))
        for context in contexts:
            drafter.forget(context.seq_id, (), "")
    return found


def _open(i: int, text: list[int], resolved: ResolvedSettings) -> DraftContext:
    """The `i`-th of several sequences placed on unused blocks, if there are any."""
    layout = kv_layout(resolved.spec)
    unused = UnusedTables(layout, -(-MEASURED // resolved.block_size))
    fits = (i + 1) * unused.num_places * layout.num_groups <= resolved.num_blocks
    tables = unused.of(i) if fits else {}
    return DraftContext(-1 - i, text, 1, "", _GREEDY, 0, 99, len(text) - 1, **tables)


def _drafter(
    used: ResolvedSpeculation,
    tokenizer: Tokenizer,
    resolved: ResolvedSettings,
    drawn: DraftDistributions,
    target: Callable[[], TargetModel],
    clock: Callable[[], float],
) -> _BuiltDrafter:
    if used.method == "self":
        return _BuiltDrafter(_self(used, tokenizer, target(), drawn, clock))
    if used.method == "medusa":
        return _medusa(used, target().decoder, drawn)
    if used.method == "eagle":
        return _eagle(used, target().decoder, resolved, drawn)
    if used.model is None:
        return _BuiltDrafter(None)
    return _BuiltDrafter(*_draft_model(used, tokenizer, resolved, drawn))


def _medusa(
    used: ResolvedSpeculation, decoder: Decoder, drawn: DraftDistributions
) -> _BuiltDrafter:
    assert used.model is not None
    states = HiddenStates(window=1)
    heads = load_heads(used.model, read_config(used.model, "medusa"), decoder)
    draws = used.draft_sample_method == "probabilistic"
    drafter = MedusaDrafter(heads, decoder, states, drawn=drawn, draws=draws)
    return _BuiltDrafter(drafter, heads.nbytes, states)


def _eagle(
    used: ResolvedSpeculation,
    decoder: Decoder,
    resolved: ResolvedSettings,
    drawn: DraftDistributions,
) -> _BuiltDrafter:
    assert used.model is not None
    config = read_config(used.model, "eagle")
    layer = load_layer(used.model, config, decoder, resolved.max_model_len)
    num_blocks, block_size = resolved.num_blocks, resolved.block_size
    dtype = decoder.compute_dtype
    cache = KvCache.allocate(layer.spec, num_blocks, block_size, dtype, decoder.device)
    site = AttentionSite.of(layer.spec, decoder.device, dtype, block_size)
    backend, _ = choose_attention("auto", site)
    states = HiddenStates(window=WINDOW)
    drafter = EagleDrafter(
        layer,
        build_attention(backend, layer.spec, cache),
        BlockPool(num_blocks, block_size),
        states,
        drawn=drawn,
        draws=used.draft_sample_method == "probabilistic",
    )
    return _BuiltDrafter(drafter, layer.nbytes, states)


def _self(
    used: ResolvedSpeculation,
    tokenizer: Tokenizer,
    target: TargetModel,
    drawn: DraftDistributions,
    clock: Callable[[], float],
) -> SelfDrafter:
    tokens = sample_tokens(tokenizer, target.decoder.spec.vocab_size)
    kept = choose_layers(target, tokens, used.num_speculative_tokens, clock, CHOOSING_S)
    _LOG.info("self-speculation keeps %s", kept)
    draws = used.draft_sample_method == "probabilistic"
    return SelfDrafter(target, kept.layers, drawn=drawn, draws=draws)


def sample_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Text to measure on: shipped source code, or random tokens without a tokenizer."""
    if isinstance(tokenizer, NoTokenizer):
        rng = random.Random(0)
        return [rng.randrange(vocab_size) for _ in range(NUM_SAMPLED)]
    text = (files("ridgeline") / "assets" / "calibration" / "code.txt").read_text(encoding="utf-8")
    return tokenizer.encode(text[: 16 * NUM_SAMPLED])[:NUM_SAMPLED]


def _lookup(used: ResolvedSpeculation) -> tuple[Lookup | None, RowObserver | None]:
    """The lookup, and the observer of the model's output at drafted rows."""
    if used.method == "ngram":
        assert used.prompt_lookup_min is not None and used.prompt_lookup_max is not None
        return NgramDrafter(used.prompt_lookup_min, used.prompt_lookup_max), None
    if used.method in ("suffix", "auto"):
        return Lookups([NgramDrafter(LOOKUP_MIN, LOOKUP_MAX), SuffixDrafter()]), None
    if used.method == "lookahead":
        found = LookaheadDrafter()
        return found, found.watch
    return None, None


def _draft_model(
    used: ResolvedSpeculation,
    tokenizer: Tokenizer,
    resolved: ResolvedSettings,
    drawn: DraftDistributions,
) -> tuple[DraftModelDrafter, int]:
    assert used.model is not None
    check_same_tokens(tokenizer, load_tokenizer(used.model), used.model)
    spec = draft_spec(used, resolved.spec.dtype)
    device, dtype = torch.device(resolved.device), DTYPES[resolved.dtype]
    decoder = load_decoder(
        used.model, spec, device=device, compute_dtype=dtype, max_model_len=resolved.max_model_len
    )
    cache = KvCache.allocate(spec, resolved.num_blocks, resolved.block_size, dtype, device)
    drafter = DraftModelDrafter(
        decoder,
        build_attention(resolved.attention_backend, spec, cache),
        BlockPool(resolved.num_blocks, resolved.block_size),
        drawn=drawn,
        draws=used.draft_sample_method == "probabilistic",
        vocab_size=resolved.spec.vocab_size,
    )
    return drafter, decoder.nbytes
