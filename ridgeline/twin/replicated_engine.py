"""Several engines behind one address: data parallelism, as one engine for the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any, Literal

from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization import Tokenizer
from ridgeline.records import CachePolicy, EngineInfo, Event, Finished, Sampling
from ridgeline.records.events import Failed
from ridgeline.twin.runner import ModelledRunner

EventSink = Callable[[Sequence[Event]], None]
_LEVELS = (
    "kv_cache_usage_perc",
    "queue_age_s",
    "predicted_ttft_s",
)  # means over the replicas; everything else is summed


class ReplicatedEngine:
    """Sends each request to the replica with the fewest requests."""

    def __init__(self, replicas: Sequence[tuple[Engine, ModelledRunner]]) -> None:
        self._engines = [engine for engine, _ in replicas]
        self._runners = [runner for _, runner in replicas]
        self._in_flight = [0] * len(replicas)

    @property
    def info(self) -> EngineInfo:
        return self._engines[0].info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engines[0].tokenizer

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: EventSink,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Callable[[], None]:
        """As `Engine.listen`, on the replica that was chosen."""
        index = self._in_flight.index(min(self._in_flight))
        release = partial(self._release, index, [True])
        unfinished = [sampling.n]

        def count(events: Sequence[Event]) -> None:
            unfinished[0] -= sum([isinstance(event, Finished) for event in events])
            if unfinished[0] <= 0 or any(isinstance(event, Failed) for event in events):
                release()
            sink(events)

        self._in_flight[index] += 1
        try:
            leave = await self._engines[index].listen(
                prompt, sampling, count, timeout_s=timeout_s, **options
            )
        except BaseException:
            release()
            raise

        def leave_and_release() -> None:
            leave()
            release()

        return leave_and_release

    def _release(self, index: int, held: list[bool]) -> None:
        if held[0]:
            held[0] = False
            self._in_flight[index] -= 1

    def embed(
        self, tokens: Sequence[int], pooling: Literal["mean", "last"], account: str = ""
    ) -> Future[Sequence[float]]:
        return self._engines[0].embed(tokens, pooling, account)

    def forget_prefix(
        self, tokens: Sequence[int], tenant: str = "", account: str = ""
    ) -> Future[int]:
        """Drop a prefix on every replica; the first one's number of tokens."""
        dropping = [engine.forget_prefix(tokens, tenant, account) for engine in self._engines]
        return dropping[0]

    def pin_prefix(
        self, tokens: Sequence[int], policy: CachePolicy, tenant: str = "", account: str = ""
    ) -> Future[int]:
        """Pin a prefix on every replica; the first one's number of tokens."""
        pinning = [engine.pin_prefix(tokens, policy, tenant, account) for engine in self._engines]
        return pinning[0]

    def abort(self, request_id: str) -> None:
        for engine in self._engines:
            engine.abort(request_id)

    def counters(self) -> Mapping[str, float]:
        """Sums over the replicas; means of shares."""
        sums: Counter[str] = Counter()
        for name, value in chain.from_iterable(e.counters().items() for e in self._engines):
            sums[name] += value  # type: ignore[assignment]  # Counter is typed for integers
        for name in _LEVELS:
            sums[name] /= len(self._engines)  # type: ignore[assignment]  # as above
        return sums

    def is_healthy(self) -> bool:
        return all(engine.is_healthy() for engine in self._engines)

    @property
    def death(self) -> str | None:
        """Why the first replica that has stopped by itself did so; None if none has."""
        deaths = (engine.death for engine in self._engines)
        return next((death for death in deaths if death is not None), None)

    def late_s(self) -> float:
        """Seconds that the replicas' steps ended later than modelled, in all."""
        return sum(runner.late_s for runner in self._runners)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
