"""Run lm-eval's tasks on two models, each served over HTTP, and pair the results by document.

lm-eval (EleutherAI's evaluation harness) is a separate program, in this environment (`pip install
'ridgeline[lm-eval]'`) or another one; nothing of it is imported. The first metric of a task that
counts right answers (acc, exact_match, …) is judged by the same limit and interval as the built-in
questions; other metrics (perplexities) are reported only.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config.improve import EvaluateOptions
from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization import NoTokenizer, bos_tokens, load_tokenizer
from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.optimize.quality.task_questions import change_of_right_answers
from ridgeline.optimize.quality.thresholds import check_min
from ridgeline.stats import mean_interval
from ridgeline.workflows.evaluate.evaluation import LmEvalScore

PROGRAM = "lm-eval"
MAX_CONCURRENCY = 4  # requests that lm-eval sends at once
START_TIMEOUT_S = 60.0
Documents = dict[tuple[str, str], dict[int, float]]
"""(task, metric) → document → value."""


class LmEvalOptions(msgspec.Struct, frozen=True):
    """Tasks to run, separated by commas: lm-eval's own, or described by the YAML files of `folder`.

    `limit`: maximum documents per task. `program`: lm-eval's program, if it is not on the path.
    """

    tasks: str
    folder: Path | None = None
    limit: int | None = None
    program: str | None = None


def lm_eval_options(given: EvaluateOptions) -> LmEvalOptions | None:
    """The tasks to run; None if the options name none."""
    if given.lm_eval is None:
        return None
    return LmEvalOptions(
        given.lm_eval, given.lm_eval_path, given.lm_eval_limit, given.lm_eval_program
    )


def find_program(options: LmEvalOptions) -> str:
    """Path of lm-eval: next to this Python, or on the system's path. Raises CannotRun."""
    name = options.program or PROGRAM
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        raise CannotRun(
            "lm-eval is not installed",
            value=name,
            fix="pip install 'ridgeline[lm-eval]', or name the program of another environment with "
            "--lm-eval-program",
        )
    return path


def tokenizer_folder(models: Sequence[str]) -> str:
    """Folder of the first model with tokenizer files, which lm-eval reads. Raises CannotRun."""
    for model in models:
        if is_dummy(model) or is_gguf(model):
            continue
        if not isinstance(load_tokenizer(model), NoTokenizer):
            return str(model_path(model))
    raise CannotRun(
        "lm-eval needs a model directory with a tokenizer",
        value=", ".join(models),
        fix="give a model directory that has one as A",
    )


def run_lm_eval(options: LmEvalOptions, engine: Engine, tokenizer: str) -> Documents:
    """Serve the engine and run the tasks on it. BadInput with lm-eval's last output if it fails."""
    program = find_program(options)
    with tempfile.TemporaryDirectory() as folder, serve_locally(engine) as (url, name):
        arguments = {
            "model": name,
            "tokenizer": tokenizer,
            "base_url": f"{url}/v1/completions",
            "num_concurrent": MAX_CONCURRENCY,
            "max_length": engine.info.max_model_len,
        }
        if bos_tokens(engine.tokenizer):  # lm-eval leaves it out unless it is named
            arguments["add_bos_token"] = True
        model_args = ",".join(f"{key}={value}" for key, value in arguments.items())
        command = [program, "run", "--model", "local-completions", "--model_args", model_args]
        command += ["--tasks", options.tasks, "--output_path", folder, "--log_samples"]
        command += [] if options.folder is None else ["--include_path", str(options.folder)]
        command += [] if options.limit is None else ["--limit", str(options.limit)]
        log = Path(folder) / "log"
        with log.open("wb") as out:
            code = subprocess.run(command, stdout=out, stderr=out, check=False).returncode
        if code:
            raise BadInput("lm-eval failed", value=options.tasks, fix=_last_output(log))
        return read_samples(Path(folder))


def _last_output(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return "its last output: " + " | ".join(lines[-3:])


@contextmanager
def serve_locally(engine: Engine) -> Iterator[tuple[str, str]]:
    """Serve the engine on a free local port; the address and the model's name."""
    from ridgeline.config.server import ServerOptions
    from ridgeline.serve.app import create_app
    from ridgeline.serve.server import GracefulServer, listen, url_of, uvicorn_config

    options, up = ServerOptions(port=0), threading.Event()
    with listen(options) as listener:
        app = create_app(engine, options)
        server = GracefulServer(uvicorn_config(app, options), app.state.service, up.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            if not up.wait(START_TIMEOUT_S):
                raise CannotRun(
                    "the server for lm-eval did not start", limit=f"{START_TIMEOUT_S:.0f} s"
                )
            yield url_of(listener), app.state.service.name
        finally:
            server.should_exit = True
            thread.join()


def read_samples(folder: Path) -> Documents:
    """The numbers in lm-eval's --log_samples files, by task, metric and document.

    Raises CannotRun for a file that is none of these.
    """
    documents: Documents = {}
    for file in sorted(folder.rglob("samples_*.jsonl")):
        task = file.stem.removeprefix("samples_").rpartition("_")[0]
        try:
            for line in file.read_text(encoding="utf-8").split("\n"):
                if line.strip():
                    for name, document, value in _numbers(json.loads(line)):
                        documents.setdefault((task, name), {})[document] = value
        except (OSError, ArithmeticError, LookupError, TypeError, *DECODE_ERRORS) as error:
            raise CannotRun(
                "cannot read what lm-eval has written", value=str(file), fix=str(error)
            ) from None
    return documents


def _numbers(sample: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    """(metric, document, value) of a line."""
    for metric in sample["metrics"]:
        value, kind = sample[metric], sample.get("filter", "none")
        if isinstance(value, int | float) and math.isfinite(value):
            name = metric if kind == "none" else f"{metric}, {kind}"
            yield name, int(sample["doc_id"]), float(value)


def compare_documents(
    before: Documents, after: Documents, drop_max: float
) -> tuple[LmEvalScore, ...]:
    """Compare every metric that both have; the first one of right answers per task is judged.

    BadInput if there is nothing to compare.
    """
    scores: list[LmEvalScore] = []
    for (task, metric), old in before.items():
        new = after.get((task, metric), {})
        docs = sorted(old.keys() & new.keys())
        if not docs:
            continue
        judged = any(score.task == task and score.check is not None for score in scores)
        pairs = [(old[doc], new[doc]) for doc in docs]
        counts = not judged and all(value in (0.0, 1.0) for pair in pairs for value in pair)
        scores.append(_score(task, metric, pairs, drop_max if counts else None))
    if not scores:
        raise BadInput("lm-eval gave no number for any document of these tasks")
    return tuple(scores)


def _score(
    task: str, metric: str, pairs: Sequence[tuple[float, float]], drop_max: float | None
) -> LmEvalScore:
    count = len(pairs)
    changes = [new - old for old, new in pairs]
    change = mean_interval(changes) if drop_max is None else change_of_right_answers(changes)
    name = f"{task}, {metric}"
    return LmEvalScore(
        task=task,
        metric=metric,
        num_docs=count,
        before=sum(old for old, _ in pairs) / count,
        after=sum(new for _, new in pairs) / count,
        change=change,
        num_changed=sum(difference != 0 for difference in changes),
        check=None if drop_max is None else check_min(name, change, -drop_max),
    )
