"""From a resolved speculative config to what scheduler and runner need of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.core.blocks import BlockPool
from ridgeline.engine.core.drafting import Drafts, NoDrafts
from ridgeline.engine.model.dtype import DTYPES
from ridgeline.engine.model.load import load_decoder
from ridgeline.engine.speculate.base import Drafter
from ridgeline.engine.speculate.draft_model import DraftModelDrafter
from ridgeline.engine.speculate.ngram import NgramDrafter
from ridgeline.engine.speculate.resolve import Speculation, draft_spec
from ridgeline.engine.speculate.speculator import FixedDepth
from ridgeline.engine.speculate.tokenizers import check_same_tokens
from ridgeline.engine.speculate.verify import Drawn, Verifier
from ridgeline.engine.text import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from ridgeline.engine.resolve import Resolved


@dataclass(frozen=True, slots=True)
class Speculating:
    """The scheduler's side of it, the runner's, and the bytes of a draft model's weights."""

    drafts: Drafts
    verifier: Verifier
    weight_bytes: int = 0


def speculate(used: Speculation | None, tokenizer: Tokenizer, resolved: Resolved) -> Speculating:
    """The parts for `used`. Raises CannotRun where a draft model speaks other tokens."""
    if used is None:
        return Speculating(NoDrafts(), Verifier())
    drawn = Drawn()
    verifier = Verifier(used.rejection_sample_method or "block", drawn)
    drafter, nbytes = _drafter(used, tokenizer, resolved, drawn)
    return Speculating(FixedDepth(drafter, used.num_speculative_tokens), verifier, nbytes)


def _drafter(
    used: Speculation, tokenizer: Tokenizer, resolved: Resolved, drawn: Drawn
) -> tuple[Drafter, int]:
    if used.method == "draft_model":
        return _draft_model(used, tokenizer, resolved, drawn)
    assert used.prompt_lookup_min is not None and used.prompt_lookup_max is not None
    return NgramDrafter(used.prompt_lookup_min, used.prompt_lookup_max), 0


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
