"""Calibrate the planning arithmetic to a server, from outside, with five short runs.

    1    prompts of growing length, one after the other: TTFT, and TPOT of a single response
    2-4  2, 8 and 24 short prompts at once, repeated: TPOT while all of them generate
    5    4 at once with half the longest context that run 1 reached: what context costs

Every prompt is new random token ids, so that no prefix cache helps. A wave counts from the moment
its last response starts until its first ends. A server with fewer slots than a wave has requests
starts some responses after others have ended; such a wave is left out, with a note.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from datetime import date
from statistics import median

import ridgeline
from ridgeline.errors import EngineUnavailable
from ridgeline.measure.client.http_target import HttpTarget, first_model
from ridgeline.measure.client.target import LoadTarget, Recorder
from ridgeline.measure.metrics.latency import ttft_s
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.measure.workload.synthetic import FIRST_ID
from ridgeline.plan.calibration.remote_server import (
    DecodeSample,
    PromptSample,
    ServerRuns,
    fit_server_times,
)
from ridgeline.records import RequestTrace
from ridgeline.records.progress import Caution, Observer, silent, stage
from ridgeline.workflows.calibrate.calibration_result import CalibrationResult
from ridgeline.workflows.run_async import run_async
from ridgeline.workflows.targets import RemoteServer

PROMPT_LENGTHS = (16, 64, 192, 384, 768, 1536, 3072)
WAVES = (2, 8, 24)
DEEP_BATCH, MAX_DEEP_PROMPT = 4, 2048
SHORT_PROMPT, WAVE_OUTPUT, MIN_TOKENS = 32, 48, 8
SINGLE_OUTPUT, REPEATS = 24, 3
MAX_TOKEN_ID = 2000  # every tokenizer has the ids below
TIMEOUT_S = 120.0


class CalibrationSession:
    """Requests to one server, timed by one clock."""

    def __init__(self, target: LoadTarget, seed: int = 0) -> None:
        self._target, self._rng = target, random.Random(seed)
        self._numbers = itertools.count()

    async def request(self, num_prompt: int, num_output: int) -> RequestTrace:
        """One request with its own random prompt."""
        prompt = tuple(self._rng.randrange(FIRST_ID, MAX_TOKEN_ID) for _ in range(num_prompt))
        request = LoadRequest(
            id=f"calibrate-{next(self._numbers)}",
            kind="calibrate",
            prompt=prompt,
            max_tokens=num_output,
        )
        record, sent_s = Recorder(time.perf_counter), time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._target.send(request, record)
        except TimeoutError:
            record.record_failure(f"no response within {TIMEOUT_S:.0f} s")
        return record.to_trace(request, sent_s, sent_s)

    async def wave(self, batch: int, num_prompt: int, num_output: int) -> list[RequestTrace]:
        """`batch` requests at once."""
        return await asyncio.gather(*(self.request(num_prompt, num_output) for _ in range(batch)))


class ServerMeasurements:
    """The results of the runs, and notes on omitted measurements."""

    def __init__(self) -> None:
        self.prompts: list[PromptSample] = []
        self.decodes: list[DecodeSample] = []
        self.runs: list[str] = []
        self.notes: list[str] = []


def calibrate_server(
    server: RemoteServer, budget_s: float, observer: Observer = silent
) -> CalibrationResult:
    """Make the five runs and fit the calibration.

    Raises EngineUnavailable if the server answers no prompt of token ids, BadInput if the runs are
    too few for a fit.
    """
    return run_async(_calibrate(server, budget_s, observer))


async def _calibrate(
    server: RemoteServer, budget_s: float, observer: Observer
) -> CalibrationResult:
    started_s = time.perf_counter()
    model = server.model or await first_model(server.url, api_key=server.api_key)
    target = HttpTarget(server.url, model, endpoint="completions", api_key=server.api_key)
    try:
        with stage(observer, f"calibrating {server.url}"):
            measurements = await measure_server(CalibrationSession(target), budget_s)
    finally:
        await target.close()
    for note in measurements.notes:
        observer(Caution(text=note))
    about = ServerRuns(
        server=server.url,
        model=model,
        as_of=date.today().isoformat(),
        source=f"ridgeline {ridgeline.__version__} calibrate --url {server.url}",
        took_s=time.perf_counter() - started_s,
        runs=tuple(measurements.runs),
    )
    fitted = fit_server_times(measurements.prompts, measurements.decodes, about)
    return CalibrationResult(server=fitted)


async def measure_server(session: CalibrationSession, budget_s: float) -> ServerMeasurements:
    """The five runs, as far as the budget allows."""
    results, end_s = ServerMeasurements(), time.perf_counter() + budget_s
    await _measure_prompts(session, results, time.perf_counter() + 0.4 * budget_s)
    for batch in WAVES:
        if time.perf_counter() < end_s:
            await _measure_wave(session, results, batch, SHORT_PROMPT)
    deep = min(MAX_DEEP_PROMPT, max((p.tokens for p in results.prompts), default=0) // 2)
    if deep >= 4 * SHORT_PROMPT and time.perf_counter() < end_s:
        await _measure_wave(session, results, DEEP_BATCH, SHORT_PROMPT)
        await _measure_wave(session, results, DEEP_BATCH, deep)
    return results


async def _measure_prompts(
    session: CalibrationSession, results: ServerMeasurements, end_s: float
) -> None:
    first = await session.request(PROMPT_LENGTHS[0], 4)  # includes one-time setup
    if first.error is not None or not first.token_s:
        why = first.error or "an empty response"
        raise EngineUnavailable(f"the server answered no prompt of token ids: {why}")
    for length in PROMPT_LENGTHS:
        length_s = time.perf_counter()
        traces = [await session.request(length, SINGLE_OUTPUT) for _ in range(REPEATS)]
        failed = _first_failure(traces)
        if failed is not None:
            results.notes.append(f"prompts of {length} tokens were refused: {failed.error}")
            break
        tokens = round(median(trace.prompt_tokens or length for trace in traces))
        results.prompts.append(PromptSample(tokens, median(_ttft_s(trace) for trace in traces)))
        decodes = [decoded for trace in traces if (decoded := decode_speed([trace])) is not None]
        if decodes:
            results.decodes.append(_median_decode(decodes))
        length_s = time.perf_counter() - length_s
        if time.perf_counter() + 2.5 * length_s > end_s:
            break
    lengths = ", ".join(str(prompt.tokens) for prompt in results.prompts)
    results.runs.append(f"prompts of {lengths} tokens, one at a time")


async def _measure_wave(
    session: CalibrationSession, results: ServerMeasurements, batch: int, num_prompt: int
) -> None:
    decodes: list[DecodeSample] = []
    for _ in range(REPEATS):
        traces = await session.wave(batch, num_prompt, WAVE_OUTPUT + batch)
        failed = _first_failure(traces)
        if failed is not None:
            results.notes.append(f"{batch} at once: {failed.error or 'an empty response'}")
            return
        decoded = decode_speed(traces)
        if decoded is None:
            results.notes.append(
                f"{batch} requests of {num_prompt} tokens never generated all at once (too few "
                "slots, or responses that end early): this run is left out"
            )
            return
        decodes.append(decoded)
    results.decodes.append(_median_decode(decodes))
    results.runs.append(f"{REPEATS} waves of {batch} prompts of {num_prompt} tokens")


def _first_failure(traces: Sequence[RequestTrace]) -> RequestTrace | None:
    return next((t for t in traces if t.error is not None or not t.token_s), None)


def decode_speed(traces: Sequence[RequestTrace]) -> DecodeSample | None:
    """Seconds per token while all requests generate; None if they hardly ever did."""
    start_s = max(trace.token_s[0] for trace in traces)
    end_s = min(trace.token_s[-1] for trace in traces)
    if end_s <= start_s:
        return None
    tpots_s, contexts = [], []
    for trace in traces:
        inside = [
            (at_s, count)
            for at_s, count in zip(trace.token_s, trace.token_counts, strict=True)
            if start_s <= at_s <= end_s
        ]
        tokens = sum(count for _, count in inside[1:])
        if tokens < MIN_TOKENS:
            return None
        tpots_s.append((inside[-1][0] - inside[0][0]) / tokens)
        contexts.append(trace.prompt_tokens + sum(trace.token_counts) - tokens / 2)
    return DecodeSample(len(traces), sum(contexts) / len(contexts), sum(tpots_s) / len(tpots_s))


def _median_decode(decodes: Sequence[DecodeSample]) -> DecodeSample:
    return sorted(decodes, key=lambda decode: decode.tpot_s)[len(decodes) // 2]


def _ttft_s(trace: RequestTrace) -> float:
    seconds = ttft_s(trace, "sent")
    assert seconds is not None, "traces without tokens were left out before"
    return seconds
