"""Self-speculation: the model drafts with some of its layers left out.

A draft pass goes through the embedding, the kept layers and the LM head. It reads what the target
has computed of the sequence (each kept layer its own KV cache) and writes the drafted positions of
those layers; the verifying step runs all layers and overwrites these positions with the correct
values. It needs no additional weights and no additional cache.

Which layers to leave out is measured once, before serving, on text shipped with Ridgeline (or
random tokens without a tokenizer). How little a layer turns the residual stream gives the order of
removal; for each number of layers the agreement with the full model and the cost of a pass give the
expected gain, and the best is used. Leaving out the last layers is early exit, one of the
possibilities.

Source: Draft & Verify (Zhang et al. 2024, arXiv 2309.08168) skips layers chosen by search;
LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) exits early with a shared cache; the order is
ShortGPT's block influence (Men et al. 2024, arXiv 2403.03853), which needs one pass instead of a
search.

Invariants: those of the drafter interface. A draft writes only behind the tokens computed by the
target, in blocks that the step plan has allocated to the sequence, and ends where the last block
ends. When it loses: every kept layer is paid again, and so is the LM head, a third of a small
model. A model not trained for early exit rarely agrees with its own half.

Shape suffixes: T rows of a pass, C hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.full import FullAttention
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling.verify.verifier import DraftDistributions
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.sampling import (
    PartialDraft,
    all_argmax,
    finished_drafts,
    numbers_for,
    take,
    take_named,
)
from ridgeline.engine.speculate.drafters.target_model import (
    TargetModel,
    last_hidden,
    last_tokens_of,
    states,
)

CHUNK = 64  # pending tokens beyond which a sequence is not drafted for
REPEATS = 5


class SelfDrafter:
    """Drafts with a subset of the target's layers. `draws`: sample for requests without a seed."""

    name = "self"

    def __init__(
        self, target: TargetModel, kept: Sequence[int], *, drawn: DraftDistributions, draws: bool
    ) -> None:
        own = target.only(kept)
        self.kept = tuple(kept)
        self._decoder, self._attention = own.decoder, own.attention()
        self._last_tokens = last_tokens_of(self._decoder, self._attention)
        self._block_size, self._drawn, self._draws = own.cache.block_size, drawn, draws

    @torch.inference_mode()
    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        self._drawn.clear()
        begun = (
            self._begin(context, depth) for context, depth in zip(contexts, depths, strict=True)
        )
        guesses = [guess for guess in begun if guess.depth > 0]
        going = guesses
        while going:
            self._go_on(going)
            going = [guess for guess in going if not guess.is_done]
        return finished_drafts(contexts, guesses, self._drawn)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """Keeps no state per sequence."""

    def _go_on(self, guesses: Sequence[PartialDraft]) -> None:
        """One pass: the next token of every draft."""
        runs = [_run(guess) for guess in guesses]
        if all_argmax(guesses):
            take_named(guesses, self._last_tokens(runs))
        else:
            x_SC = last_hidden(self._decoder, self._attention, runs)
            take(guesses, self._decoder.logits(x_SC))

    def _begin(self, context: DraftContext, depth: int) -> PartialDraft:
        """A draft as deep as there are positions; the last token, which is not fed, needs none."""
        places = context.num_places * self._block_size - len(context.tokens)
        fits = len(context.tokens) - context.num_computed <= CHUNK and places >= 0
        depth = min(depth, places + 1) if fits else 0
        return PartialDraft(context, depth, numbers_for(context, depth, self._draws))


def _run(guess: PartialDraft) -> Run:
    """The pending tokens for the first draft, then the latest one."""
    context, num_known = guess.context, len(guess.context.tokens)
    if not guess.drafts:
        start, tokens = context.num_computed, tuple(context.tokens[context.num_computed :])
    else:
        start, tokens = num_known + len(guess.drafts) - 1, (guess.drafts[-1],)
    return Run(
        seq_id=context.seq_id,
        start=start,
        tokens=tokens,
        blocks=context.blocks,
        sample=None,
        windows=context.windows,
        first_place=context.first_place,
    )


class LayerChoice(msgspec.Struct, frozen=True):
    """A choice of layers with its measurements.

    `agreement` of its most likely token with the full model's, `cost` of a pass in full passes, and
    the predicted `gain` in speed at `depth` drafts.
    """

    layers: tuple[int, ...]
    agreement: float
    cost: float
    depth: int
    gain: float


@torch.inference_mode()
def choose_layers(
    target: TargetModel,
    tokens: Sequence[int],
    most: int,
    clock: Callable[[], float],
    budget_s: float,
) -> LayerChoice:
    """The layers to keep, measured on `tokens`; `most` is the deepest draft.

    Ends after `budget_s` with the sets measured by then.
    """
    begun_s = clock()
    decoder = target.decoder
    whole_T = decoder.logits(states(decoder, tokens)).argmax(-1)
    rows_s = [_pass_s(decoder, num, clock) for num in range(1, most + 2)]
    order = sorted(enumerate(influences(decoder, tokens)), key=lambda entry: entry[1])
    found: list[LayerChoice] = []
    for num in range(1, len(order)):
        skipped = {layer for layer, _ in order[:num]}
        layers = tuple(i for i in range(len(order)) if i not in skipped)
        found.append(_measured(target.only(layers).decoder, layers, tokens, whole_T, rows_s, clock))
        if clock() - begun_s > budget_s:
            break
    return max(found, key=lambda kept: kept.gain)


def _measured(
    part: Decoder,
    layers: tuple[int, ...],
    tokens: Sequence[int],
    whole_T: Tensor,
    rows_s: Sequence[float],
    clock: Callable[[], float],
) -> LayerChoice:
    said_T = part.logits(states(part, tokens)).argmax(-1)
    agreement = float((said_T == whole_T).float().mean())
    cost = _pass_s(part, 1, clock) / rows_s[0]
    depth, gain = best_depth(agreement, cost, [row_s / rows_s[0] for row_s in rows_s])
    return LayerChoice(layers, agreement, cost, depth, gain)


def best_depth(agreement: float, cost: float, rows: Sequence[float]) -> tuple[int, float]:
    """(depth, gain) at which expected tokens per time are highest. `rows[i]`: cost of a step with i
    drafts, in plain steps.
    """
    expected, best = 1.0, (1, 0.0)
    for depth in range(1, len(rows)):
        expected += agreement**depth
        best = max(best, (depth, expected / (rows[depth] + depth * cost)), key=lambda at: at[1])
    return best


def influences(decoder: Decoder, tokens: Sequence[int]) -> list[float]:
    """How much each layer turns the stream: 1 - mean cosine between its input and output."""
    body = decoder.body
    tokens_T = torch.tensor(tokens, device=decoder.device)
    like = torch.empty(0, dtype=decoder.compute_dtype, device=decoder.device)
    attend = FullAttention(decoder.spec, len(tokens), like)
    turns = body.ropes.at(torch.arange(len(tokens), device=decoder.device), len(tokens))
    x_TC = body.table.rows(tokens_T).to(body.dtype) * body.embed_scale
    found = []
    for layer, block in enumerate(body.blocks):
        y_TC = block(x_TC, turns, attend, layer)
        found.append(1.0 - float(F.cosine_similarity(x_TC.float(), y_TC.float(), dim=-1).mean()))
        x_TC = y_TC
    return found


def _pass_s(decoder: Decoder, num_rows: int, clock: Callable[[], float]) -> float:
    """Median seconds of a pass with `num_rows` rows, LM head included."""
    times = []
    for _ in range(REPEATS + 1):
        begun_s = clock()
        decoder.logits(states(decoder, [1] * num_rows))
        times.append(clock() - begun_s)
    return sorted(times[1:])[REPEATS // 2]
