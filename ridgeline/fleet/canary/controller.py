"""A rollout as the gateway runs it: arms for sessions, copies for the canary, a state file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, get_args

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.fleet.backends import Backend, Backends
from ridgeline.fleet.call import RoutedCall
from ridgeline.fleet.canary.compare_answers import (
    ComparedAnswer,
    comparison_body,
    count_differences,
    json_answer,
    streamed_answer,
)
from ridgeline.fleet.canary.rollout import Outcome, Rollout, RolloutRecord, RolloutState
from ridgeline.fleet.relay import BrokenStream, StreamRelay
from ridgeline.fleet.upstream import BackendLost
from ridgeline.serve.generation.resume import IDENTITY_HEADER, RESUMABLE_HEADER

log = logging.getLogger("ridgeline.fleet")

_MAX_COPIES = 4  # at once: a canary that is slower than the traffic is not buried under it
_COPY_TIMEOUT_S = 600.0
_MAX_ANSWER_BYTES = 64 << 20
_BUSY = (408, 429, 503)
"""Statuses that say nothing of a version: it has no room for a copy."""


class _CopyFailed(Exception):
    """The canary has failed a copy."""


class CanaryControl(Protocol):
    """What the gateway asks of a rollout."""

    @property
    def rollout(self) -> Rollout | None: ...

    def begin(self, call: RoutedCall) -> None: ...

    def end(self, call: RoutedCall) -> None: ...

    async def stop(self) -> None: ...

    def metrics(self) -> Iterable[Metric]: ...


class NoCanary:
    """A gateway without a canary."""

    rollout = None

    def begin(self, call: RoutedCall) -> None:
        pass

    def end(self, call: RoutedCall) -> None:
        pass

    async def stop(self) -> None:
        pass

    def metrics(self) -> Iterable[Metric]:
        return ()


class _StateFile(msgspec.Struct, kw_only=True):
    canaries: list[str]
    rollout: RolloutRecord


class CanaryController:
    """Runs `rollout` over the backends. `shadow_share`: requests whose copy the canary answers."""

    def __init__(
        self, rollout: Rollout, backends: Backends, shadow_share: float, path: Path | None = None
    ) -> None:
        self.rollout: Rollout | None = rollout
        self._rollout, self._backends, self._shadow_share = rollout, backends, shadow_share
        self._path, self._copies = path, set[asyncio.Task[None]]()
        self.num_copies_failed = self.num_copies_dropped = 0
        self._canaries = sorted(str(b.address) for b in backends.all if b.arm == "canary")
        self._load()
        self._known = (rollout.state, rollout.record.stage)
        self._apply()

    def begin(self, call: RoutedCall) -> None:
        """Give the call its arm."""
        call.arm = self._rollout.arm_of(call.session)

    def end(self, call: RoutedCall) -> None:
        """Learn from a call that has ended, and have the canary answer a copy of it."""
        if self._rollout.state not in ("shadow", "split"):
            return
        has_failed = call.has_failed or call.arm in call.failed_arms
        if call.status and (call.status < 400 or has_failed):
            self._rollout.note_outcome(call.arm, call.session, _outcome(call, has_failed))
        if call.arm == "stable" and has_failed:
            self._rollout.note_shadow_error("stable", call.session, self._shadow_share)
        elif call.arm == "stable" and call.status == 200:
            self._copy(call)
        self._note_change()

    async def stop(self) -> None:
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)
        self._save()

    def metrics(self) -> Iterable[Metric]:
        """Series of a scrape."""
        record = self._rollout.record
        states = GaugeMetricFamily(
            "ridgeline_canary_state", "1 for the state of the rollout.", labels=["state"]
        )
        for state in get_args(RolloutState):
            states.add_metric([state], state == record.state)
        yield states
        evidence = GaugeMetricFamily(
            "ridgeline_canary_evidence",
            "Base-10 logarithm of the evidence that the canary is worse, by test.",
            labels=["test"],
        )
        for name, value in record.evidence.items():
            evidence.add_metric([name], value)
        yield evidence
        for name, text, value in (
            ("share", "The canary's share of the sessions.", self._rollout.share),
            ("compared_tokens", "Tokens of compared answers.", record.num_compared_tokens),
            ("copies_failed", "Copies that the canary did not answer.", self.num_copies_failed),
            ("copies_dropped", "Copies not sent because too many ran.", self.num_copies_dropped),
        ):
            yield GaugeMetricFamily(f"ridgeline_canary_{name}", text, value=value)

    # -- copies

    def _copy(self, call: RoutedCall) -> None:
        place = int.from_bytes(call.digest[:8], "little") / 2**64
        if place >= self._shadow_share:
            return
        stable = streamed_answer(call.relay) if call.streamed else json_answer(call.answer)
        body = comparison_body(call.body, call.relay) if stable is not None else None
        if stable is None or body is None:
            return
        if len(self._copies) >= _MAX_COPIES:
            self.num_copies_dropped += 1
            return
        task = asyncio.create_task(self._compare(call, stable, body))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    async def _compare(self, call: RoutedCall, stable: ComparedAnswer, body: bytes) -> None:
        try:
            async with asyncio.timeout(_COPY_TIMEOUT_S):
                answer = await self._ask(call, body)
        except (BackendLost, BrokenStream, TimeoutError, _CopyFailed) as error:
            log.warning("the canary failed a copy: %s", error)
            self.num_copies_failed += 1
            self._rollout.note_shadow_error("canary", call.session, self._shadow_share)
        else:
            if answer is None:
                self.num_copies_failed += 1
                return
            self._rollout.note_comparison(*count_differences(stable, answer))
        self._note_change()

    async def _ask(self, call: RoutedCall, body: bytes) -> ComparedAnswer | None:
        """The canary's answer to a copy: an empty one if it refuses what the stable version has
        answered; None if it has no room. Raises BackendLost, BrokenStream or _CopyFailed."""
        backend = next((b for b in self._ready()), None)
        if backend is None:
            return None
        headers = call.headers
        if call.relay.identity is not None:
            headers = [*headers, (RESUMABLE_HEADER.encode(), b"1")]
        connection = await backend.pool.exchange(b"POST", call.path.encode(), headers, body)
        try:
            data = await connection.read_all(_MAX_ANSWER_BYTES)
            if connection.status >= 500 and connection.status not in _BUSY:
                raise _CopyFailed(f"status {connection.status}")
            if connection.status != 200:
                return None if connection.status in _BUSY else self._refused(connection.status)
            if not call.streamed:
                return json_answer(data)
            relay = StreamRelay()
            relay.begin(dict(connection.headers).get(IDENTITY_HEADER.encode()))
            relay.feed(data)
            if relay.identity is not None and not (relay.has_ended or relay.is_migrating):
                raise _CopyFailed("its stream has no end")
            return streamed_answer(relay)
        finally:
            backend.pool.release(connection)

    def _refused(self, status: int) -> ComparedAnswer:
        log.warning("the canary refuses a copy of an answered request with status %d", status)
        return ComparedAnswer(choices=())

    def _ready(self) -> list[Backend]:
        return [b for b in self._backends.all if b.arm == "canary" and b.state == "ready"]

    # -- state

    def _note_change(self) -> None:
        now = (self._rollout.state, self._rollout.record.stage)
        if now != self._known:
            self._known = now
            reasons = "; ".join(self._rollout.record.reasons)
            log.warning("the canary is in state %s%s", now[0], f": {reasons}" if reasons else "")
            self._apply()
            self._save()

    def _apply(self) -> None:
        """A promoted canary is a backend like the others."""
        self._backends.has_arms = self._rollout.state != "promoted"

    def _load(self) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_StateFile)
        except (OSError, *DECODE_ERRORS) as error:
            raise BadInput(
                f"--canary-state is not a state file: {error}",
                value=str(self._path),
                fix="delete it to begin again",
            ) from None
        if kept.canaries == self._canaries:
            self._rollout.record = kept.rollout
            kept.rollout.stage = min(kept.rollout.stage, len(self._rollout.config.stages) - 1)

    def _save(self) -> None:
        if self._path is None:
            return
        state = _StateFile(canaries=self._canaries, rollout=self._rollout.record)
        part = self._path.with_name(self._path.name + ".part")
        with contextlib.suppress(OSError):  # the verdict holds in memory, and is in the log
            part.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
            part.replace(self._path)


def _outcome(call: RoutedCall, has_failed: bool) -> Outcome:
    """What the call came to."""
    ttft_s = pace_s = None
    if call.first_s is not None:
        num_units = call.relay.num_units if call.relay.identity is not None else call.num_bytes
        if call.streamed:
            ttft_s = call.first_s - call.sent_s
            num_units -= call.num_first_units
            began_s = call.first_s
        else:
            began_s = call.sent_s
        pace_s = (call.ended_s - began_s) / num_units if num_units > 0 else None
    slo, met_slo = call.slo, None
    if slo is not None:
        limits: list[tuple[float | None, Any]] = [
            (slo.ttft_s, ttft_s),
            (slo.tpot_s, pace_s if call.relay.identity is not None else None),
            (slo.e2e_s, call.ended_s - call.sent_s),
        ]
        met_slo = not any(
            limit is not None and value is not None and value > limit for limit, value in limits
        )
    return Outcome(has_failed=has_failed, met_slo=met_slo, ttft_s=ttft_s, pace_s=pace_s)
