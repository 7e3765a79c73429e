"""`ridgeline calibrate --url`: five short runs against any OpenAI-compatible server.

    1    prompts of growing length, one after the other: TTFT, and TPOT of one answer
    2-4  2, 8 and 24 short prompts at once, in waves: TPOT while all of them answer
    5    4 at once behind the longest context that run 1 reached, halved: what context costs

Every prompt is new random token ids, so that no prefix cache helps. A wave counts between the
moment when its last answer has begun and the one when its first ends. A server with fewer seats
than a wave has requests shows by answers that begin when others have ended; such a wave is left
out and said.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

import ridgeline
from ridgeline.errors import EngineUnavailable
from ridgeline.measure.client.http_target import HttpTarget, first_model
from ridgeline.measure.client.target import Recorder, Target
from ridgeline.measure.metrics.latency import ttft_s
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.measure.workload.synthetic import FIRST_ID
from ridgeline.plan.calibration.remote_server import About, Decoded, Prompted, Served, fit_served
from ridgeline.records import RequestTrace
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line

LENGTHS = (16, 64, 192, 384, 768, 1536, 3072)
WAVES = (2, 8, 24)
DEEP_BATCH, DEEPEST = 4, 2048
SHORT, ANSWER, LEAST_TOKENS = 32, 48, 8
LONE_ANSWER, REPEATS = 24, 3
VOCAB = 2000  # ids below it: any tokenizer has them
TIMEOUT_S = 120.0


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """The server's address, its model (None: the first that it lists), a key if it wants one."""

    url: str
    model: str | None = None
    api_key: str | None = None


class Session:
    """Requests to one server, their instants on one clock."""

    def __init__(self, target: Target, seed: int = 0) -> None:
        self._target, self._rng = target, random.Random(seed)
        self._numbers = itertools.count()

    async def ask(self, num_prompt: int, num_output: int) -> RequestTrace:
        """One request with a prompt of its own."""
        prompt = tuple(self._rng.randrange(FIRST_ID, VOCAB) for _ in range(num_prompt))
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
            record.failed(f"no answer within {TIMEOUT_S:.0f} s")
        return record.trace(request, sent_s, sent_s)

    async def wave(self, batch: int, num_prompt: int, num_output: int) -> list[RequestTrace]:
        return await asyncio.gather(*(self.ask(num_prompt, num_output) for _ in range(batch)))


class Findings:
    """What the runs gave, and what was left out and why."""

    def __init__(self) -> None:
        self.prompts: list[Prompted] = []
        self.decodes: list[Decoded] = []
        self.runs: list[str] = []
        self.notes: list[str] = []


async def measure(session: Session, budget_s: float) -> Findings:
    """The five runs. EngineUnavailable where not even a short prompt is answered."""
    found, ends_s = Findings(), time.perf_counter() + budget_s
    await _lengths(session, found, time.perf_counter() + 0.4 * budget_s)
    for batch in WAVES:
        if time.perf_counter() < ends_s:
            await _waves(session, found, batch, SHORT)
    deep = min(DEEPEST, max((p.tokens for p in found.prompts), default=0) // 2)
    if deep >= 4 * SHORT and time.perf_counter() < ends_s:
        await _waves(session, found, DEEP_BATCH, SHORT)
        await _waves(session, found, DEEP_BATCH, deep)
    return found


async def _lengths(session: Session, found: Findings, ends_s: float) -> None:
    first = await session.ask(LENGTHS[0], 4)  # what a server sets up once is paid here
    if first.error is not None or not first.token_s:
        why = first.error or "an empty answer"
        raise EngineUnavailable(f"the server answered no prompt of token ids: {why}")
    for length in LENGTHS:
        took_s = time.perf_counter()
        traces = [await session.ask(length, LONE_ANSWER) for _ in range(REPEATS)]
        bad = next((t for t in traces if t.error is not None or not t.token_s), None)
        if bad is not None:
            found.notes.append(f"prompts of {length} tokens were refused: {bad.error}")
            break
        tokens = round(median(t.prompt_tokens or length for t in traces))
        found.prompts.append(Prompted(tokens, median(_ttft_s(t) for t in traces)))
        together = [decoded([trace]) for trace in traces]
        known = [each for each in together if each is not None]
        if known:
            found.decodes.append(_middle(known))
        took_s = time.perf_counter() - took_s
        if time.perf_counter() + 2.5 * took_s > ends_s:
            break
    found.runs.append(f"prompts of {', '.join(str(p.tokens) for p in found.prompts)} tokens, alone")


async def _waves(session: Session, found: Findings, batch: int, num_prompt: int) -> None:
    together: list[Decoded] = []
    for _ in range(REPEATS):
        traces = await session.wave(batch, num_prompt, ANSWER + batch)
        bad = next((t for t in traces if t.error is not None or not t.token_s), None)
        if bad is not None:
            found.notes.append(f"{batch} at once: {bad.error or 'an empty answer'}")
            return
        one = decoded(traces)
        if one is None:
            found.notes.append(
                f"{batch} requests of {num_prompt} tokens were never answered all at once "
                "(too few seats, or answers that end early): this run tells nothing"
            )
            return
        together.append(one)
    found.decodes.append(_middle(together))
    found.runs.append(f"{REPEATS} waves of {batch} prompts of {num_prompt} tokens")


def decoded(traces: Sequence[RequestTrace]) -> Decoded | None:
    """Seconds per token while all answer; None where they hardly ever did."""
    begins_s = max(trace.token_s[0] for trace in traces)
    ends_s = min(trace.token_s[-1] for trace in traces)
    if ends_s <= begins_s:
        return None
    times_s, contexts = [], []
    for trace in traces:
        inside = [
            (at_s, count)
            for at_s, count in zip(trace.token_s, trace.token_counts, strict=True)
            if begins_s <= at_s <= ends_s
        ]
        tokens = sum(count for _, count in inside[1:])
        if tokens < LEAST_TOKENS:
            return None
        times_s.append((inside[-1][0] - inside[0][0]) / tokens)
        contexts.append(trace.prompt_tokens + sum(trace.token_counts) - tokens / 2)
    return Decoded(len(traces), sum(contexts) / len(contexts), sum(times_s) / len(times_s))


def _middle(several: Sequence[Decoded]) -> Decoded:
    return sorted(several, key=lambda each: each.tpot_s)[len(several) // 2]


def _ttft_s(trace: RequestTrace) -> float:
    found = ttft_s(trace, "sent")
    assert found is not None, "traces without tokens were sorted out"
    return found


# ---- the command -------------------------------------------------------------------------------


def command(remote: Remote, output: Path, budget_s: float, as_json: bool) -> int:
    """Measure, fit, write, and tell how well the fit holds; the exit code."""
    found = asyncio.run(calibrate(remote, budget_s))
    write_file(output, [msgspec.json.format(msgspec.json.encode(found), indent=2)])
    if as_json:
        print(json_line(found))
    else:
        Console(highlight=False).print(table(found, output))
    return 0


async def calibrate(remote: Remote, budget_s: float) -> Served:
    """The runs and the fit."""
    began_s = time.perf_counter()
    model = remote.model or await first_model(remote.url, api_key=remote.api_key)
    target = HttpTarget(remote.url, model, endpoint="completions", api_key=remote.api_key)
    try:
        found = await measure(Session(target), budget_s)
    finally:
        await target.close()
    out = Console(highlight=False, stderr=True)
    for note in found.notes:
        out.print(f"note: {note}", style="yellow", markup=False)
    about = About(
        server=remote.url,
        model=model,
        as_of=date.today().isoformat(),
        source=f"ridgeline {ridgeline.__version__} calibrate --url {remote.url}",
        took_s=time.perf_counter() - began_s,
        runs=tuple(found.runs),
    )
    return fit_served(found.prompts, found.decodes, about)


def table(found: Served, output: Path) -> Table:
    """What was learnt, for a person."""
    title = f"{found.model} at {found.server}, {found.as_of}: {found.took_s:.0f} s"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "", ""):
        table.add_column(name, justify="left")
    table.add_row(
        "first token",
        f"{1e3 * found.base_s:.3g} ms + {1e6 * found.by_token_s:.3g} us a token",
        f"+ {1e9 * found.by_pair_s:.3g} ns a token squared" if found.by_pair_s else "",
    )
    for batch, seconds in zip(found.batches, found.curve_s, strict=True):
        table.add_row(f"{batch} at once", f"{1e3 * seconds:.3g} ms a token", "")
    if found.by_context_s:
        table.add_row("context", f"{1e9 * found.by_context_s:.3g} ns a token of it and step", "")
    for name, why in found.unknown.items():
        table.add_row("not known", name, why)
    errors = (
        f"TTFT {found.ttft_error:.0%}, TPOT {found.tpot_error:.0%} (each batch from its others)"
    )
    table.add_row("median error", errors, "")
    table.add_row("written to", str(output), "use it with predict --calibration")
    return table
