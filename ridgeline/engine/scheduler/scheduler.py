"""The scheduler: which tokens of which sequences are computed in the next step.

One rule (the insight of vLLM V1): a sequence has *known* tokens and *computed* tokens, and every
step lets the second catch up with the first under a token budget. Prefill, chunked prefill, decode,
a prefix hit, the recomputation of a preempted sequence and a forked choice differ only in how far
behind the computed tokens are. Nowhere is there a phase.

    plan    running sequences first, in order (`queue.py`), then waiting ones as the batching
            policy, the budget and the block pool allow. When blocks run out, the last in order is
            preempted: it gives all its blocks back and is recomputed later; its tokens stay known.
    commit  what the runner computed becomes computed; what it sampled becomes known, and events.

Why nothing starves: the order is static, so the first in order stays first until it is finished; it
is never preempted while another one owns blocks; alone it always fits (checked by `add`). So it
finishes, and then the next one is first. At the head of the queue nobody is overtaken for lack of
blocks.

Who may join, and what room it needs: `joining.py`. All of this holds within a lane; requests in the
background get what the others leave: `lanes.py`.

Drafts come last (`drafting.py`): what budget and blocks are left may carry guesses behind the last
known token of a run; `commit` takes in those that the runner confirmed.

No torch, no clock, no randomness: `now_s` and the seed come in, the runner stands between plan and
commit, and the simulator drives these same classes on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.engine.scheduler.admission.admitter import Admitter
from ridgeline.engine.scheduler.admission.limits import SchedulerLimits, check_request
from ridgeline.engine.scheduler.background_budget import BackgroundBudget, make_background_policy
from ridgeline.engine.scheduler.batching.base import BatchingPolicy
from ridgeline.engine.scheduler.events import aborted_events, finished_event, token_event
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache
from ridgeline.engine.scheduler.plan import Run, RunOutput, StepPlan, StepResult
from ridgeline.engine.scheduler.queue.deadlines import Deadlines
from ridgeline.engine.scheduler.queue.lanes import Lane
from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.sequence import Sequence, SequenceGroup, State
from ridgeline.engine.scheduler.speculation.base import DraftProposer
from ridgeline.engine.scheduler.speculation.draft_scheduler import DraftScheduler
from ridgeline.engine.scheduler.step_builder import (
    SchedulerStats,
    SchedulerTotals,
    StepBuilder,
    make_run,
    num_prompt_positions,
)
from ridgeline.engine.scheduler.stopping import StopRule
from ridgeline.records import (
    Event,
    Failed,
    FailureCause,
    Finished,
    FinishReason,
    Preempted,
    Request,
    Started,
)


class Scheduler:
    """Owns every sequence; see the head of this file.

    `eos_token_ids` end a sequence unless its sampling ignores them. `seed` is what requests without a
    seed of their own derive theirs from, together with their place in the order of `add`.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: BatchingPolicy,
        pool: BlockPool,
        cache: BlockCache,
        *,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        drafts: DraftProposer | None = None,
    ) -> None:
        self.limits, self.pool, self.cache, self.totals = limits, pool, cache, SchedulerTotals()
        self._rule = StopRule(eos_token_ids, limits.max_model_len)
        self._tables = BlockTables(pool, cache)
        self._registry = SequenceRegistry(limits.aging_s, seed)
        self.draft_scheduler = DraftScheduler(
            drafts, self._rule, self._tables, self._registry, pool
        )
        self._admitter = Admitter(
            limits, policy, self._registry, self._tables, cache, pool, self._preempt
        )
        self.background_budget = BackgroundBudget(
            make_background_policy(limits.background_tokens), self._registry
        )
        self._deadlines = Deadlines()
        self._events: list[Event] = []  # what plan has to tell; handed out by commit
        self._now_s = 0.0
        self._last = StepBuilder(limits, 0.0)

    # -- requests: from any moment between a commit and the next plan, or between plan and commit

    def add(self, request: Request) -> None:
        """Queue a request. BadInput or DoesNotFit if it could not be served even alone."""
        check_request(request, self.limits, self.pool)
        self._deadlines.add(self._registry.add(request))
        self.background_budget.add(request)

    def cancel(self, request_id: str, now_s: float | None = None) -> list[Event]:
        """End every unfinished choice of a request (unknown ids: none); its blocks are free at once.

        `now_s` None, here and below, stands for the instant of the latest plan or commit.
        """
        group = self._registry.requests.get(request_id)
        if group is None:
            return []
        at_s = self._at(now_s)
        events = aborted_events(group, at_s)
        self._drop(group, at_s)
        return events

    def fail(
        self,
        request_id: str,
        error: str,
        now_s: float | None = None,
        cause: FailureCause = "error",
    ) -> list[Event]:
        """As cancel, for a request that cannot be served any further: one Failed event."""
        group = self._registry.requests.get(request_id)
        if group is None:
            return []
        at_s = self._at(now_s)
        self._drop(group, at_s)
        return [Failed(request_id=request_id, at_s=at_s, error=error, cause=cause)]

    def finish(
        self,
        request_id: str,
        index: int,
        reason: FinishReason = "stop",
        *,
        stop_reason: str | int | None = None,
        now_s: float | None = None,
    ) -> list[Event]:
        """End one choice from outside, e.g. at a stop string. No events if it has ended already:
        then its Finished is among those of the same commit, for the caller to amend."""
        seq = self._registry.live(request_id, index)
        return [] if seq is None else [self._finish(seq, reason, stop_reason, self._at(now_s))]

    def fork(self, request_id: str, index: int) -> int:
        """Split a running choice in two that share all known tokens; the index of the new one.

        To be called between commit and plan, on a choice whose only pending token is its last one.
        """
        source = self._registry.live(request_id, index)
        assert source is not None and source.state is State.RUNNING and source.pending == 1
        new_index = self._registry.add_choice(source.group)
        self._fork(source, new_index, source.known)
        return new_index

    # -- the step

    def plan(self, now_s: float) -> StepPlan:
        """Decide the next step. It may hold no runs; hand it to `commit` all the same."""
        self._now_s = now_s
        self.background_budget.begin(now_s)
        self._expire(now_s)
        step = self._last = StepBuilder(self.limits, now_s)
        for lane in self._registry.lanes:
            self._plan_lane(lane, step)
        self.draft_scheduler.plan(step)
        self.background_budget.planned(step)
        plan = StepPlan(self.totals.num_steps, tuple(step.runs), self._tables.take_copies())
        self.totals.num_steps += bool(step.runs)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """Take in what the runner made of a plan. Runs of requests that ended meanwhile are ignored."""
        self._now_s = now_s
        events, self._events = self._events, []
        for run, sampled in zip(plan.runs, result.outputs, strict=True):
            seq = self._registry.running_by_id(run.seq_id)
            run = self.draft_scheduler.settle(seq, run, sampled)
            if seq is not None:
                self.draft_scheduler.judge(run, sampled)
                events += self._advance(seq, run, sampled)
        self.draft_scheduler.observe()
        return events

    @property
    def has_work(self) -> bool:
        return bool(self._registry.requests) or bool(self._events)

    def next_wake_s(self, now_s: float) -> float | None:
        """When to plan again if no request comes or goes: `now_s` if there is something to do now, a
        later instant if a policy or a deadline waits for it, None if nothing will happen by
        itself."""
        registry = self._registry
        if registry.running or self._events or any(len(lane.resuming) for lane in registry.lanes):
            return now_s
        if not any(len(lane.unstarted) for lane in registry.lanes):
            return None
        wakes = (self._admitter.wake_s(now_s), self._deadlines.next_s)
        return min((max(now_s, at_s) for at_s in wakes if at_s is not None), default=None)

    def request_id(self, run: Run) -> str | None:
        """Whose run it is; None once its sequence has ended or lost its seat."""
        return self._registry.request_id(run.seq_id)

    def num_in_background(self) -> tuple[int, int]:
        """Of the running and of the waiting sequences, those of background requests."""
        lane = self._registry.lanes[1]
        return lane.num_running, len(lane.unstarted) + len(lane.resuming)

    def view(self) -> SchedulerStats:
        """The scheduler's share of a StepStat; call it after `plan`."""
        return SchedulerStats(
            num_running=len(self._registry.running),
            num_waiting=self._registry.num_waiting,
            used_blocks=self.pool.num_owned,
            num_blocks=self.pool.num_blocks,
            max_num_seqs=self.limits.max_num_seqs,
            num_preempted=self._last.num_preempted,
            queried_tokens=self._last.queried_tokens,
            hit_tokens=self._last.hit_tokens,
        )

    # -- plan: those who run

    def _plan_lane(self, lane: Lane, step: StepBuilder) -> None:
        """Who runs, then who waits, unless somebody better waits or somebody lost blocks."""
        if not (lane.num_running or lane.has_waiting):
            return
        better = self._registry.lanes[: lane.rank]
        if any(each.num_running for each in better):
            self.background_budget.narrow(step)
        elif better and self.limits.chunked_prefill:
            self.background_budget.alone(step)
        self._plan_running(lane, step)
        if step.best_preempted > lane.rank and not any(each.has_waiting for each in better):
            self._plan_waiting(lane, step)

    def _plan_running(self, lane: Lane, step: StepBuilder) -> None:
        """Every running sequence of the lane in order; the end of the list may be preempted on the
        way."""
        running, reserve = self._registry.running, self._tables.reserve
        i = self._registry.num_running_up_to(lane) - lane.num_running
        while i < (end := self._registry.num_running_up_to(lane)):
            seq, later = running[i], end - i - 1
            num_tokens = step.budget.offer(seq.pending, later)
            if num_tokens and (reserve(seq, num_tokens) or self._make_room(seq, num_tokens, step)):
                self._run(seq, num_tokens, step, later)
            i += 1

    def _make_room(self, seq: Sequence, num_tokens: int, step: StepBuilder) -> bool:
        """Reserve blocks, preempting the last in order while they are short; `seq` itself last."""
        while not self._tables.reserve(seq, num_tokens):
            victim = self._registry.running[-1]
            assert len(self._registry.running) > 1, "alone, a sequence always fits"
            self._preempt(victim, step)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, step: StepBuilder) -> None:
        self.draft_scheduler.forget(seq)
        self._tables.release(seq, step.now_s)
        seq.forget_computed()
        self._registry.deactivate(seq)
        step.num_preempted += 1
        step.best_preempted = min(step.best_preempted, self._registry.lane(seq.request).rank)
        self.totals.num_preempted += 1
        self._events.append(Preempted(request_id=seq.request.id, index=seq.index, at_s=step.now_s))

    # -- plan: those who wait

    def _plan_waiting(self, lane: Lane, step: StepBuilder) -> None:
        while (joined := self._admitter.next(lane, step)) is not None:
            self._start(joined.seq, step)
            if joined.num_tokens:
                self._run(joined.seq, joined.num_tokens, step)

    def _start(self, seq: Sequence, step: StepBuilder) -> None:
        """If this is the request's first seat: the end of its queue time."""
        group = seq.group
        if group.started:
            return
        group.cached_tokens = seq.computed
        step.num_admitted += self._registry.start(group)
        self._events.append(
            Started(request_id=seq.request.id, at_s=step.now_s, cached_tokens=seq.computed)
        )
        if seq.num_prompt_logprobs is None:
            self.cache.count(seq.num_prompt, seq.computed)
            step.queried_tokens += seq.num_prompt
            step.hit_tokens += seq.computed

    def _run(self, seq: Sequence, num_tokens: int, step: StepBuilder, later: int = 0) -> None:
        step.budget.take(num_tokens, later)
        sample = self._rule.sample_at(seq) if num_tokens == seq.pending else None
        step.runs.append(make_run(seq, num_tokens, self.pool.block_size, sample))

    # -- commit

    def _advance(self, seq: Sequence, run: Run, sampled: RunOutput) -> list[Event]:
        assert seq.computed == run.start and bool(sampled.tokens) == (run.sample is not None)
        num_fed = len(run.tokens)
        end = run.start + num_fed - run.num_drafts
        if seq.num_prompt_logprobs is not None or sampled.prompt_logprobs:
            wanted = num_prompt_positions(seq, run.start, end)
            assert len(sampled.prompt_logprobs) == wanted, "one per position that was asked for"
            seq.prompt_logprobs += sampled.prompt_logprobs
        seq.computed = end
        self.totals.num_tokens += num_fed
        self.cache.publish(seq, self._now_s)
        if not sampled.tokens:
            return []
        if seq.group.unforked:
            self._fork_unforked(seq)
        if run.num_drafts:
            return self._extend(seq, sampled)
        event = token_event(seq, sampled, 0, self._now_s)
        seq.tokens.append(sampled.tokens[0])
        self.totals.num_sampled += 1
        stop = self._rule.stop(seq)
        return [event] if stop is None else [event, self._finish(seq, *stop, self._now_s)]

    def _extend(self, seq: Sequence, sampled: RunOutput) -> list[Event]:
        """Sampled tokens become known, up to the one that ends the sequence; all but the last of
        them were drafts, so that the step has computed them too."""
        events: list[Event] = []
        for i, token in enumerate(sampled.tokens):
            seq.computed += i > 0
            events.append(token_event(seq, sampled, i, self._now_s))
            seq.tokens.append(token)
            self.totals.num_sampled += 1
            stop = self._rule.stop(seq)
            if stop is not None:
                self.cache.publish(seq, self._now_s)
                return [*events, self._finish(seq, *stop, self._now_s)]
        self.cache.publish(seq, self._now_s)
        self._tables.trim(seq)
        return events

    def _fork_unforked(self, leader: Sequence) -> None:
        """The prompt is computed: the other choices begin from it."""
        unforked, leader.group.unforked = leader.group.unforked, []
        for index in unforked:
            self._fork(leader, index, leader.num_prompt)

    def _fork(self, source: Sequence, index: int, num_known: int) -> None:
        """A choice that shares the blocks of `source`; without a free seat it waits for one."""
        seq = self._registry.branch(source, index, num_known)
        if not self._admitter.ensure_slot(self._registry.lane(seq.request), self._last):
            self._registry.wait(seq)
            return
        blocks = source.blocks[: self.pool.blocks_for(num_known)]
        self._tables.adopt(seq, blocks, num_known - 1, self._now_s)
        self._registry.activate(seq)
        self.totals.num_forked += 1

    # -- endings

    def _finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None, at_s: float
    ) -> Finished:
        self.draft_scheduler.forget(seq)
        self._tables.release(seq, at_s)
        self._registry.remove(seq)
        self.totals.num_finished += 1
        return finished_event(seq, reason, stop_reason, at_s)

    def _drop(self, group: SequenceGroup, at_s: float) -> None:
        for seq in group.live.values():
            self.draft_scheduler.forget(seq)
            self._tables.release(seq, at_s)
        self._registry.remove_group(group)

    def _expire(self, now_s: float) -> None:
        """Deadlines that have passed, and cached blocks whose time is over."""
        self.cache.expire(now_s)
        for group in self._deadlines.passed(now_s):
            if self._registry.requests.get(group.request.id) is group:
                error = "its deadline has passed"
                self._events += self.fail(group.request.id, error, now_s, "deadline")

    def _at(self, now_s: float | None) -> float:
        return self._now_s if now_s is None else now_s
