"""From a resolved speculative config to what scheduler and runner need of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.core.blocks import BlockPool
from ridgeline.engine.core.drafting import Drafts, NoDrafts, Open
from ridgeline.engine.core.plan import Runner
from ridgeline.engine.model.dtype import DTYPES
from ridgeline.engine.model.load import load_decoder
from ridgeline.engine.speculate.base import Drafter, Lookup
from ridgeline.engine.speculate.combined import Combined, Lookups
from ridgeline.engine.speculate.controller import Controller
from ridgeline.engine.speculate.cost import DraftCost, StepCost, measure
from ridgeline.engine.speculate.draft_model import DraftModelDrafter
from ridgeline.engine.speculate.lookahead import LookaheadDrafter
from ridgeline.engine.speculate.ngram import NgramDrafter
from ridgeline.engine.speculate.resolve import LOOKUP_MAX, LOOKUP_MIN, Speculation, draft_spec
from ridgeline.engine.speculate.speculator import FixedDepth
from ridgeline.engine.speculate.suffix import SuffixDrafter
from ridgeline.engine.speculate.tokenizers import check_same_tokens
from ridgeline.engine.speculate.verify import Drawn, Verifier, Watch
from ridgeline.engine.text import Tokenizer, load_tokenizer
from ridgeline.records import Sampling

if TYPE_CHECKING:
    from ridgeline.engine.resolve import Resolved

_GREEDY = Sampling(temperature=0.0)


def _nothing(_runner: Runner) -> None:
    """What a fixed depth measures."""


@dataclass(frozen=True, slots=True)
class Speculating:
    """The scheduler's side of it, the runner's, and the bytes of a draft model's weights."""

    drafts: Drafts
    verifier: Verifier
    weight_bytes: int = 0
    calibrate: Callable[[Runner], None] = _nothing


def speculate(
    used: Speculation | None,
    tokenizer: Tokenizer,
    resolved: Resolved,
    clock: Callable[[], float],
) -> Speculating:
    """The parts for `used`. Raises CannotRun where a draft model speaks other tokens.

    Where the depth is chosen by measured cost, `calibrate` measures: once, before anybody is
    served.
    """
    if used is None:
        return Speculating(NoDrafts(), Verifier())
    drawn = Drawn()
    lookup, watch = _lookup(used)
    verifier = Verifier(used.rejection_sample_method or "block", drawn, watch)
    drafter, nbytes = _drafter(used, tokenizer, resolved, drawn)
    most = used.num_speculative_tokens
    if not used.automatic:
        alone = drafter if lookup is None else None
        fixed = FixedDepth(alone or Combined(lookup, drafter), most)
        return Speculating(fixed, verifier, nbytes)
    controller = Controller(drafter, most, clock, lookup, drawn.clear)

    def calibrate(runner: Runner) -> None:
        steps = StepCost(measure_steps(runner, resolved, clock))
        if drafter is None:
            controller.calibrate(steps)
        else:
            controller.calibrate(steps, DraftCost(measure_drafts(drafter, resolved, clock)))

    return Speculating(controller, verifier, nbytes, calibrate)


def measure_steps(
    runner: Runner, resolved: Resolved, clock: Callable[[], float]
) -> dict[tuple[int, int], float]:
    """Seconds of decode steps by (runs, rows)."""
    return measure(
        runner,
        clock,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_seqs=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
    )


def measure_drafts(
    drafter: Drafter, resolved: Resolved, clock: Callable[[], float]
) -> list[tuple[int, int, float]]:
    """(sequences, depth, seconds) of drafts on text that repeats itself."""
    found = []
    for sequences, depth in itertools.product((1, min(8, resolved.max_num_seqs)), (1, 4)):
        texts = [[5 + (i + j) % 7 for j in range(64)] for i in range(sequences)]
        opens = [Open(-1 - i, text, 1, "", _GREEDY, 0, 99) for i, text in enumerate(texts)]
        times = []
        for turn in range(4):
            begun_s = clock()
            drafter.draft(opens, [depth] * sequences)
            times.append(clock() - begun_s)
            for i, text in enumerate(texts):
                text.append(5 + (i + turn + 64) % 7)
        found.append((sequences, depth, sorted(times[1:])[1]))
        for each in opens:
            drafter.forget(each.seq_id, (), "")
    return found


def _lookup(used: Speculation) -> tuple[Lookup | None, Watch | None]:
    """Who looks up, and who wants to see what the model says at drafted rows."""
    if used.method == "ngram":
        assert used.prompt_lookup_min is not None and used.prompt_lookup_max is not None
        return NgramDrafter(used.prompt_lookup_min, used.prompt_lookup_max), None
    if used.method in ("suffix", "auto"):
        return Lookups([NgramDrafter(LOOKUP_MIN, LOOKUP_MAX), SuffixDrafter()]), None
    if used.method == "lookahead":
        found = LookaheadDrafter()
        return found, found.watch
    return None, None


def _drafter(
    used: Speculation, tokenizer: Tokenizer, resolved: Resolved, drawn: Drawn
) -> tuple[Drafter | None, int]:
    """Who computes drafts."""
    if used.model is None:
        return None, 0
    return _draft_model(used, tokenizer, resolved, drawn)


def _draft_model(
    used: Speculation, tokenizer: Tokenizer, resolved: Resolved, drawn: Drawn
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
