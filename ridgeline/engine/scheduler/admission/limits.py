"""The scheduler's limits, and the check that a request can be served within them at all."""

from __future__ import annotations

import math

import msgspec

from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.eviction import SequenceEviction
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP, KvLayout
from ridgeline.records import KvEviction, Request

MAX_PRIORITY = 1_000_000


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the scheduler.

    `max_num_seqs` is the number of slots, `max_num_batched_tokens` the token budget of a step, and
    `max_model_len` the longest sequence, output included. `aging_s` is the waiting time in seconds
    worth one priority level. `background_tokens` is the most tokens of background requests in a
    step that also serves interactive ones; None derives it from measured step times. Without
    `shares_prefixes` no sequence starts from what another one computed: models with recurrent
    layers keep states that only their own sequence can continue. `kv_layout` names the groups of
    layers that have separate block tables. `kv_eviction` is the policy of requests without one.
    `prompt_logprob_tokens` is what the log-probabilities of one prompt position cost, as a number
    of tokens of the budget.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    aging_s: float = 30.0
    background_tokens: int | None = None
    shares_prefixes: bool = True
    kv_layout: KvLayout = ONE_GROUP
    kv_eviction: KvEviction | None = None
    prompt_logprob_tokens: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be positive", value=getattr(self, name), limit=">= 1")
        if self.background_tokens is not None and self.background_tokens < 0:
            raise BadInput(
                "background_tokens must not be negative", value=self.background_tokens, limit=">= 0"
            )
        if not (self.aging_s > 0 and math.isfinite(self.aging_s)):
            raise BadInput("aging_s must be positive and finite", value=self.aging_s, limit="> 0 s")

    def with_eviction(self, request: Request) -> Request:
        """The request with the default eviction policy, if there is one and it names none."""
        if self.kv_eviction is None or request.sampling.kv_eviction is not None:
            return request
        sampling = msgspec.structs.replace(request.sampling, kv_eviction=self.kv_eviction)
        return msgspec.structs.replace(request, sampling=sampling)

    @property
    def max_run_tokens(self) -> int:
        """The most tokens of one sequence in a step."""
        return self.max_num_batched_tokens if self.chunked_prefill else self.max_model_len


def check_request(request: Request, limits: SchedulerLimits, pool: BlockPool) -> None:
    """Raise BadInput or DoesNotFit if even an idle engine could not serve the request."""
    if abs(request.priority) > MAX_PRIORITY:
        raise BadInput(
            "the priority is out of range",
            value=request.priority,
            limit=f"-{MAX_PRIORITY}..{MAX_PRIORITY}",
            fix="send a priority within the limit (lower goes first)",
        )
    if not math.isfinite(request.arrival_s):
        raise BadInput("the arrival time must be finite", value=request.arrival_s)
    longest_prompt = limits.max_model_len - 1
    if len(request.prompt) > longest_prompt:
        raise BadInput(
            f"the prompt is too long: prompt and one output token must fit into max_model_len "
            f"{limits.max_model_len}",
            value=f"{len(request.prompt)} tokens",
            limit=f"{longest_prompt} tokens",
            fix="shorten the prompt, or raise --max-model-len if the model supports it",
        )
    num_output = max_tokens_of(request, limits) - len(request.prompt)
    if any(len(tokens) > num_output for tokens in request.resumed):
        raise BadInput(
            "a choice has more resumed tokens than the request may generate",
            value=f"{max(map(len, request.resumed))} tokens",
            limit=f"{num_output} tokens",
        )
    # The last output token is never fed back, so it takes no position in the cache.
    needed = max_tokens_of(request, limits) - 1
    eviction = SequenceEviction.of(
        request.sampling.kv_eviction, len(request.prompt), pool.block_size
    )
    if eviction is not None:
        needed = eviction.max_held(needed, limits.max_run_tokens)
    if not limits.kv_layout.windowed:
        capacity = pool.num_blocks * pool.block_size
    else:
        sizes = (pool.num_blocks, pool.block_size, limits.max_run_tokens)
        capacity = limits.kv_layout.max_tokens(*sizes, max(needed, 1))
    if needed > capacity:
        spare = capacity + 1 - len(request.prompt)
        raise DoesNotFit(
            "the KV cache cannot hold the request even on its own",
            value=f"{needed} tokens ({len(request.prompt)} of prompt)",
            limit=f"{capacity} tokens ({pool.num_blocks} blocks of {pool.block_size})",
            fix=f"lower max_tokens to {spare}" if spare > 0 else "raise --kv-cache-memory-bytes",
        )


def max_tokens_of(request: Request, limits: SchedulerLimits) -> int:
    """Length of one choice in tokens, prompt included, if nothing ends it early."""
    wanted = request.sampling.max_tokens
    room = limits.max_model_len - len(request.prompt)
    return len(request.prompt) + (room if wanted is None else min(wanted, room))
