"""From resolved settings to the parts of an engine. The only place that knows how they fit
together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.core.admission import Limits
from ridgeline.engine.core.batching import make_policy
from ridgeline.engine.core.blocks import BlockPool
from ridgeline.engine.core.prefix import Cache, NoPrefixCache, PrefixCache
from ridgeline.engine.core.scheduler import Scheduler
from ridgeline.engine.model.dtype import DTYPES
from ridgeline.engine.model.load import load_decoder
from ridgeline.engine.resolve import Resolved
from ridgeline.engine.runner import TorchRunner
from ridgeline.engine.text import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Parts:
    """A working engine, in pieces. `weight_bytes` is what the decoder really keeps."""

    tokenizer: Tokenizer
    scheduler: Scheduler
    runner: TorchRunner
    weight_bytes: int


def assemble(resolved: Resolved) -> Parts:
    """Load weights and tokenizer and build the parts. Raises BadModel, BadInput, CannotRun.

    What can be refused cheaply comes before the weights.
    """
    scheduler = make_scheduler(resolved)
    tokenizer = load_tokenizer(resolved.model)
    device, dtype = torch.device(resolved.device), DTYPES[resolved.dtype]
    decoder = load_decoder(
        resolved.model,
        resolved.spec,
        device=device,
        compute_dtype=dtype,
        seed=resolved.seed,
        max_model_len=resolved.max_model_len,
    )
    kv = KvCache.allocate(
        resolved.spec,
        resolved.num_blocks,
        resolved.block_size,
        dtype,
        device,
        kv_format(resolved.kv_cache_dtype),
    )
    attention = build_attention(resolved.attention_backend, resolved.spec, kv)
    runner = TorchRunner(decoder, kv, attention)
    return Parts(tokenizer, scheduler, runner, decoder.nbytes)


def make_scheduler(resolved: Resolved) -> Scheduler:
    """The scheduler with its policy, pool and prefix cache."""
    pool = BlockPool(resolved.num_blocks, resolved.block_size)
    limits = Limits(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        chunked_prefill=resolved.enable_chunked_prefill,
        background_tokens=resolved.background_tokens,
    )
    return Scheduler(
        limits,
        make_policy(resolved.batching, wait_s=resolved.batch_wait_ms / 1000),
        pool,
        _prefix_cache(resolved, pool),
        eos_token_ids=resolved.spec.eos_token_ids,
        seed=resolved.seed,
    )


def _prefix_cache(resolved: Resolved, pool: BlockPool) -> Cache:
    if not resolved.enable_prefix_caching:
        return NoPrefixCache()
    return PrefixCache(pool, resolved.prefix_cache_ttl_s)
