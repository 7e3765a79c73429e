"""The engine thread, the only one that touches the scheduler, the runner and the detokenisers.

    any thread                    engine thread                          any thread
    submit, abort, call ─inbox─▶  commands, then plan · run · commit ──▶ Subscriber.deliver

Between two steps it executes every command that has arrived, so a request waits at most one step to
be seen, and a cancelled one frees its blocks before the next plan. With nothing to do it sleeps
until a command arrives or the scheduler's next wake-up is due.

If the runner fails on a step, the step's runs are tried one by one: those that fail again end with
a Failed event, the others continue. If the scheduler itself fails, its state cannot be trusted any
more: every request fails and the engine is dead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from ridgeline.engine.profiling.step_stats import RequestCounts, StepLog, StepTotals
from ridgeline.engine.scheduler.admission.limits import check_request
from ridgeline.engine.scheduler.admission.queue_limits import QueueLimiter
from ridgeline.engine.scheduler.plan import Run, Runner, RunOutput, StepPlan, StepResult
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.tokenization.event_texts import EventTexts
from ridgeline.engine.tokenization.tokenizer import Tokenizer
from ridgeline.engine.validate import id_in_use
from ridgeline.errors import EngineUnavailable, RidgelineError, UserError
from ridgeline.records import Event, Failed, FailureCause, Finished, Request

_LOG = logging.getLogger(__name__)
_MAX_FAILURES = 3  # consecutive failed steps after which the engine is unhealthy

T = TypeVar("T")
Command = Callable[[], Sequence[Event]]


class Subscriber(Protocol):
    """Receives events. Called on the engine thread, once per step: it must not block."""

    def deliver(self, events: Sequence[Event]) -> None: ...


@dataclass(slots=True)
class _Subscription:
    subscriber: Subscriber
    num_unfinished: int


class EngineLoop:
    """Runs the engine thread and passes requests to it.

    `on_start` is called first on the engine thread (torch sets its thread count per thread).
    `clock` returns seconds.
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
        self.queue_limiter = queue_limiter
        self.steps, self.counts = StepLog(totals), RequestCounts()
        # A bound method of this object would form a cycle, which would keep the weights alive until
        # the next garbage collection.
        self._texts = EventTexts(tokenizer, partial(_finish_at_stop_string, scheduler))
        self._wake = threading.Condition()
        self._inbox: list[Command] = []
        self._ids: set[str] = set()  # of requests submitted and not ended
        self._subscriptions: dict[str, _Subscription] = {}
        self._open, self._error = True, "the engine is closed"
        self._num_failures = 0
        self._due_since_s: float | None = None  # work is due and no step has finished since then
        self._thread = threading.Thread(
            target=self._main, args=(on_start,), name="ridgeline-engine", daemon=True
        )
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
            self.queue_limiter.admit(request.id, len(request.prompt), request.slo, self.clock())
            self._enqueue(request, subscriber)

    def abort(self, request_id: str) -> None:
        """End a request; does nothing if it is unknown or has ended."""
        with self._wake:
            if self._open and request_id in self._ids:
                self._send(lambda: self.scheduler.cancel(request_id, self.clock()))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread between two steps, where it may use the runner."""
        future: Future[T] = Future()
        with self._wake:
            self._send(partial(_resolve, future, function))
        return future

    def is_healthy(self, stall_s: float) -> bool:
        """True if the thread is alive, steps do not keep failing, and due work makes progress.

        `stall_s` is how long work may be due, in seconds, without a step being finished.
        """
        due_s = self._due_since_s
        alive = self._open and self._thread.is_alive() and self._num_failures < _MAX_FAILURES
        return alive and (due_s is None or self.clock() - due_s < stall_s)

    def close(self) -> None:
        """Stop after the current step; unfinished requests end as aborted."""
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join()

    def _check_new(self, request_id: str) -> None:
        if not self._open:
            raise EngineUnavailable(self._error)
        if request_id in self._ids:
            raise id_in_use(request_id)

    def _enqueue(self, request: Request, subscriber: Subscriber) -> None:
        self._check_new(request.id)
        self._send(partial(self._add, request, subscriber))
        self._ids.add(request.id)

    def _send(self, command: Command) -> None:
        if not self._open:
            raise EngineUnavailable(self._error)
        if self._due_since_s is None:
            self._due_since_s = self.clock()
        self._inbox.append(command)
        self._wake.notify()

    # -- on the engine thread

    def _main(self, on_start: Callable[[], None]) -> None:
        try:
            on_start()
            while self._execute_commands():
                self.step()
            for request_id in list(self._subscriptions):
                self._deliver(self.scheduler.cancel(request_id, self.clock()))
        except Exception as error:
            _LOG.exception("the engine stopped")
            self._fail_all(f"the engine stopped: {type(error).__name__}: {error}")

    def step(self) -> None:
        """Plan, run, commit, and deliver the events."""
        began_s = self.clock()
        plan = self.scheduler.plan(began_s)
        stats, planned_s = self.scheduler.stats(), self.clock()
        result = self._run(plan)
        done_s = self.clock()
        events = self.scheduler.commit(plan, result, done_s)
        if plan.runs:
            self.steps.record(plan, stats, began_s, planned_s, done_s)
            self._due_since_s = done_s if self.scheduler.has_work else None
        self._deliver(events)

    def _execute_commands(self) -> bool:
        """Wait for work and execute the commands sent; False once the engine is closed."""
        with self._wake:
            while self._open and not self._inbox and (wait_s := self._wait_s()) != 0:
                self._due_since_s = None
                self._wake.wait(wait_s)
            commands, self._inbox, still_open = self._inbox, [], self._open
        for command in commands:
            self._deliver(command())
        return still_open

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
        try:
            result = self.runner.run(plan)
        except Exception as error:
            if _is_request_error(error):
                _LOG.warning("step %d failed: %s", plan.index, error)
            else:
                _LOG.exception("step %d failed", plan.index)
                self._num_failures += 1
            return self._run_one_by_one(plan, error)
        self._num_failures = 0 if plan.runs else self._num_failures
        return result

    def _run_one_by_one(self, plan: StepPlan, error: Exception) -> StepResult:
        """Run every run of a failed step separately; those that fail again fail their requests.

        Block copies may be repeated, because none of them writes to a source.
        """
        if len(plan.runs) == 1:
            return StepResult((self._fail(plan.runs[0], error),))
        copies = [plan.copies, *[()] * (len(plan.runs) - 1)]
        outputs = []
        for run, own_copies in zip(plan.runs, copies, strict=True):
            try:
                result = self.runner.run(StepPlan(plan.index, (run,), own_copies))
                outputs.append(result.outputs[0])
            except Exception as own_error:
                outputs.append(self._fail(run, own_error))
        return StepResult(tuple(outputs))

    def _fail(self, run: Run, error: Exception) -> RunOutput:
        """Fail the run's request. The scheduler then ignores the output committed for it."""
        request_id = self.scheduler.request_id_of(run)
        if request_id is not None:
            is_users = isinstance(error, UserError)
            message = str(error) if is_users else f"{type(error).__name__}: {error}"
            cause: FailureCause = "request" if is_users else "error"
            self._deliver(self.scheduler.fail(request_id, message, cause=cause))
        return RunOutput()

    def _fail_all(self, error: str) -> None:
        """Fail every request, including those whose commands are still in the inbox."""
        with self._wake:
            self._open, self._error = False, error
            commands, self._inbox = self._inbox, []
        for command in commands:
            with suppress(Exception):
                command()
        for request_id, subscription in list(self._subscriptions.items()):
            failed = Failed(request_id=request_id, at_s=self.clock(), error=error)
            subscription.subscriber.deliver([failed])
            with self._wake:
                self._count(failed)


def _is_request_error(error: Exception) -> bool:
    """True for errors that a request causes and that do not make the engine unhealthy.

    Those are UserErrors and plain ArithmeticErrors: a row without a token to choose, a grammar that
    exceeds its limits. Subclasses such as ZeroDivisionError are bugs of the engine.
    """
    return type(error) is ArithmeticError or isinstance(error, UserError)


def _resolve(future: Future[T], function: Callable[[], T]) -> Sequence[Event]:
    if not future.set_running_or_notify_cancel():
        return ()
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
    return ()


def _finish_at_stop_string(
    scheduler: Scheduler, request_id: str, index: int, stop: str
) -> list[Event]:
    return scheduler.finish(request_id, index, "stop", stop_reason=stop)
