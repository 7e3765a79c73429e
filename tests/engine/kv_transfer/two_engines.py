"""A prefill engine and a decode engine in one process, and requests that go through both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ridgeline.engine.engine import Engine
from ridgeline.engine.kv_transfer.block_fetcher import PeerClient
from ridgeline.engine.kv_transfer.transfers import BlockTransfers
from ridgeline.records import Failed, KvTransferParams, Sampling, Token

SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "kv_cache_memory_bytes": 8_000_000,
    "kv_tier_memory": 32 << 20,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
}
PREFILL = Sampling(temperature=0.0, max_tokens=1)


@contextmanager
def two_engines(model: str = "demo", **settings: Any) -> Iterator[tuple[Engine, Engine]]:
    """(prefill, decode); settings of one of them have its role as prefix."""
    own = {
        role: {k.removeprefix(f"{role}_"): v for k, v in settings.items() if k.startswith(role)}
        for role in ("prefill", "decode")
    }
    shared = {k: v for k, v in settings.items() if not k.startswith(("prefill_", "decode_"))}
    both = SETTINGS | shared
    with (
        Engine.open(model, disaggregation_mode="prefill", **both | own["prefill"]) as prefill,
        Engine.open(model, disaggregation_mode="decode", **both | own["decode"]) as decode,
    ):
        yield prefill, decode


async def complete(
    engine: Engine, prompt: list[int], sampling: Sampling, **options: Any
) -> list[list[int]]:
    """The tokens of every choice."""
    tokens: list[list[int]] = [[] for _ in range(sampling.n)]
    async for event in engine.stream(prompt, sampling, **options):
        assert not isinstance(event, Failed), event
        if isinstance(event, Token):
            tokens[event.index].append(event.token)
    return tokens


async def begin_prefill(
    prefill: Engine, prompt: list[int], **options: Any
) -> tuple[KvTransferParams | None, asyncio.Task[Any] | None]:
    """Open a lease and compute the prompt, without waiting for it."""
    params = prefill.transfers.open_lease(prompt)
    if params is None:
        return None, None
    own = complete(
        prefill,
        prompt[: params.num_tokens],
        PREFILL,
        lease=params.remote_request_id,
        **options,
    )
    return params, asyncio.ensure_future(own)


async def hand_over(
    prefill: Engine, decode: Engine, prompt: list[int], sampling: Sampling, **options: Any
) -> list[list[int]]:
    """The answer of a request whose prompt the prefill engine computes."""
    params, computing = await begin_prefill(prefill, prompt)
    answer = await complete(decode, prompt, sampling, kv_source=params, **options)
    if computing is not None:
        await computing
    return answer


def client_of(decode: Engine) -> PeerClient:
    transfers = decode.transfers
    assert isinstance(transfers, BlockTransfers)
    assert transfers.client is not None
    return transfers.client


def fallbacks(decode: Engine) -> dict[str, int]:
    """The reasons that were counted."""
    return {reason: num for reason, num in client_of(decode).fallbacks.items() if num}
