"""The engine thread, the only one that touches the scheduler, the runner and the detokenisers.

    any thread                    engine thread                          any thread
    submit, abort, call ─inbox─▶  commands, then plan · run · commit ──▶ Subscriber.deliver

Between two steps it executes every command that has arrived, so a request waits at most one step to
be seen, and a cancelled one frees its blocks before the next plan. Calls are work like a step: at
most one piece of one runs between two steps, and they count in the queue limits. With nothing to do
it sleeps until a command arrives or the scheduler's next wake-up is due.

If the runner fails on a step, the step's runs are tried one by one: those that fail again end with
a Failed event, the others continue. If the scheduler itself fails, its state cannot be trusted any
more: every request fails and the engine is dead. A BaseException is a failure like any other here:
the panics of Rust libraries are none of Exception.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from ridgeline.engine.profiling.step_stats import RequestCounts, StepLog, StepTotals
from ridgeline.engine.scheduler.admission.limits import check_request
from ridgeline.engine.scheduler.admission.queue_limits import QueueLimiter
from ridgeline.engine.scheduler.plan import (
    BlockMoveFailed,
    NoTokenError,
    Run,
    Runner,
    RunOutput,
    StepPlan,
    StepResult,
    is_row_error,
)
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.tokenization.event_texts import EventTexts
from ridgeline.engine.tokenization.tokenizer import Tokenizer
from ridgeline.engine.validate import id_in_use
from ridgeline.errors import EngineUnavailable, RankFailed, RidgelineError, UserError
from ridgeline.records import Event, Failed, FailureCause, Finished, Request

_LOG = logging.getLogger(__name__)
_MAX_FAILURES = 3  # consecutive failed steps after which the engine is unhealthy
_EXIT_S = 30.0  # for which the end of the program waits for steps

T = TypeVar("T")
Command = Callable[[], Sequence[Event]]


def _no_transfer(plan: StepPlan) -> None:
    """There are no tiers."""


def _no_export() -> None:
    """No other server wants what was computed."""


_RUNNING: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End the threads of engines that were not closed, before Python ends them.

    A thread that returns from native code once Python has begun to shut down is unwound through
    destructors that may not throw: C++ aborts the process ("terminate called without an active
    exception").
    """
    threads = threading.enumerate()
    running = [loop for loop in list(_RUNNING) if loop._thread in threads]
    for loop in running:
        loop._ask_to_stop()
    for loop in running:
        loop._thread.join(_EXIT_S)


class Subscriber(Protocol):
    """Receives events. Called on the engine thread, once per step: it must not block."""

    def deliver(self, events: Sequence[Event]) -> None: ...


@dataclass(slots=True)
class _Call:
    """Work that is no step. `pieces` yields where a step may run, and returns the result."""

    id: str
    pieces: Generator[None, None, Any]
    future: Future[Any]
    account: str
    num_tokens: int = 0  # to compute
    piece_tokens: int = 0
    has_begun: bool = False

    def run_piece(self) -> bool:
        """Compute up to the next yield; whether there is more."""
        if self.future.cancelled():
            return False
        try:
            next(self.pieces)
        except StopIteration as end:
            resolve = partial(self.future.set_result, end.value)
        except BaseException as error:
            resolve = partial(self.future.set_exception, error)
        else:
            return True
        if self.future.set_running_or_notify_cancel():
            resolve()
        return False


@dataclass(slots=True)
class _Subscription:
    subscriber: Subscriber
    num_unfinished: int


class EngineLoop:
    """Runs the engine thread and passes requests to it.

    `on_start` is called first on the engine thread (torch sets its thread count per thread).
    `clock` returns seconds. The attribute `transfer` moves what a plan stores in and loads from the
    tiers of the KV cache; `after_commit` copies what it has computed for other servers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], float],
        on_start: Callable[[], None],
        totals: StepTotals,
        queue_limiter: QueueLimiter,
    ) -> None:
        self.scheduler, self.runner, self.clock = scheduler, runner, clock
        self.transfer: Callable[[StepPlan], None] = _no_transfer
        self.after_commit: Callable[[], None] = _no_export
        self.queue_limiter = queue_limiter
        self.steps, self.counts = StepLog(totals), RequestCounts()
        # A bound method of this object would form a cycle, which would keep the weights alive until
        # the next garbage collection.
        self._texts = EventTexts(tokenizer, partial(_finish_at_stop_string, scheduler))
        self._wake = threading.Condition()
        self._inbox: list[Command] = []
        self._calls: deque[_Call] = deque()
        self._call_ids = map("call-{}".format, itertools.count())
        self._turns: dict[str, int] = {}  # account → when a call of it last began
        self._turn_numbers = itertools.count(1)
        self._ids: set[str] = set()  # of requests submitted and not ended
        self._subscriptions: dict[str, _Subscription] = {}
        self._open, self._error = True, "the engine is closed"
        self._death: str | None = None
        self._num_extra_tokens = 0  # tokens that calls computed since the last step
        self._num_failures = self._total_failures = self._num_nan_logits = 0
        self._due_since_s: float | None = None  # work is due and no step has finished since then
        self._thread = threading.Thread(
            target=self._main, args=(on_start,), name="ridgeline-engine", daemon=True
        )
        _RUNNING.add(self)
        self._thread.start()

    # -- from any thread

    def submit(self, request: Request, subscriber: Subscriber) -> None:
        """Queue a request; its events go to `subscriber`.

        Raises BadInput, DoesNotFit or EngineUnavailable.
        """
        check_request(request, self.scheduler.limits, self.scheduler.pool)
        with self._wake:
            self._enqueue(request, subscriber)

    def submit_if_admitted(self, request: Request, subscriber: Subscriber) -> None:
        """Like `submit`, but raises EngineFull if the queue limits refuse the request."""
        check_request(request, self.scheduler.limits, self.scheduler.pool)
        with self._wake:
            self._check_new(request.id)
            num_tokens, now_s = len(request.prompt), self.clock()
            self.queue_limiter.admit(request.id, num_tokens, request.slo, now_s, request.account)
            self._enqueue(request, subscriber)

    def abort(self, request_id: str) -> None:
        """End a request; does nothing if it is unknown or has ended."""
        with self._wake:
            if self._open and request_id in self._ids:
                self._send(lambda: self.scheduler.cancel(request_id, self.clock()))

    def call(self, function: Callable[[], T], num_tokens: int = 0) -> Future[T]:
        """Run a function on the engine thread between two steps, where it may use the runner.

        `num_tokens` that it computes count in the queue limits until it begins. Raises EngineFull
        or EngineUnavailable.
        """
        return self.call_in_pieces(_one_piece(function), num_tokens)

    def call_in_pieces(
        self,
        pieces: Generator[None, None, T],
        num_tokens: int = 0,
        account: str = "",
        piece_tokens: int | None = None,
    ) -> Future[T]:
        """As `call`, for work that may be long: a step may run at each of its yields.

        The step after a piece, of at most `piece_tokens`, computes that much less.

        It counts in the queue limits until its first piece. Calls of several accounts take turns;
        one that has begun is finished first.
        """
        future: Future[T] = Future()
        with self._wake:
            self._check_open()
            per_piece = num_tokens if piece_tokens is None else piece_tokens
            call = _Call(next(self._call_ids), pieces, future, account, num_tokens, per_piece)
            self.queue_limiter.admit(call.id, num_tokens, None, self.clock(), account)
            future.add_done_callback(lambda _: self._forget(call))
            self._calls.append(call)
            self._note_due()
        return future

    def wake(self) -> None:
        """Let the engine thread look for work."""
        with self._wake:
            self._wake.notify()

    def as_dict(self) -> dict[str, float]:
        """Whether the thread is alive, how long work has waited for it, and what it failed on."""
        due_s, now_s = self._due_since_s, self.clock()
        with self._wake:
            queue_age_s = self.queue_limiter.age_s(now_s)
            predicted_s = self.queue_limiter.predict_ttft_s(now_s)
        return {
            "queue_age_s": queue_age_s,
            "predicted_ttft_s": predicted_s,
            "engine_alive": float(self._open and self._thread.is_alive()),
            "engine_stalled_s": 0.0 if due_s is None else max(0.0, now_s - due_s),
            "num_failed_steps": float(self._total_failures),
            "num_nan_logits": float(self._num_nan_logits),
        }

    def is_healthy(self, stall_s: float) -> bool:
        """True if the thread is alive, steps do not keep failing, and due work makes progress.

        `stall_s` is how long work may be due, in seconds, without a step being finished.
        """
        due_s = self._due_since_s
        alive = self._open and self._thread.is_alive() and self._num_failures < _MAX_FAILURES
        return alive and (due_s is None or self.clock() - due_s < stall_s)

    @property
    def death(self) -> str | None:
        """Why the engine has stopped by itself, for good; None before that and after `close`."""
        return self._death

    def fail(self, error: EngineUnavailable) -> None:
        """Stop the engine because something that it cannot do without is gone."""

        def stop() -> Sequence[Event]:
            raise error

        with self._wake:
            if self._open:
                self._send(stop)

    def close(self) -> None:
        """Stop after the current step; unfinished requests end as aborted."""
        self._ask_to_stop()
        self._thread.join()
        _RUNNING.discard(self)

    def _ask_to_stop(self) -> None:
        with self._wake:
            self._open = False
            self._wake.notify()

    def _check_open(self) -> None:
        if not self._open:
            raise EngineUnavailable(self._error)

    def _check_new(self, request_id: str) -> None:
        self._check_open()
        if request_id in self._ids:
            raise id_in_use(request_id)

    def _enqueue(self, request: Request, subscriber: Subscriber) -> None:
        self._check_new(request.id)
        self._send(partial(self._add, request, subscriber))
        self._ids.add(request.id)

    def _send(self, command: Command) -> None:
        self._check_open()
        self._inbox.append(command)
        self._note_due()

    def _note_due(self) -> None:
        if self._due_since_s is None:
            self._due_since_s = self.clock()
        self._wake.notify()

    def _forget(self, call: _Call) -> None:
        """A call has ended, or was cancelled before it began."""
        with self._wake:
            self.queue_limiter.remove(call.id)
            with suppress(ValueError):
                self._calls.remove(call)

    # -- on the engine thread

    def _main(self, on_start: Callable[[], None]) -> None:
        try:
            on_start()
            while self._execute_commands():
                self._run_call()
                self.step()
            self._fail_calls(self._error)
            for request_id in list(self._subscriptions):
                self._deliver(self.scheduler.cancel(request_id, self.clock()))
        except BaseException as error:
            _LOG.critical("the engine stopped", exc_info=True)
            self._fail_all(f"the engine stopped: {type(error).__name__}: {error}")

    def step(self) -> None:
        """Plan, run, commit, and deliver the events."""
        began_s = self.clock()
        plan = self.scheduler.plan(began_s, self._num_extra_tokens)
        stats, planned_s = self.scheduler.stats(), self.clock()
        result = self._run(plan)
        done_s = self.clock()
        events = self.scheduler.commit(plan, result, done_s)
        self.after_commit()
        if plan.runs:
            self.steps.record(plan, stats, began_s, planned_s, done_s)
            self._due_since_s = done_s if self.scheduler.has_work else None
        self._deliver(events)

    def _execute_commands(self) -> bool:
        """Wait for work and execute the commands sent; False once the engine is closed."""
        with self._wake:
            while not self._has_work and (wait_s := self._wait_s()) != 0:
                self._due_since_s = None
                self._wake.wait(wait_s)
            commands, self._inbox, still_open = self._inbox, [], self._open
        for command in commands:
            self._deliver(command())
        return still_open

    @property
    def _has_work(self) -> bool:
        return not self._open or bool(self._inbox or self._calls)

    def _run_call(self) -> None:
        """Run a piece of the next call, if there is one."""
        with self._wake:
            call = self._next_call()
            self._num_extra_tokens = 0 if call is None else min(call.num_tokens, call.piece_tokens)
        if call is None:
            return
        call.num_tokens -= self._num_extra_tokens
        has_more = call.run_piece()
        with self._wake:
            if has_more and not call.future.done():
                self._calls.appendleft(call)
            is_due = bool(self._calls) or self.scheduler.has_work
            self._due_since_s = self.clock() if is_due else None

    def _next_call(self) -> _Call | None:
        """Take the call that has begun, or that which has waited longest of the account whose turn
        it is."""
        if not self._calls:
            return None
        call = self._calls[0]
        if not call.has_begun:
            call = min(self._calls, key=lambda waiting: self._turns.get(waiting.account, 0))
            call.has_begun = True
            self._turns[call.account] = next(self._turn_numbers)
            self.queue_limiter.note_started(call.id, self.clock())
        self._calls.remove(call)
        return call

    def _fail_calls(self, error: str) -> None:
        with self._wake:
            calls = list(self._calls)
        for call in calls:
            with suppress(InvalidStateError):  # it was cancelled meanwhile
                call.future.set_exception(EngineUnavailable(error))

    def _wait_s(self) -> float | None:
        """Seconds until the scheduler has something to plan: 0 for now, None for never."""
        now_s = self.clock()
        wake_s = self.scheduler.next_wake_s(now_s)
        return None if wake_s is None else max(0.0, wake_s - now_s)

    def _add(self, request: Request, subscriber: Subscriber) -> Sequence[Event]:
        self._subscriptions[request.id] = _Subscription(subscriber, request.sampling.n)
        self._texts.begin(request)
        self.counts.count_request(request)
        try:
            self.scheduler.add(request)
            if request.resumed:
                return self.scheduler.replay(request.id, self.clock())
        except RidgelineError as error:  # `submit` has checked the request: this is unexpected
            return [Failed(request_id=request.id, at_s=self.clock(), error=str(error))]
        return ()

    def _deliver(self, events: Sequence[Event]) -> None:
        """Add the texts and pass the events on, with one `deliver` call per subscriber."""
        by_subscriber: dict[Subscriber, list[Event]] = {}
        subscriptions = self._subscriptions
        events = self._texts.add_texts([e for e in events if e.request_id in subscriptions])
        for event in events:
            subscriber = subscriptions[event.request_id].subscriber
            by_subscriber.setdefault(subscriber, []).append(event)
        if events:
            with self._wake:
                for event in events:
                    self._count(event)
        for subscriber, own_events in by_subscriber.items():
            subscriber.deliver(own_events)

    def _count(self, event: Event) -> None:
        """Call with the lock held: submitting threads read the queue limiter."""
        self.queue_limiter.observe(event)
        if isinstance(event, Finished | Failed):
            self.counts.count_end(event)
            subscription = self._subscriptions[event.request_id]
            subscription.num_unfinished -= 1
            if isinstance(event, Failed) or not subscription.num_unfinished:
                del self._subscriptions[event.request_id]
                self._texts.end(event.request_id)
                self._ids.discard(event.request_id)
                self.queue_limiter.remove(event.request_id)

    # -- failures

    def _run(self, plan: StepPlan) -> StepResult:
        if plan.stores or plan.loads:
            try:
                self.transfer(plan)
            except BaseException as error:
                return self._fail_transfer(plan, error)
        try:
            result = self.runner.run(plan)
        except RankFailed:
            raise
        except BlockMoveFailed as error:
            return self._fail_moves(plan, error.__cause__ or error)
        except BaseException as error:
            if _is_request_error(error):
                _LOG.warning("step %d failed: %s", plan.index, error)
            else:
                _LOG.exception("step %d failed", plan.index)
                self._num_failures += 1
                self._total_failures += 1
            return self._run_one_by_one(plan, error)
        self._num_failures = 0 if plan.runs else self._num_failures
        for run, output in zip(plan.runs, result.outputs, strict=True):
            if output.error is not None:
                self._fail(run, output.error)
        return result

    def _fail_transfer(self, plan: StepPlan, error: BaseException) -> StepResult:
        """Fail the plan's requests, and forget every cached block: some were not loaded."""
        self.scheduler.cache.tiers.cancel_transfers(plan)
        return self._fail_moves(plan, error)

    def _fail_moves(self, plan: StepPlan, error: BaseException) -> StepResult:
        """Fail the plan's requests, and forget every cached block: some were not moved."""
        _LOG.exception("step %d could not move blocks", plan.index, exc_info=error)
        self._num_failures += 1
        self._total_failures += 1
        result = StepResult(tuple([self._fail(run, error) for run in plan.runs]))
        for compaction in plan.compactions:
            self._fail_request(compaction.seq_id, error)
        self.scheduler.cache.clear()
        return result

    def _run_one_by_one(self, plan: StepPlan, error: BaseException) -> StepResult:
        """Run every run of a failed step separately; those that fail again fail their requests.

        Block copies may be repeated, because none of them writes to a source. Further choices of a
        request that has failed are not run; the first run is, because the copies come with it.
        """
        if len(plan.runs) == 1:
            return StepResult((self._fail(plan.runs[0], error),))
        copies = [plan.copies, *[()] * (len(plan.runs) - 1)]
        outputs: list[RunOutput] = []
        for run, own_copies in zip(plan.runs, copies, strict=True):
            if outputs and self.scheduler.request_id_of(run.seq_id) is None:
                outputs.append(RunOutput())
                continue
            try:
                result = self.runner.run(StepPlan(plan.index, (run,), own_copies))
                outputs.append(result.outputs[0])
            except RankFailed:
                raise
            except BaseException as own_error:
                outputs.append(self._fail(run, own_error))
        return StepResult(tuple(outputs))

    def _fail(self, run: Run, error: BaseException) -> RunOutput:
        """Fail the run's request. The scheduler then ignores the output committed for it."""
        if isinstance(error, NoTokenError) and not run.restricts_tokens:
            # Nothing in the request forbids tokens: the model computed NaN. If it does in every
            # step, its weights are damaged.
            self._num_nan_logits += 1
            self._num_failures += 1
        self._fail_request(run.seq_id, error)
        return RunOutput()

    def _fail_request(self, seq_id: int, error: BaseException) -> None:
        request_id = self.scheduler.request_id_of(seq_id)
        if request_id is not None:
            is_users = isinstance(error, UserError)
            message = str(error) if is_users else f"{type(error).__name__}: {error}"
            cause: FailureCause = "request" if is_users else "error"
            self._deliver(self.scheduler.fail(request_id, message, cause=cause))

    def _fail_all(self, error: str) -> None:
        """Fail every request, including those whose commands are still in the inbox."""
        with self._wake:
            self._open, self._error = False, error
            self._death = error
            commands, self._inbox = self._inbox, []
        self._fail_calls(error)
        for command in commands:
            with suppress(BaseException):
                command()
        for request_id, subscription in list(self._subscriptions.items()):
            at_s = self.clock()
            failed = Failed(request_id=request_id, at_s=at_s, error=error, cause="engine")
            subscription.subscriber.deliver([failed])
            with self._wake:
                self._count(failed)


def _is_request_error(error: BaseException) -> bool:
    """True for errors that a request causes and that do not make the engine unhealthy.

    Those are UserErrors and errors of single rows.
    """
    return is_row_error(error) or isinstance(error, UserError)


def _one_piece(function: Callable[[], T]) -> Generator[None, None, T]:
    result = function()
    yield from ()  # a generator without a stop
    return result


def _finish_at_stop_string(
    scheduler: Scheduler, request_id: str, index: int, stop: str
) -> list[Event]:
    return scheduler.finish(request_id, index, "stop", stop_reason=stop)
