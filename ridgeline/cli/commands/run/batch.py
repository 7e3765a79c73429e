"""`ridgeline batch FILE -o OUT`: a file of requests answered here, with progress and resume."""

from __future__ import annotations

import asyncio
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.settings import Settings
from ridgeline.config.tools import BatchFileOptions
from ridgeline.errors import BadInput
from ridgeline.serve.batch.offline_runner import (
    OfflineJob,
    errors_path,
    read_job,
    run_job,
    store_path,
)
from ridgeline.serve.batch.records import BatchJob
from ridgeline.serve.config import model_name

if TYPE_CHECKING:
    from ridgeline.engine.engine import Engine

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


def batch(call: Invocation) -> int:
    """`ridgeline batch`."""
    options = call.read(BatchFileOptions)
    settings = call.settings(options.model)
    return command(settings, options.file, options.output, options.served_model_name)


def command(
    settings: Settings, file: Path, output: Path, served_model_name: str | None = None
) -> int:
    """Answer `file` into `output`; 1 where lines failed. `served_model_name`: what lines call the
    model (None: by its own name); those that ask for another fail, as on a server."""
    console = Console(stderr=True, highlight=False)
    job = read_job(file, ENDPOINTS)
    name = served_model_name or model_name(settings.model)
    _check_models(job, name)
    for written in (output, errors_path(output), store_path(output)):
        if written.resolve() == file.resolve():
            raise BadInput(
                "the answers would be written over the requests",
                value=str(written),
                fix="name another output",
            )
    if store_path(output).exists():
        console.print("going on where an earlier call was cut off", style="dim")
    from ridgeline.engine.engine import Engine  # slow to import: after what may be refused

    with Engine.from_settings(settings) as engine:
        batch = _answer(engine, job, output, name, console)
    console.print(summary(batch), markup=False)
    if batch.failed:
        console.print(f"failed lines: {errors_path(output)}", style="yellow", markup=False)
    return int(batch.failed > 0)


def _check_models(job: OfflineJob, name: str) -> None:
    """BadInput where no line could be answered: that needs no engine."""
    if not job.models & {name, None}:  # a line that names none takes what there is
        asked = sorted(filter(None, job.models))
        raise BadInput(
            "the lines ask for another model",
            value=", ".join(asked[:3]) + (", …" if len(asked) > 3 else ""),
            limit=name,
            fix=f"--model, or --served-model-name {shlex.quote(asked[0])} to answer them with this",
        )


def _answer(engine: Engine, job: OfflineJob, output: Path, name: str, console: Console) -> BatchJob:
    from ridgeline.config.server import ServerOptions
    from ridgeline.serve.app import create_app
    from ridgeline.serve.batch.executor import background_engine

    app = create_app(background_engine(engine), ServerOptions(served_model_name=name))
    with bar(console) as progress:
        shown = _Shown(progress, progress.add_task("", total=job.num_requests, rate=""))
        most = 2 * engine.resolved.max_num_seqs  # some behind those that sit, so that no seat waits
        return asyncio.run(
            run_job(job, output, app, max_concurrency=most, on_progress=shown.update)
        )


class _Shown:
    """The bar, and the rate since this call began: what an earlier one did is not its speed."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._began: tuple[float, int] | None = None

    def update(self, batch: BatchJob) -> None:
        now_s, num_tokens = time.monotonic(), batch.completion_tokens
        if self._began is None:
            self._began = (now_s, num_tokens)
        rate = (num_tokens - self._began[1]) / max(now_s - self._began[0], 1e-3)
        done = batch.completed + batch.failed
        self._progress.update(self._task, completed=done, rate=f"{rate:,.0f} tok/s")


def bar(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
    )


def summary(batch: BatchJob) -> str:
    """`12 of 12 lines answered · 3,400 prompt and 512 output tokens (300 from the cache)`."""
    cached = f" ({batch.cached_tokens:,} from the cache)" if batch.cached_tokens else ""
    return (
        f"{batch.completed:,} of {batch.total:,} lines answered · {batch.prompt_tokens:,} prompt "
        f"and {batch.completion_tokens:,} output tokens{cached}"
    )
