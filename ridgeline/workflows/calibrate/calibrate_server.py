"""Calibrate the planning arithmetic to a server, from outside, with five short runs.

    1    prompts of growing length, one after the other: TTFT, and TPOT of a single response
    2-4  2, 8 and 24 short prompts at once, repeated: TPOT while all of them generate
    5    4 at once with half the longest context that run 1 reached: what context costs

Every prompt is new random token ids, so that no prefix cache helps; as text for a server that takes
none. A wave counts from the moment its last response starts until its first ends. A server with
fewer slots than a wave has requests starts some responses after others have ended; such a wave is
left out, with a note. A measurement during which other work took the CPU is repeated. If the
machine stays busy, or the server answered other clients, nothing is fitted.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from functools import partial
from statistics import median

import ridgeline
from ridgeline.errors import BadInput, EngineUnavailable, Inconclusive
from ridgeline.measure.client.accepted_prompts import ANY_FORM, NAMES
from ridgeline.measure.client.http_target import HttpTarget, first_model
from ridgeline.measure.client.target import LoadTarget, Recorder
from ridgeline.measure.metrics.latency import ttft_s
from ridgeline.measure.monitors.machine_load import LoadMeter
from ridgeline.measure.monitors.server_metrics import ServerReport
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
from ridgeline.records.trace import BUSY_SHARE
from ridgeline.workflows.calibrate.calibration_result import CalibrationResult
from ridgeline.workflows.load.server_monitor import metrics_scraper, watch_machine
from ridgeline.workflows.load.server_tokenizer import vocabulary_of
from ridgeline.workflows.run_async import run_async
from ridgeline.workflows.targets import RemoteServer

PROMPT_LENGTHS = (16, 64, 192, 384, 768, 1536, 3072)
WAVES = (2, 8, 24)
DEEP_BATCH, MAX_DEEP_PROMPT = 4, 2048
SHORT_PROMPT, WAVE_OUTPUT, MIN_TOKENS = 32, 48, 8
SINGLE_OUTPUT, REPEATS = 24, 3
MAX_TOKEN_ID = 2000  # every tokenizer has the ids below
TIMEOUT_S = 120.0
MAX_TRIES = 3  # of a measurement on a busy machine
OTHERS_SHARE = 0.05  # of the generated tokens that may be other clients'


class CalibrationSession:
    """Requests to one server, timed by one clock. `pids`: its processes, if they are known here."""

    def __init__(self, target: LoadTarget, seed: int = 0, pids: Sequence[int] = ()) -> None:
        self._target, self._rng = target, random.Random(seed)
        self._numbers = itertools.count()
        self._pids = tuple(pids)
        self.output_tokens = 0

    async def undisturbed(
        self, measure: Callable[[], Awaitable[list[RequestTrace]]], results: ServerMeasurements
    ) -> list[RequestTrace]:
        """Measure; again while other work took the CPU. The last try counts, and its load."""
        for _ in range(MAX_TRIES):
            meter = LoadMeter(self._pids)
            traces = await measure()
            load = meter.read()
            if load is None or not load.is_busy:
                results.num_undisturbed += 1
                return traces
        assert load is not None
        results.disturbed.append(load.taken_share)
        return traces

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
        trace = record.to_trace(request, sent_s, sent_s)
        self.output_tokens += sum(trace.token_counts)
        return trace

    async def singles(self, num_prompt: int) -> list[RequestTrace]:
        """REPEATS requests, one after the other."""
        return [await self.request(num_prompt, SINGLE_OUTPUT) for _ in range(REPEATS)]

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
        self.disturbed: list[float] = []  # shares of the CPU taken during disturbed measurements
        self.num_undisturbed = 0


def calibrate_server(
    server: RemoteServer, budget_s: float, observer: Observer = silent
) -> CalibrationResult:
    """Make the five runs and fit the calibration.

    Raises EngineUnavailable if the server answers no prompt, BadInput if the runs are too few for a
    fit, Inconclusive if the machine or the server was busy with something else.
    """
    return run_async(_calibrate(server, budget_s, observer))


async def _calibrate(
    server: RemoteServer, budget_s: float, observer: Observer
) -> CalibrationResult:
    started_s = time.perf_counter()
    model = server.model or await first_model(server.url, api_key=server.api_key)
    target = HttpTarget(
        server.url,
        model,
        endpoint="completions",
        api_key=server.api_key,
        vocabulary=vocabulary_of(server.tokenizer),
    )
    watch = await asyncio.to_thread(watch_machine, server.url)
    session = CalibrationSession(target, pids=watch.pids)
    try:
        form = (await target.negotiate(ANY_FORM)).form
        async with metrics_scraper(server.url, server.api_key) as scraper:
            await scraper.begin()
            with stage(observer, f"calibrating {server.url}"):
                measurements = await measure_server(session, budget_s)
    finally:
        await target.close()
    check_undisturbed(measurements, scraper.report(), session.output_tokens)
    if form != "tokens":
        measurements.notes.append(
            f"the server takes no token ids: prompts were sent as {NAMES[form]}, their lengths "
            "are those that it reported"
        )
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


def check_undisturbed(
    results: ServerMeasurements, report: ServerReport | None, output_tokens: int
) -> None:
    """Raise Inconclusive if other work or other clients shared what was measured.

    `output_tokens`: how many were received here.
    """
    if results.disturbed:
        total = len(results.disturbed) + results.num_undisturbed
        raise Inconclusive(
            f"the machine was busy in {len(results.disturbed)} of {total} measurements, each tried "
            f"{MAX_TRIES} times",
            value=f"{max(results.disturbed):.0%} of the CPU taken by other work",
            limit=f"{BUSY_SHARE:.0%}",
            fix="stop what else is running, then calibrate again",
        )
    generated = 0.0 if report is None else report.counts.get("output_tokens", 0.0)
    others = max(0.0, generated - output_tokens)
    if others > OTHERS_SHARE * generated:
        raise Inconclusive(
            "the server answered other clients during the calibration",
            value=f"{others / generated:.0%} of the generated tokens",
            limit=f"{OTHERS_SHARE:.0%}",
            fix="calibrate a server, or at a time, without other load",
        )


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
        raise EngineUnavailable(f"the server answered no prompt: {why}")
    if first.counted_by == "chunks":
        raise BadInput(
            "the server reports no token counts, so the time per token is unknown",
            fix="name the model whose tokenizer counts them: --tokenizer MODEL",
        )
    for length in PROMPT_LENGTHS:
        length_s = time.perf_counter()
        traces = await session.undisturbed(partial(session.singles, length), results)
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
        wave = partial(session.wave, batch, num_prompt, WAVE_OUTPUT + batch)
        traces = await session.undisturbed(wave, results)
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
