"""What a scheduler is limited to, and the requests that it could never serve."""

from __future__ import annotations

import math

import msgspec

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.records import Request

MAX_PRIORITY = 1_000_000


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`max_num_seqs` seats; tokens per step; tokens per sequence, output included.

    `aging_s`: seconds of waiting that are worth one priority level (see `queue.py`).
    `background_tokens`: most tokens of background requests in a step that serves others too; None:
    derived from what steps take (see `filling.py`).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    aging_s: float = 30.0
    background_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be positive", value=getattr(self, name), limit=">= 1")
        if self.background_tokens is not None and self.background_tokens < 0:
            raise BadInput("background_tokens is negative", value=self.background_tokens)
        if not (self.aging_s > 0 and math.isfinite(self.aging_s)):
            raise BadInput("aging_s must be positive and finite", value=self.aging_s, limit="> 0 s")


def check_request(request: Request, limits: SchedulerLimits, pool: BlockPool) -> None:
    """Raise BadInput or DoesNotFit if the request could not be served even by an empty engine."""
    if abs(request.priority) > MAX_PRIORITY:
        raise BadInput(
            "the priority is out of range",
            value=request.priority,
            limit=f"-{MAX_PRIORITY}..{MAX_PRIORITY}",
            fix="send a priority within the limit (lower goes first)",
        )
    if not math.isfinite(request.arrival_s):
        raise BadInput("the arrival is not an instant", value=request.arrival_s)
    _check_prompt(request, limits)
    _check_blocks(request, limits, pool)


def longest(request: Request, limits: SchedulerLimits) -> int:
    """Tokens of one choice when nothing stops it early."""
    wanted = request.sampling.max_tokens
    room = limits.max_model_len - len(request.prompt)
    return len(request.prompt) + (room if wanted is None else min(wanted, room))


def _check_prompt(request: Request, limits: SchedulerLimits) -> None:
    most = limits.max_model_len - 1
    if len(request.prompt) > most:
        raise BadInput(
            f"the prompt is too long: it and one token of output must fit in max_model_len "
            f"{limits.max_model_len}",
            value=f"{len(request.prompt)} tokens",
            limit=f"{most} tokens",
            fix="shorten the prompt, or raise --max-model-len if the model allows it",
        )


def _check_blocks(request: Request, limits: SchedulerLimits, pool: BlockPool) -> None:
    """The last output token is never fed back, so it needs no place."""
    places, needed = pool.num_blocks * pool.block_size, longest(request, limits) - 1
    if needed <= places:
        return
    spare = places + 1 - len(request.prompt)
    raise DoesNotFit(
        "the KV cache could not hold the request even alone",
        value=f"{needed} tokens ({len(request.prompt)} of prompt)",
        limit=f"{places} tokens ({pool.num_blocks} blocks of {pool.block_size})",
        fix=f"lower max_tokens to {spare}" if spare > 0 else "raise --kv-cache-memory-bytes",
    )
