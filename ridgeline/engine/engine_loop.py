"""The engine thread: the only one that touches the scheduler, the runner and the texts.

    any thread                    engine thread                          any thread
    submit, abort, call ─inbox─▶  commands, then plan · run · commit ──▶ Subscriber.deliver

Between two steps it takes in every command that has come, so that a request waits at most one step to
be seen and a cancelled one gives its blocks back before the next plan. With nothing to do it sleeps
until a command comes or the scheduler's next instant.

When the runner fails on a step, the step's runs are tried one by one: those that fail alone end
with a Failed event, the others go on. When the scheduler itself fails nothing can be trusted any
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
from ridgeline.engine.tokenization.events import EventTexts
from ridgeline.engine.tokenization.tokenizer import Tokenizer
from ridgeline.engine.validate import id_in_use
from ridgeline.errors import EngineUnavailable, RidgelineError, UserError
from ridgeline.records import Event, Failed, FailureCause, Finished, Request

_LOG = logging.getLogger(__name__)
_MOST_FAILURES = 3  # failed steps in a row after which the engine no longer calls itself healthy

T = TypeVar("T")
Command = Callable[[], Sequence[Event]]


class Subscriber(Protocol):
    """Who is told. Called on the engine thread, once per step: it must not block."""

    def deliver(self, events: Sequence[Event]) -> None: ...


@dataclass(slots=True)
class _Listener:
    subscriber: Subscriber
    num_unfinished: int


class EngineLoop:
    """`on_start` runs first on the engine thread (torch's thread count is set per thread)."""

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
        # no method of this object: a cycle would keep the weights until somebody collects garbage
        self._texts = EventTexts(tokenizer, partial(_stop_at_string, scheduler))
        self._wake = threading.Condition()
        self._inbox: list[Command] = []
        self._ids: set[str] = set()  # of requests that were submitted and have not ended
        self._listeners: dict[str, _Listener] = {}
        self._open, self._error = True, "the engine is closed"
        self._num_failures = 0
        self._due_since_s: float | None = None  # work is due and no step has finished since
        self._thread = threading.Thread(
            target=self._main, args=(on_start,), name="ridgeline-engine", daemon=True
        )
        self._thread.start()

    # -- from any thread

    def submit(self, request: Request, subscriber: Subscriber) -> None:
        """Queue a request; its events go to `subscriber`. BadInput, DoesNotFit, EngineUnavailable."""
        check_request(request, self.scheduler.limits, self.scheduler.pool)
        with self._wake:
            self._queue(request, subscriber)

    def submit_if_admitted(self, request: Request, subscriber: Subscriber) -> None:
        """As `submit`, for a caller who would rather hear EngineFull than wait without end."""
        check_request(request, self.scheduler.limits, self.scheduler.pool)
        with self._wake:
            self._check_new(request.id)
            self.queue_limiter.admit(request.id, len(request.prompt), request.slo, self.clock())
            self._queue(request, subscriber)

    def abort(self, request_id: str) -> None:
        """End a request; nothing happens if it is unknown or has ended."""
        with self._wake:
            if self._open and request_id in self._ids:
                self._send(lambda: self.scheduler.cancel(request_id, self.clock()))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between two steps, where it may use the runner."""
        future: Future[T] = Future()
        with self._wake:
            self._send(partial(_resolve, future, function))
        return future

    def healthy(self, stall_s: float) -> bool:
        """Alive, not failing step after step, and making progress where there is work.

        `stall_s`: how long work may be due without one step being finished.
        """
        due_s = self._due_since_s
        alive = self._open and self._thread.is_alive() and self._num_failures < _MOST_FAILURES
        return alive and (due_s is None or self.clock() - due_s < stall_s)

    def close(self) -> None:
        """Stop after the step that is running; unfinished requests end as aborted."""
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join()

    def _check_new(self, request_id: str) -> None:
        if not self._open:
            raise EngineUnavailable(self._error)
        if request_id in self._ids:
            raise id_in_use(request_id)

    def _queue(self, request: Request, subscriber: Subscriber) -> None:
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
            while self._take_in():
                self.step()
            self._cancel_all()
        except Exception as error:
            _LOG.exception("the engine stopped")
            self._die(f"the engine stopped: {type(error).__name__}: {error}")

    def step(self) -> None:
        """Plan, run, commit."""
        began_s = self.clock()
        plan = self.scheduler.plan(began_s)
        view, planned_s = self.scheduler.stats(), self.clock()
        result = self._compute(plan)
        done_s = self.clock()
        events = self.scheduler.commit(plan, result, done_s)
        if plan.runs:
            self.steps.note(plan, view, began_s, planned_s, done_s)
            self._due_since_s = done_s if self.scheduler.has_work else None
        self._tell(events)

    def _take_in(self) -> bool:
        """Wait for something to do and carry out what was sent; False once the engine is closed."""
        with self._wake:
            while self._open and not self._inbox and (wait_s := self._wait_s()) != 0:
                self._due_since_s = None
                self._wake.wait(wait_s)
            commands, self._inbox, still_open = self._inbox, [], self._open
        for command in commands:
            self._tell(command())
        return still_open

    def _wait_s(self) -> float | None:
        """Seconds until the scheduler has something to plan: 0 now, None never by itself."""
        now_s = self.clock()
        wake_s = self.scheduler.next_wake_s(now_s)
        return None if wake_s is None else max(0.0, wake_s - now_s)

    def _add(self, request: Request, subscriber: Subscriber) -> Sequence[Event]:
        self._listeners[request.id] = _Listener(subscriber, request.sampling.n)
        self._texts.begin(request)
        self.counts.asked(request)
        try:
            self.scheduler.add(request)
        except RidgelineError as error:  # `submit` has checked it: this should not happen
            return [Failed(request_id=request.id, at_s=self.clock(), error=str(error))]
        return ()

    def _tell(self, events: Sequence[Event]) -> None:
        """Texts to the events, and the events to whoever listens: one delivery for each."""
        post: dict[Subscriber, list[Event]] = {}
        listeners = self._listeners
        told = self._texts.put([event for event in events if event.request_id in listeners])
        for event in told:
            post.setdefault(listeners[event.request_id].subscriber, []).append(event)
        if told:
            with self._wake:
                for event in told:
                    self._account(event)
        for subscriber, its_own in post.items():
            subscriber.deliver(its_own)

    def _account(self, event: Event) -> None:
        """Under the lock: the gate is asked by whoever submits."""
        self.queue_limiter.observe(event)
        if isinstance(event, Finished | Failed):
            self.counts.told(event)
            listener = self._listeners[event.request_id]
            listener.num_unfinished -= 1
            if isinstance(event, Failed) or not listener.num_unfinished:
                self._forget(event.request_id)

    def _forget(self, request_id: str) -> None:
        del self._listeners[request_id]
        self._texts.end(request_id)
        self._ids.discard(request_id)
        self.queue_limiter.remove(request_id)

    # -- when something fails

    def _compute(self, plan: StepPlan) -> StepResult:
        try:
            result = self.runner.run(plan)
        except Exception as error:
            if _is_request_error(error):
                _LOG.warning("step %d failed: %s", plan.index, error)
            else:
                _LOG.exception("step %d failed", plan.index)
                self._num_failures += 1
            return self._one_by_one(plan, error)
        self._num_failures = 0 if plan.runs else self._num_failures
        return result

    def _one_by_one(self, plan: StepPlan, error: Exception) -> StepResult:
        """Every run alone; those that fail again fail their requests. Copies may be done twice."""
        if len(plan.runs) == 1:
            return StepResult((self._fail(plan.runs[0], error),))
        copies = [plan.copies, *[()] * (len(plan.runs) - 1)]
        each = zip(plan.runs, copies, strict=True)
        return StepResult(tuple(self._alone(StepPlan(plan.index, (r,), c)) for r, c in each))

    def _alone(self, plan: StepPlan) -> RunOutput:
        try:
            return self.runner.run(plan).outputs[0]
        except Exception as error:
            return self._fail(plan.runs[0], error)

    def _fail(self, run: Run, error: Exception) -> RunOutput:
        """Fail the run's request. The scheduler ignores what is committed for it."""
        request_id = self.scheduler.request_id_of(run)
        if request_id is not None:
            is_request = isinstance(error, UserError)
            told = str(error) if is_request else f"{type(error).__name__}: {error}"
            cause: FailureCause = "request" if is_request else "error"
            self._tell(self.scheduler.fail(request_id, told, cause=cause))
        return RunOutput()

    def _cancel_all(self) -> None:
        for request_id in list(self._listeners):
            self._tell(self.scheduler.cancel(request_id, self.clock()))

    def _die(self, error: str) -> None:
        """Nothing can be trusted any more: everybody is told, those in the inbox too."""
        with self._wake:
            self._open, self._error = False, error
            commands, self._inbox = self._inbox, []
        for command in commands:
            with suppress(Exception):
                command()
        for request_id, listener in list(self._listeners.items()):
            failed = Failed(request_id=request_id, at_s=self.clock(), error=error)
            listener.subscriber.deliver([failed])
            with self._wake:
                self._account(failed)


def _is_request_error(error: Exception) -> bool:
    """A row that leaves no token to choose, a grammar out of fuel: no sign of ill health. (A
    division by zero, which is an ArithmeticError too, is ours.)"""
    return type(error) is ArithmeticError or isinstance(error, UserError)


def _resolve(future: Future[T], function: Callable[[], T]) -> Sequence[Event]:
    if not future.set_running_or_notify_cancel():
        return ()  # nobody waits for it any more
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
    return ()


def _stop_at_string(scheduler: Scheduler, request_id: str, index: int, stop: str) -> list[Event]:
    return scheduler.finish(request_id, index, "stop", stop_reason=stop)
