"""Medusa: heads that guess the next few tokens from one hidden state, all at once.

The state from which the model chose its latest token contains information about later ones. Head i
passes it through one residual layer, z_i = x + silu(W_i x + b_i), and the model's own LM head turns
z_i into a distribution over the token i positions ahead. There is no pass per token: all heads are
one product, and all their rows one pass of the LM head.

Source: Medusa (Cai et al. 2024, arXiv 2401.10774), heads trained with the model frozen (Medusa-1);
here they share the LM head, which is a third of a small model. Drafts are chains (the first token
of head 1, the first of head 2, …) or trees. Trained by `ridgeline train-drafter --kind medusa`.

Invariants: those of the drafter interface; sampled tokens are verified by rejection only (no
"typical acceptance", which is lossy). When it loses: heads do not see each other's tokens, so they
become less accurate with distance. The LM head is paid per row, which dominates a step of a small
model with a large vocabulary.

Shape suffixes: S sequences, K heads, C hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling.argmax_head import make_argmax_head
from ridgeline.engine.sampling.verify.rejection_sampling import TreeDraws
from ridgeline.engine.sampling.verify.verifier import DraftDistributions
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.checkpoint import DrafterConfig, check_target, read_tensors
from ridgeline.engine.speculate.drafters.hidden_states import HiddenStates
from ridgeline.engine.speculate.drafters.sampling import (
    PartialDraft,
    all_argmax,
    finished_drafts,
    numbers_for,
    places_of,
    take,
)
from ridgeline.engine.speculate.token_tree import TokenTree


class MedusaHeads:
    """The residual layers of all heads side by side. `weight_KCC[k]` is head k's W [out, in]."""

    def __init__(self, weight_KCC: Tensor, bias_KC: Tensor) -> None:
        self.num_heads, self.size, _ = weight_KCC.shape
        self.weight_NC, self.bias_N = weight_KCC.flatten(0, 1), bias_KC.flatten()

    def __call__(self, x_SC: Tensor, depth: int) -> Tensor:
        """z_SKC of the first `depth` heads."""
        num = depth * self.size
        y_SN = F.linear(x_SC, self.weight_NC[:num], self.bias_N[:num])
        return x_SC[:, None] + F.silu(y_SN).view(len(x_SC), depth, self.size)

    @property
    def nbytes(self) -> int:
        return self.weight_NC.nbytes + self.bias_N.nbytes


def shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a medusa drafter's file."""
    heads, size = config.num_heads, config.hidden_size
    return {"heads.weight": (heads, size, size), "heads.bias": (heads, size)}


def load_heads(name: str, config: DrafterConfig, decoder: Decoder) -> MedusaHeads:
    """The heads of a drafter trained for this decoder. Raises BadModel, CannotRun."""
    check_target(config, decoder, name)
    tensors = read_tensors(name, "medusa", shapes(config), decoder.compute_dtype)
    device = decoder.device
    return MedusaHeads(tensors["heads.weight"].to(device), tensors["heads.bias"].to(device))


class MedusaDrafter:
    """Drafts with Medusa heads. `draws`: sample for requests without a seed. The runner fills
    `states`.
    """

    name = "medusa"

    def __init__(
        self,
        heads: MedusaHeads,
        decoder: Decoder,
        states: HiddenStates,
        *,
        drawn: DraftDistributions,
        draws: bool,
    ) -> None:
        self._heads, self._decoder, self._states = heads, decoder, states
        self._drawn, self._draws = drawn, draws
        self._likeliest = make_argmax_head(decoder)

    @torch.inference_mode()
    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        self._drawn.clear()
        guesses, rows = [], []
        for context, depth in zip(contexts, depths, strict=True):
            known = self._states.of(context.seq_id, len(context.tokens))
            depth = min(depth, self._heads.num_heads)
            if known is not None and depth > 0:
                guesses.append(
                    PartialDraft(context, depth, numbers_for(context, depth, self._draws))
                )
                rows.append(known[1][-1])
        if guesses:
            self._fill(guesses, torch.stack(rows))
        return finished_drafts(contexts, guesses, self._drawn)

    @torch.inference_mode()
    def trees(
        self, contexts: Sequence[DraftContext], tree: TokenTree
    ) -> list[list[tuple[int, ...]]]:
        """The leaves of each entry's tree; a position has as many candidates as the tree is wide
        there.
        """
        self._drawn.clear()
        known = [self._states.of(context.seq_id, len(context.tokens)) for context in contexts]
        at = [i for i, own in enumerate(known) if own is not None]
        found: list[list[tuple[int, ...]]] = [[] for _ in contexts]
        if not at:
            return found
        x_SC = torch.stack([own[1][-1] for own in known if own is not None])
        z_SKC = self._heads(x_SC, tree.depth)
        logits_SKV = self._decoder.logits(z_SKC.flatten(0, 1)).view(len(at), tree.depth, -1)
        for i, logits_KV in zip(at, logits_SKV, strict=True):
            guess = PartialDraft(
                contexts[i], tree.depth, numbers_for(contexts[i], tree.size, self._draws)
            )
            draws, q_KV = places_of(guess, logits_KV, tree.widths)
            places = TreeDraws(draws, q_KV)
            leaves = tree.within(contexts[i].max_drafts, [len(own) for own in draws])
            found[i] = [places.tokens_of(leaf) for leaf in leaves]
            if guess.numbers and leaves:
                self._drawn.record_tree(contexts[i].seq_id, places)
                self._drawn.record(contexts[i].seq_id, found[i][0], q_KV[: len(leaves[0])])
        return found

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._states.forget(seq_id)

    def _fill(self, guesses: Sequence[PartialDraft], x_SC: Tensor) -> None:
        deepest = max(guess.depth for guess in guesses)
        z_SKC = self._heads(x_SC, deepest)
        if all_argmax(guesses):
            tokens = self._likeliest(z_SKC.flatten(0, 1))
            for i, guess in enumerate(guesses):
                guess.drafts += tokens[i * deepest : i * deepest + guess.depth]
            return
        logits_SKV = self._decoder.logits(z_SKC.flatten(0, 1)).view(len(guesses), deepest, -1)
        for place in range(deepest):
            at = [i for i, guess in enumerate(guesses) if guess.depth > place]
            take([guesses[i] for i in at], logits_SKV[at, place])
