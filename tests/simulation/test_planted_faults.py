"""The simulation can fail: it finds each of the bugs planted below within a few seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from ridgeline.engine.engine import Engine
from ridgeline.engine.engine_loop import EngineLoop
from ridgeline.engine.event_delivery import AsyncInboxes
from ridgeline.engine.scheduler.admission.queue_limits import QueueLimiter
from ridgeline.engine.scheduler.plan import Run, RunOutput
from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.engine.scheduler.sequence import Sequence as ScheduledSequence
from ridgeline.engine.tokenization.template_process.client import ProcessTemplate
from ridgeline.records import Event, Finished, Request, Token
from ridgeline.serve.batch import store as store_module
from ridgeline.serve.batch import worker as worker_module
from ridgeline.serve.batch.records import BatchResult
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.worker import BatchWorker
from ridgeline.serve.generation.stream import ResponseStream
from ridgeline.serve.metrics.request_timer import RequestTimer
from ridgeline.serve.model_group import ModelGroup
from ridgeline.serve.service import Service
from tests.simulation.batch_lives import simulate_batches
from tests.simulation.model import HashRunner
from tests.simulation.models import SimulatedAdapters
from tests.simulation.renderers import VirtualProcess
from tests.simulation.simulation import Violation, simulate

Plant = Callable[[pytest.MonkeyPatch], None]


def abort_leaks_blocks(patch: pytest.MonkeyPatch) -> None:
    def remove(self: Scheduler, group: Any, at_s: float) -> None:
        self._registry.remove_group(group)

    patch.setattr(Scheduler, "_remove_group", remove)


def choice_finishes_twice(patch: pytest.MonkeyPatch) -> None:
    def receive(self: ResponseStream, index: int, events: Sequence[Event]) -> None:
        original(self, index, events)
        for event in events:
            if isinstance(event, Finished):
                self._append(index, None, event)

    original = ResponseStream._receive
    patch.setattr(ResponseStream, "_receive", receive)


def last_token_is_lost(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Scheduler, *arguments: Any) -> list[Event]:
        events = original(self, *arguments)
        ends = any(isinstance(event, Finished) for event in events)
        return [event for event in events if not (ends and isinstance(event, Token))]

    original = Scheduler._advance
    patch.setattr(Scheduler, "_advance", advance)


def tokens_are_counted_once_per_delivery(patch: pytest.MonkeyPatch) -> None:
    def observe(self: RequestTimer, events: Sequence[Event], now_s: float) -> int:
        tokens = [event for event in events if isinstance(event, Token)]
        rest = [event for event in events if not isinstance(event, Token)]
        return original(self, [*tokens[:1], *rest], now_s)

    original = RequestTimer.observe
    patch.setattr(RequestTimer, "observe", observe)


def submitting_wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    def note_due(self: EngineLoop) -> None:
        if self._due_since_s is None:
            self._due_since_s = self.clock()

    patch.setattr(EngineLoop, "_note_due", note_due)


def disconnecting_aborts_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "abort", lambda self, request_id: None)


def events_behind_a_delivery_are_lost(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: AsyncInboxes, events: Sequence[Event]) -> None:
        if not self._pending:
            original(self, events)

    original = AsyncInboxes.deliver
    patch.setattr(AsyncInboxes, "deliver", deliver)


def started_requests_stay_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QueueLimiter, "note_started", lambda self, request_id, now_s: None)


def dead_renderer_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VirtualProcess, "poll", lambda self: None)


def hanging_renderer_is_left_behind(patch: pytest.MonkeyPatch) -> None:
    def kill(self: ProcessTemplate) -> None:
        self._process = None

    patch.setattr(ProcessTemplate, "_kill", kill)


def prefixes_are_shared_between_adapters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "cache_scope", property(lambda self: self.tenant))


def every_request_reaches_the_first_model(patch: pytest.MonkeyPatch) -> None:
    def check_model(self: Service, name: str | None, **_: Any) -> str:
        return name or self.name

    patch.setattr(ModelGroup, "find", lambda self, name: self.first)
    patch.setattr(Service, "check_model", check_model)


def new_version_takes_over_running_requests(patch: pytest.MonkeyPatch) -> None:
    """As if the id of an adapter followed from its name and not from its weights."""

    def begin(self: SimulatedAdapters, runs: Sequence[Run]) -> None:
        pass  # nothing is refused: the runs go on with whatever is loaded

    def compute(self: HashRunner, run: Run) -> RunOutput:
        latest = max((info.id for info in getattr(self._adapters, "loaded", ())), default=0)
        return original(self, replace(run, adapter=latest) if run.adapter else run)

    original = HashRunner._compute
    patch.setattr(SimulatedAdapters, "begin", begin)
    patch.setattr(HashRunner, "_compute", compute)


PLANTS: list[tuple[Plant, str]] = [
    (abort_leaks_blocks, "reference counts|owned blocks"),
    (choice_finishes_twice, "finishes twice|completion_tokens"),
    (last_token_is_lost, "assert|expected"),
    (tokens_are_counted_once_per_delivery, "tokens published and tokens counted differ"),
    (submitting_wakes_nobody, "no end after"),
    (disconnecting_aborts_nothing, "computes for a client"),
    (events_behind_a_delivery_are_lost, "wrong text|no end after|expected"),
    (dead_renderer_is_used, "renderers failed|status 400"),
    (hanging_renderer_is_left_behind, "renderers are alive"),
    (started_requests_stay_in_the_queue, "started requests are counted"),
    (prefixes_are_shared_between_adapters, "reads a wrong text|wrong text|no version of"),
    (every_request_reaches_the_first_model, "wrong text|unknown adapter"),
    (new_version_takes_over_running_requests, "another adapter than before|no version of"),
]


def result_and_count_are_two_transactions(patch: pytest.MonkeyPatch) -> None:
    def settle(self: BatchStore, results: Iterable[BatchResult]) -> int:
        results = list(results)
        with self._db.transaction() as db:
            accepted = [result for result in results if store_module._store_result(db, result)]
        with self._db.transaction() as db:
            for result in accepted:
                store_module._count_results(db, result.lease.batch_id, [result])
                store_module._finalize_if_complete(db, result.lease.batch_id, int(self._clock()))
        return len(accepted)

    patch.setattr(BatchStore, "settle", settle)


def death_of_the_worker_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchWorker, "has_died", False)


def full_disk_ends_the_worker(patch: pytest.MonkeyPatch) -> None:
    """Instead of being logged, after which it tries again."""

    def end(*_: object) -> None:
        raise asyncio.CancelledError

    patch.setattr(worker_module, "_LOG", mock.Mock(exception=end))


def choices_take_digests_of_unknown_tokens(patch: pytest.MonkeyPatch) -> None:
    """A choice that is forked from a resumed one has the digests of all that the other knows."""

    def fork(
        self: SequenceRegistry, source: ScheduledSequence, index: int, num_known: int
    ) -> ScheduledSequence:
        seq = original(self, source, index, num_known)
        seq.digests = list(source.digests)
        return seq

    original = SequenceRegistry.fork
    patch.setattr(SequenceRegistry, "fork", fork)


FIRST_SEEDS = {dead_renderer_is_used: 60, hanging_renderer_is_left_behind: 60}
"""Bugs that only rare faults show, from where on they do, which saves the seeds before."""


@pytest.mark.parametrize(("plant", "message"), PLANTS, ids=[p.__name__ for p, _ in PLANTS])
def test_planted_bug_is_found(plant: Plant, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation, match=message):
        for seed in range(FIRST_SEEDS.get(plant, 0), 150):
            simulate(seed)


BATCH_PLANTS: list[tuple[Plant, str, int]] = [
    (result_and_count_are_two_transactions, "'status': 'in_progress'", 44),
    (death_of_the_worker_goes_unnoticed, "a dead batch worker goes unnoticed", 0),
    (full_disk_ends_the_worker, "ended by itself", 11),
    (choices_take_digests_of_unknown_tokens, "is published as another text", 300565),
]
"""With a seed that shows it."""


@pytest.mark.parametrize(
    ("plant", "message", "seed"), BATCH_PLANTS, ids=[plant.__name__ for plant, *_ in BATCH_PLANTS]
)
def test_planted_bug_of_batches_is_found(
    plant: Plant, message: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        simulate_batches(seed)
