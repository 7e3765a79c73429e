"""The scheduler: decides which tokens of which sequences the next step computes.

One rule, that of vLLM V1: a sequence has *known* tokens and *computed* tokens, and every step lets
the computed tokens catch up with the known ones under a token budget. Prefill, chunked prefill,
decode, a prefix hit, the recomputation of a preempted sequence and a forked choice differ only in
how far the computed tokens are behind. There are no phases.

    plan    Running sequences first, in priority order, then waiting ones as the batching policy,
            the token budget and the block pool allow. When blocks run out, the last sequence in
            order is preempted: it returns all of its blocks and is recomputed later. Its tokens
            stay known.
    commit  What the runner computed becomes computed, what it sampled becomes known, and both are
            reported as events.

No starvation. The order is static, so the first sequence stays first until it finishes. It is never
preempted while another sequence owns blocks, and on its own it always fits (`add` checks that). So
it finishes, and the next becomes first. The head of the queue is not overtaken for lack of blocks.

All of this holds within a lane. The background lane gets what interactive requests leave over.

No torch, no clock, no randomness: `now_s` and the seed are arguments, and the runner is called
between plan and commit. The simulator drives this same class on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.engine.scheduler.admission.admitter import Admitter
from ridgeline.engine.scheduler.admission.limits import SchedulerLimits, check_request
from ridgeline.engine.scheduler.background_budget import BackgroundBudget, make_background_policy
from ridgeline.engine.scheduler.batching.base import BatchingPolicy
from ridgeline.engine.scheduler.beam_search import Beams, BeamState, Continuation
from ridgeline.engine.scheduler.events import (
    aborted_events,
    beam_events,
    finished_event,
    token_event,
)
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.block_tables import BlockTables
from ridgeline.engine.scheduler.kv.prefix_cache import BlockCache
from ridgeline.engine.scheduler.plan import Run, RunOutput, StepPlan, StepResult
from ridgeline.engine.scheduler.queue.deadlines import Deadlines
from ridgeline.engine.scheduler.queue.lanes import Lane
from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.sequence import Sequence, SequenceGroup, State, prompt_of
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
    Token,
)


class Scheduler:
    """Owns every sequence; plans steps and commits their results.

    `eos_token_ids` end a sequence unless its sampling ignores them. A request without a seed
    derives one from `seed` and its place in the order of `add`. Instants are seconds on the
    caller's clock.
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
        self._tables = BlockTables(pool, cache, limits.kv_layout, limits.max_run_tokens)
        self._registry = SequenceRegistry(limits.aging_s, seed, pool.block_size)
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
        self._events: list[Event] = []  # events of the plan, handed out by the next commit
        self._has_evicted = False  # whether a request with KV eviction was ever added
        self._now_s = 0.0
        self._step = StepBuilder(limits, 0.0)  # the latest one

    # -- requests: may be called at any time except within plan or commit

    def add(self, request: Request) -> None:
        """Queue a request. Raises BadInput or DoesNotFit if it could not be served even alone."""
        request = self.limits.with_eviction(request)
        check_request(request, self.limits, self.pool)
        group = self._registry.add(request)
        group.beams = self._rule.new_beams(request)
        self._deadlines.add(group)
        self.background_budget.note_slo(request)
        self.draft_scheduler.note_request(request)
        seq = group.live[0]
        self._has_evicted |= seq.eviction is not None
        group.pinned_tokens = self.cache.pin(seq, max(self._now_s, request.arrival_s))
        wait = self.cache.tiers.start_loading(seq, max(self._now_s, request.arrival_s))
        if wait is not None:
            self._registry.lane_of(request).hold(seq, wait)

    def forget_prefix(self, request: Request) -> int:
        """Drop what is cached of a prompt, and its account's pins on it; the number of tokens."""
        return self.cache.forget(request.account or request.tenant, prompt_of(request))

    def pin_prefix(self, request: Request) -> int:
        """Pin or prolong what the request names without computing it; the number of tokens."""
        return self.cache.pin(prompt_of(request), max(self._now_s, request.arrival_s))

    def replay(self, request_id: str, now_s: float) -> list[Event]:
        """The events of the tokens that a request was resumed with, choice by choice.

        Call it directly after `add`. A choice that its last token ends is finished here.
        """
        events: list[Event] = []
        for seq in list(self._registry.groups[request_id].live.values()):
            for token in seq.tokens[seq.num_prompt :]:
                events.append(
                    Token(request_id=request_id, index=seq.index, token=token, text="", at_s=now_s)
                )
            stop = self._rule.check_stop(seq) if seq.num_output else None
            if stop is not None:
                events.append(self._finish(seq, *stop, now_s))
        return events

    def cancel(self, request_id: str, now_s: float | None = None) -> list[Event]:
        """Abort every unfinished choice of a request and free its blocks; [] for an unknown id.

        Here and below, `now_s` None means the time of the latest plan or commit.
        """
        group = self._registry.groups.get(request_id)
        if group is None:
            return []
        at_s = self._now_s if now_s is None else now_s
        events = aborted_events(group, at_s)
        self._remove_group(group, at_s)
        return events

    def fail(
        self,
        request_id: str,
        error: str,
        now_s: float | None = None,
        cause: FailureCause = "error",
    ) -> list[Event]:
        """Like `cancel`, for a request that cannot be served any further: one Failed event."""
        group = self._registry.groups.get(request_id)
        if group is None:
            return []
        at_s = self._now_s if now_s is None else now_s
        self._remove_group(group, at_s)
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
        """End one choice from outside, for example at a stop string.

        Returns [] if the choice has already ended: its Finished is then among the events of the
        same commit, and the caller may amend it.
        """
        seq = self._registry.find_choice(request_id, index)
        if seq is None:
            return []
        return [self._finish(seq, reason, stop_reason, self._now_s if now_s is None else now_s)]

    def fork(self, request_id: str, index: int) -> int:
        """Split a running choice into two that share all known tokens; returns the new index.

        Call it between commit and plan, on a choice whose only pending token is its last one.
        """
        source = self._registry.find_choice(request_id, index)
        assert source is not None and source.state is State.RUNNING and source.num_pending == 1
        new_index = self._registry.add_choice(source.group)
        self._fork(source, new_index, source.num_known)
        return new_index

    # -- the step

    def plan(self, now_s: float, num_extra_tokens: int = 0) -> StepPlan:
        """Decide the next step. Pass the plan to `commit` even if it has no runs.

        `num_extra_tokens` tokens were computed outside of steps since the last one.
        """
        step = self._begin_step(now_s, num_extra_tokens)
        for lane in self._registry.lanes:
            self._plan_lane(lane, step)
        if not step.runs and (held := [seq for seq in self._registry.running if seq.held]):
            self._preempt(held[-1], step)  # others wait for its slot or blocks
        self.draft_scheduler.plan(step)
        self.background_budget.end_plan(step)
        transfers = self.cache.tiers.take_transfers()
        copies, compactions = self._tables.take_copies(), self._tables.compactor.take()
        index, runs = self.totals.num_steps, tuple(step.runs)
        plan = StepPlan(index, runs, copies, compactions, *transfers)
        self.totals.num_steps += bool(step.runs)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """Apply a plan's result. Runs of sequences that ended in the meantime are ignored."""
        seconds, self._now_s = now_s - self._step.now_s, now_s
        self.cache.tiers.end_step(plan, seconds)
        events, self._events = self._events, []
        for run, output in zip(plan.runs, result.outputs, strict=True):
            seq = self._registry.find_running(run.seq_id)
            run = self.draft_scheduler.resolve_branches(seq, run, output)
            if seq is not None:
                self.draft_scheduler.count_outcome(seq, run, output)
                events += self._advance(seq, run, output)
        self.draft_scheduler.report_outcomes()
        self._admitter.observe(events)
        return events

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or an event has not been handed out."""
        return bool(self._registry.groups) or bool(self._events)

    def next_wake_s(self, now_s: float) -> float | None:
        """When to plan again if no request arrives or is cancelled.

        `now_s` if there is work now, a later time if a batching policy or a deadline is due then,
        None if nothing will become due by itself.
        """
        registry = self._registry
        if registry.running or self._events or any(len(lane.resuming) for lane in registry.lanes):
            return now_s
        loads = [wait.wake_s(now_s) for lane in registry.lanes for _, wait in lane.held.values()]
        if not loads and not any(len(lane.unstarted) for lane in registry.lanes):
            return None
        wakes = (self._admitter.wake_s(now_s), self._deadlines.next_s, *loads)
        return min((max(now_s, at_s) for at_s in wakes if at_s is not None), default=None)

    def request_id_of(self, seq_id: int) -> str | None:
        """The request of a sequence; None once the sequence has ended or was preempted."""
        seq = self._registry.find_running(seq_id)
        return None if seq is None else seq.request.id

    def num_background(self) -> tuple[int, int]:
        """Running and waiting sequences of background requests."""
        lane = self._registry.lanes[1]
        return lane.num_running, len(lane.unstarted) + len(lane.resuming)

    def stats(self) -> SchedulerStats:
        """The scheduler's part of a StepStat; call it after `plan`."""
        return SchedulerStats(
            num_running=len(self._registry.running),
            num_waiting=self._registry.num_waiting,
            used_blocks=self.pool.num_owned,
            num_blocks=self.pool.num_blocks,
            max_num_seqs=self.limits.max_num_seqs,
            num_preempted=self._step.num_preempted,
            queried_tokens=self._step.queried_tokens,
            hit_tokens=self._step.hit_tokens,
        )

    # -- simulation: steps whose outcome is known are applied without plan and commit

    @property
    def running(self) -> list[Sequence]:
        """Running sequences in scheduling order; read-only."""
        return self._registry.running

    @property
    def has_waiting(self) -> bool:
        """Whether an interactive request waits for a slot."""
        return self._registry.lanes[0].has_waiting

    @property
    def is_predictable(self) -> bool:
        """Whether the next step follows from running and waiting interactive requests alone.

        False with background requests, drafts, deadlines, expiring cache entries, cache tiers,
        layers with a window, KV eviction or events that the next commit has to deliver. Ask between
        a commit and the next plan.
        """
        background = self._registry.lanes[1]
        return not (
            background.num_running
            or background.has_waiting
            or self._events
            or self._deadlines.next_s is not None
            or self.draft_scheduler.has_proposer
            or self.cache.expires
            or self.cache.tiers.active
            or self.limits.kv_layout.windowed
            or self._has_evicted
        )

    def next_admissions(self) -> list[Sequence] | None:
        """The waiting interactive requests in admission order.

        None where preempted requests or several accounts wait, or the batching policy may hold
        requests back.
        """
        lane = self._registry.lanes[0]
        if len(lane.resuming) or not self._admitter.admits_immediately:
            return None
        if lane.unstarted.num_accounts > 1:
            return None
        return lane.unstarted.in_order()

    def start_waiting(self, count: int) -> list[Sequence]:
        """Start the first `count` of `next_admissions`, with blocks for their whole prompts.

        The caller has checked slots and blocks, and delivers the Started events itself.
        """
        started = []
        for _ in range(count):
            seq = self._registry.lanes[0].unstarted.pop()
            seq.blocks = self.pool.allocate_many(self.pool.num_blocks_for(seq.num_prompt))
            self._registry.activate(seq)
            self._registry.mark_started(seq.group)
            self.cache.record_lookup(seq.num_prompt, 0)
            started.append(seq)
        return started

    def record_steps(
        self, now_s: float, num_steps: int, num_tokens: int = 0, num_sampled: int = 0
    ) -> None:
        """Count steps that were applied without plan and commit; `now_s` is the new clock."""
        self._now_s = now_s
        self.totals.num_steps += num_steps
        self.totals.num_tokens += num_tokens
        self.totals.num_sampled += num_sampled

    # -- plan: running sequences

    def _begin_step(self, now_s: float, num_extra_tokens: int) -> StepBuilder:
        """Expire requests and cached blocks that are due, and start an empty step."""
        self._now_s = now_s
        self.background_budget.begin_step(now_s)
        self.cache.expire(now_s)
        for lane in self._registry.lanes:
            lane.release_held(now_s)
        for group in self._deadlines.pop_passed(now_s):
            if self._registry.groups.get(group.request.id) is group:  # otherwise it has ended
                error = "its deadline has passed"
                self._events += self.fail(group.request.id, error, now_s, "deadline")
        self._step = StepBuilder(self.limits, now_s, num_extra_tokens)
        return self._step

    def _plan_lane(self, lane: Lane, step: StepBuilder) -> None:
        """Running sequences of a lane, then waiting ones.

        Nothing is admitted while a request of a higher-priority lane waits, nor after this step has
        preempted a sequence of this or a higher-priority lane.
        """
        if not (lane.num_running or lane.has_waiting):
            return
        higher = self._registry.lanes[: lane.rank]
        if any(other.num_running for other in higher):
            self.background_budget.limit_mixed_step(step)
        elif higher and self.limits.chunked_prefill:
            self.background_budget.limit_background_step(step)
        self._plan_running(lane, step)
        if step.best_preempted > lane.rank and not any(other.has_waiting for other in higher):
            while (admitted := self._admitter.admit_next(lane, step)) is not None:
                self._mark_started(admitted.seq, step)
                if admitted.num_tokens:
                    self._append_run(admitted.seq, admitted.num_tokens, step)

    def _plan_running(self, lane: Lane, step: StepBuilder) -> None:
        running, reserve = self._registry.running, self._tables.reserve
        i = self._registry.num_running_up_to(lane) - lane.num_running
        # The end moves: making room for one sequence may preempt those behind it.
        while i < (end := self._registry.num_running_up_to(lane)):
            seq, later = running[i], end - i - 1
            num_tokens = 0 if seq.held else step.offer(seq, seq.num_computed, later)
            if num_tokens and seq.eviction is not None and not self._compact(seq, step):
                num_tokens = 0
            if num_tokens and (reserve(seq, num_tokens) or self._make_room(seq, num_tokens, step)):
                self._append_run(seq, num_tokens, step, later)
            i += 1

    def _compact(self, seq: Sequence, step: StepBuilder) -> bool:
        """Evict what is due; False if the sequence has to wait for blocks.

        Tokens kept of shared blocks move to other blocks, taken from the end of the order.
        """
        while not self._tables.compactor.compact(seq):
            victim = self._registry.running[-1]
            if len(self._registry.running) == 1:
                return False  # the blocks that this plan copies from come free with the next one
            self._preempt(victim, step)
            if victim is seq:
                return False
        return True

    def _make_room(self, seq: Sequence, num_tokens: int, step: StepBuilder) -> bool:
        """Reserve blocks, preempting from the end; False if `seq` has to wait or had to go."""
        while not self._tables.reserve(seq, num_tokens):
            victim = self._registry.running[-1]
            if len(self._registry.running) == 1:
                assert self._tables.compactor.holds_blocks, "a sequence always fits on its own"
                return False  # they come free with the next plan
            self._preempt(victim, step)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, step: StepBuilder) -> None:
        self.draft_scheduler.forget(seq)
        self.cache.tiers.note_release(seq, resumes=True)
        self._tables.release(seq, step.now_s)
        seq.reset_computed()
        self._registry.deactivate(seq)
        step.num_preempted += 1
        step.best_preempted = min(step.best_preempted, self._registry.lane_of(seq.request).rank)
        self.totals.num_preempted += 1
        self._events.append(Preempted(request_id=seq.request.id, index=seq.index, at_s=step.now_s))

    # -- plan: waiting sequences

    def _mark_started(self, seq: Sequence, step: StepBuilder) -> None:
        """The first slot of a request ends its queue time."""
        group = seq.group
        if group.started:
            return
        group.cached_tokens = min(seq.num_computed, seq.num_prompt)
        step.num_admitted += self._registry.mark_started(group)
        self._events.append(
            Started(
                request_id=seq.request.id,
                at_s=step.now_s,
                cached_tokens=group.cached_tokens,
                pinned_tokens=group.pinned_tokens,
            )
        )
        if seq.num_prompt_logprobs is None:  # prompt logprobs bypass the cache: not a lookup
            self.cache.record_lookup(seq.num_prompt, group.cached_tokens)
            step.queried_tokens += seq.num_prompt
            step.hit_tokens += group.cached_tokens

    def _append_run(
        self, seq: Sequence, num_tokens: int, step: StepBuilder, later: int = 0
    ) -> None:
        step.take(seq, num_tokens, later)
        sample = self._rule.sample_point(seq) if num_tokens == seq.num_pending else None
        step.runs.append(make_run(seq, num_tokens, self.pool.block_size, sample))

    # -- commit

    def _advance(self, seq: Sequence, run: Run, output: RunOutput) -> list[Event]:
        """Move one sequence past what its run computed and sampled."""
        is_sampled = run.sample is not None and not output.is_late
        assert seq.num_computed == run.start and bool(output.tokens) == is_sampled
        num_fed = len(run.tokens)
        end = run.start + num_fed - run.num_drafts
        if seq.num_prompt_logprobs is not None or output.prompt_logprobs:
            wanted = num_prompt_positions(seq, run.start, end)
            assert len(output.prompt_logprobs) == wanted, "one entry per requested position"
            seq.prompt_logprobs += output.prompt_logprobs
        seq.num_computed = end - output.is_late
        self.totals.num_tokens += num_fed
        self.cache.publish(seq, self._now_s)
        if not output.tokens:
            return []
        if seq.request.account:
            self._registry.lane_of(seq.request).unstarted.count_served(seq, len(output.tokens))
        if seq.group.beams is not None:
            return self._advance_beam(seq, seq.group.beams, output)
        if seq.group.unforked:
            self._fork_unforked(seq)
        if run.num_drafts:
            return self._accept_drafts(seq, output)
        event = token_event(seq, output, 0, self._now_s)
        seq.tokens.append(output.tokens[0])
        self.totals.num_sampled += 1
        stop = self._rule.check_stop(seq)
        return [event] if stop is None else [event, self._finish(seq, *stop, self._now_s)]

    def _accept_drafts(self, seq: Sequence, output: RunOutput) -> list[Event]:
        """Append sampled tokens up to the end; all but the last were drafts, and are computed."""
        events: list[Event] = []
        for i, token in enumerate(output.tokens):
            seq.num_computed += i > 0
            events.append(token_event(seq, output, i, self._now_s))
            seq.tokens.append(token)
            self.totals.num_sampled += 1
            stop = self._rule.check_stop(seq)
            if stop is not None:
                self.cache.publish(seq, self._now_s)
                return [*events, self._finish(seq, *stop, self._now_s)]
        self.cache.publish(seq, self._now_s)
        self._tables.trim(seq)
        return events

    def _advance_beam(self, seq: Sequence, beams: BeamState, output: RunOutput) -> list[Event]:
        """Record a beam's continuations; with those of all beams, choose the next ones."""
        beams.record(seq.index, output.logprobs[0].top)
        seq.tokens.append(output.tokens[0])
        seq.held = True
        self.totals.num_sampled += 1
        if not beams.is_complete:
            return []
        group = seq.group
        outputs = {i: tuple(own.tokens[own.num_prompt : -1]) for i, own in group.live.items()}
        living = beams.advance(outputs)
        if not living:
            events = beam_events(group, self._now_s)
            self.totals.num_finished += len(beams.finished)
            self._remove_group(group, self._now_s)
            return events
        beams.follow(self._continue_beams(group, living))
        return []

    def _continue_beams(self, group: SequenceGroup, living: list[Continuation]) -> Beams:
        """Drop the beams that nothing continues and fork the others; the beams by index."""
        for index in group.live.keys() - {own.parent for own in living}:
            self._tables.release(group.live[index], self._now_s)
            self._registry.remove(group.live[index])
        beams: dict[int, Continuation] = {}
        parents = {own.parent: group.live[own.parent] for own in living}
        for own in living:
            seq, index = parents[own.parent], own.parent
            if index in beams:  # another token continues the parent's own sequence
                index = self._registry.add_choice(group)
                self._fork(seq, index, seq.num_known)
            beams[index] = own
            group.live[index].tokens[-1] = own.token
        for seq in parents.values():
            seq.held = False
            if seq.state is State.WAITING:  # preempted while it was held
                self._registry.enqueue_resuming(seq)
        return beams

    def _fork_unforked(self, leader: Sequence) -> None:
        """The prompt is computed: fork the remaining choices of the request from it."""
        unforked, leader.group.unforked = leader.group.unforked, []
        for index in unforked:
            self._fork(leader, index, leader.num_prompt)

    def _fork(self, source: Sequence, index: int, num_known: int) -> None:
        """Add a choice that shares the blocks of `source`.

        Without a free slot it waits for one; where prefixes are not shared, it computes its own.
        """
        seq = self._registry.fork(source, index, num_known)
        lane = self._registry.lane_of(seq.request)
        shares = self.limits.shares_prefixes and seq.eviction is None
        shares = shares and source.state is State.RUNNING  # a held beam may have been preempted
        if not shares or not self._admitter.ensure_slot(lane, self._step):
            self._registry.enqueue_resuming(seq)
            return
        prefix = self._tables.shared_prefix(source, num_known)
        assert prefix is not None, "the blocks of the latest step are given back after it"
        self._tables.adopt_prefix(seq, prefix, self._now_s)
        self._registry.activate(seq)
        self.totals.num_forked += 1

    # -- ends

    def _finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None, at_s: float
    ) -> Finished:
        self.draft_scheduler.forget(seq)
        self.cache.tiers.note_release(seq)
        self._tables.release(seq, at_s)
        self._registry.remove(seq)
        self.totals.num_finished += 1
        return finished_event(seq, reason, stop_reason, at_s)

    def _remove_group(self, group: SequenceGroup, at_s: float) -> None:
        for seq in group.live.values():
            self.draft_scheduler.forget(seq)
            self.cache.tiers.note_release(seq)
            self._tables.release(seq, at_s)
        self._registry.remove_group(group)
