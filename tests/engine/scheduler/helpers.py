"""Builders for the scheduler tests."""

from __future__ import annotations

from typing import Any

from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.engine.scheduler.plan import RunOutput, StepPlan, StepResult
from ridgeline.engine.scheduler.sequence import Sequence, SequenceGroup
from ridgeline.records import Event, Request, Sampling, TokenLogprobs


def make_request(
    name: str = "a", num_prompt: int = 6, *, first: int = 100, at_s: float = 0.0, **rest: Any
) -> Request:
    """A request; keywords that are not fields of Request go into its Sampling."""
    own = {
        key: rest.pop(key)
        for key in ("priority", "tenant", "deadline_s", "background", "slo")
        if key in rest
    }
    prompt = tuple(range(first, first + num_prompt))
    sampling = Sampling(**{"max_tokens": 4, "seed": 1, **rest})
    return Request(id=name, prompt=prompt, sampling=sampling, arrival_s=at_s, **own)


def sequence(
    tokens: list[int], *, computed: int = 0, tenant: str = "", number: int = 0
) -> Sequence:
    """A sequence without a scheduler; all of `tokens` are prompt."""
    own = Request(
        id=str(number), prompt=tuple(tokens), sampling=Sampling(), arrival_s=0.0, tenant=tenant
    )
    return Sequence(
        id=number,
        group=SequenceGroup(own, number, seed=0),
        index=0,
        seed=0,
        key=(0, (0.0, number, 0)),
        tokens=list(tokens),
        num_prompt=len(tokens),
        num_computed=computed,
    )


def scheduler(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    prefix: bool = False,
    ttl_s: float | None = None,
    policy: str = "continuous",
    wait_s: float = 0.0,
    eos: tuple[int, ...] = (0,),
    **limits: Any,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": num_blocks * block_size,
    }
    return Scheduler(
        SchedulerLimits(**{**defaults, **limits}),
        make_policy(policy, wait_s=wait_s),
        pool,
        PrefixCache(pool, ttl_s) if prefix else NoPrefixCache(),
        eos_token_ids=eos,
    )


def scripted(plan: StepPlan, token: int = 7) -> StepResult:
    """Every sampling run yields `token`; prompt logprobs name the token they belong to."""
    return StepResult(tuple([_sampled(run, token) for run in plan.runs]))


def _sampled(run: Any, token: int) -> RunOutput:
    following = () if run.next_prompt_token is None else (run.next_prompt_token,)
    targets = (*run.tokens[1:], *following) if run.prompt_logprobs is not None else ()
    return RunOutput(
        (token,) if run.sample else (),
        prompt_logprobs=tuple([TokenLogprobs(t, -1.0, 1, ()) for t in targets]),
    )


def step(sched: Scheduler, now_s: float = 0.0, token: int = 7) -> tuple[StepPlan, list[Event]]:
    plan = sched.plan(now_s)
    return plan, sched.commit(plan, scripted(plan, token), now_s)


def shapes(plan: StepPlan) -> list[tuple[int, int]]:
    """(start, number of tokens) of each run."""
    return [(run.start, len(run.tokens)) for run in plan.runs]


def names(events: list[Event]) -> list[str]:
    """E.g. 'Token a.0'; Started and Failed have no index."""
    return [
        f"{type(event).__name__} {event.request_id}"
        + (f".{event.index}" if hasattr(event, "index") else "")
        for event in events
    ]
