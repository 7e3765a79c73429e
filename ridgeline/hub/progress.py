"""Bytes of a download, counted and reported to an observer a few times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ridgeline.records.progress import Observer, StageAdvanced, StageFinished, StageStarted

_REPORT_EVERY_S = 0.2


class DownloadMeter:
    """Counts the bytes of one download, from any thread. `total`: bytes, None if unknown."""

    def __init__(
        self,
        observer: Observer,
        stage: str,
        total: int | None,
        detail: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer, self._stage, self._clock = observer, stage, clock
        self._total, self._received, self._skipped = total, 0, 0
        self._started_s = self._reported_s = clock()
        self._lock = threading.Lock()
        observer(StageStarted(stage=stage, detail=detail, total=total, unit="bytes"))

    def skip(self, num_bytes: int) -> None:
        """Count bytes that were here before: they say nothing about the speed."""
        self._skipped += num_bytes
        self.add(num_bytes)

    def add(self, num_bytes: int) -> None:
        """Count bytes received; a negative number takes back what was received in vain."""
        with self._lock:
            self._received += num_bytes
            now = self._clock()
            if now - self._reported_s < _REPORT_EVERY_S:
                return
            self._reported_s = now
        self._observer(
            StageAdvanced(
                stage=self._stage,
                completed=self._received,
                total=self._total,
                detail=self._detail(now),
                remaining_s=self._remaining_s(now),
            )
        )

    def finish(self) -> None:
        self._observer(StageFinished(stage=self._stage))

    def _speed(self, now: float) -> float:
        return max(0, self._received - self._skipped) / max(now - self._started_s, 1e-9)

    def _detail(self, now: float) -> str:
        of = "" if self._total is None else f" of {self._total / 1e6:,.0f}"
        return f"{self._received / 1e6:,.0f}{of} MB · {self._speed(now) / 1e6:,.1f} MB/s"

    def _remaining_s(self, now: float) -> float | None:
        speed = self._speed(now)
        if self._total is None or speed == 0:
            return None
        return max(0, self._total - self._received) / speed
