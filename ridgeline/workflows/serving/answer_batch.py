"""Answer a file of batch requests with an engine in this process, without a server."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.config.server import ServerOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.records.progress import Message, Observer, StageAdvanced, silent, stage
from ridgeline.report.result import Result
from ridgeline.serve.batch.offline_runner import (
    OfflineJob,
    errors_path,
    read_job,
    run_job,
    store_path,
)
from ridgeline.serve.batch.records import BatchJob
from ridgeline.serve.batch.schemas import BATCH_ENDPOINTS
from ridgeline.serve.config import model_name
from ridgeline.workflows.models.fetch_models import fetch_models
from ridgeline.workflows.run_async import run_async

if TYPE_CHECKING:
    from ridgeline.engine.engine import Engine

STAGE = "batch"


class BatchFileResult(Result, frozen=True, kw_only=True):
    """A batch file that was processed.

    `errors`: the file of failed requests, None if none failed.
    """

    output: str
    errors: str | None
    total: int
    completed: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def answer_batch(
    settings: Settings,
    file: Path,
    output: Path,
    *,
    served_model_name: str | None = None,
    observer: Observer = silent,
) -> BatchFileResult:
    """Answer the requests of `file` (JSONL, as for /v1/batches) into `output`.

    `served_model_name`: the model name that the requests use, by default the model's own; requests
    for another model fail, as on a server. An interrupted call resumes with the same arguments.
    Raises BadInput, before the model is loaded, if the file cannot be processed.
    """
    job = read_job(file, BATCH_ENDPOINTS)
    name = served_model_name or model_name(settings.model)
    _check_models(job, name)
    _check_output(file, output)
    if store_path(output).exists():
        observer(Message(text="resuming an interrupted run"))
    fetch_models(settings, observer)
    from ridgeline.workflows.open_engine import open_engine  # imports torch: only after the checks

    with open_engine(settings, observer) as engine:
        engine.warm_up_grammars()
        batch = _run(engine, job, output, name, observer)
    return BatchFileResult(
        output=str(output),
        errors=str(errors_path(output)) if batch.failed else None,
        total=batch.total,
        completed=batch.completed,
        failed=batch.failed,
        prompt_tokens=batch.prompt_tokens,
        cached_tokens=batch.cached_tokens,
        completion_tokens=batch.completion_tokens,
    )


def _check_models(job: OfflineJob, name: str) -> None:
    """BadInput if every request names another model; a request that names none fits any."""
    if not job.models & {name, None}:
        requested = sorted(filter(None, job.models))
        raise BadInput(
            "the requests are for another model",
            value=", ".join(requested[:3]) + (", …" if len(requested) > 3 else ""),
            limit=name,
            fix="choose that model with --model, or answer them with this one: "
            f"--served-model-name {shlex.quote(requested[0])}",
        )


def _check_output(file: Path, output: Path) -> None:
    for path in (output, errors_path(output), store_path(output)):
        if path.resolve() == file.resolve():
            raise BadInput(
                "the answers would overwrite the requests",
                value=str(path),
                fix="name another output",
            )


def _run(engine: Engine, job: OfflineJob, output: Path, name: str, observer: Observer) -> BatchJob:
    from ridgeline.serve.app import create_app
    from ridgeline.serve.batch.executor import background_engine, fingerprint

    app = create_app(background_engine(engine), ServerOptions(served_model_name=name))
    concurrency = 2 * engine.resolved.max_num_seqs  # half of them wait, so that no slot stays free
    with stage(observer, STAGE, total=job.num_requests, unit="requests", detail=job.path.name):
        return run_async(
            run_job(
                job,
                output,
                app,
                served=fingerprint(engine.info),
                max_concurrency=concurrency,
                on_progress=_Reporter(observer),
            )
        )


class _Reporter:
    """Reports the batch's progress, with the output tokens per second of this call."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._start: tuple[float, int] | None = None

    def __call__(self, batch: BatchJob) -> None:
        now_s, num_tokens = time.monotonic(), batch.completion_tokens
        if self._start is None:  # a resumed batch has tokens of an earlier call
            self._start = now_s, num_tokens
        start_s, start_tokens = self._start
        rate = (num_tokens - start_tokens) / max(now_s - start_s, 1e-3)
        done = batch.completed + batch.failed
        self._observer(
            StageAdvanced(
                stage=STAGE, completed=done, total=batch.total, detail=f"{rate:,.0f} tok/s"
            )
        )
