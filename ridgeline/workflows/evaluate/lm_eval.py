"""lm-eval's tasks as a part of `ridgeline eval`: each model is served, and lm-eval asks it by HTTP.

lm-eval (EleutherAI's evaluation harness) is a program of its own, in this environment (`pip install
'ridgeline[lm-eval]'`) or any other; nothing of it is imported. It writes what it found for every
document, and the change is paired by document: of a task's first metric of right and wrong answers
(acc, exact_match, …) by the same limit and the same interval as the tasks that the panel makes
itself. Other metrics (perplexities) are shown, not judged.
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

from ridgeline.engine.engine import Engine
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.optimize.quality.thresholds import check_min
from ridgeline.stats import mean_interval
from ridgeline.workflows.evaluate.verdict import HarnessScore

PROGRAM = "lm-eval"
AT_ONCE = 4  # requests that lm-eval sends
START_S = 60.0
Documents = dict[tuple[str, str], dict[int, float]]
"""(task, metric) → document → value."""


class Harness(msgspec.Struct, frozen=True):
    """What is asked of lm-eval: its `tasks`, separated by commas, of its own or described in
    `folder`; `limit` documents of each at most."""

    tasks: str
    folder: Path | None = None
    limit: int | None = None
    program: str | None = None


def find_program(harness: Harness) -> str:
    """lm-eval's path: beside this Python, or wherever the system finds it. Raises CannotRun."""
    name = harness.program or PROGRAM
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=beside) or shutil.which(name)
    if found is None:
        raise CannotRun(
            "lm-eval is not there",
            value=name,
            fix="pip install 'ridgeline[lm-eval]', or name its program in another environment by "
            "--lm-eval-program",
        )
    return found


def tokenizer_folder(models: Sequence[str]) -> str:
    """The first of the models that has a tokenizer in a folder, which lm-eval reads."""
    for model in models:
        folder = Path() if is_dummy(model) or model.endswith(".gguf") else model_path(model)
        if (folder / "tokenizer.json").is_file():
            return str(folder)
    raise CannotRun(
        "lm-eval needs a folder with a tokenizer.json", value=", ".join(models), fix="name one as A"
    )


def ask(harness: Harness, engine: Engine, tokenizer: str) -> Documents:
    """Serve the engine and let lm-eval ask it. Raises BadInput with what lm-eval said last."""
    program = find_program(harness)
    with tempfile.TemporaryDirectory() as folder, served(engine) as (url, name):
        arguments = {
            "model": name,
            "tokenizer": tokenizer,
            "base_url": f"{url}/v1/completions",
            "num_concurrent": AT_ONCE,
            "max_length": engine.info.max_model_len,
        }
        told = ",".join(f"{key}={value}" for key, value in arguments.items())
        command = [program, "run", "--model", "local-completions", "--model_args", told]
        command += ["--tasks", harness.tasks, "--output_path", folder, "--log_samples"]
        command += [] if harness.folder is None else ["--include_path", str(harness.folder)]
        command += [] if harness.limit is None else ["--limit", str(harness.limit)]
        log = Path(folder) / "log"
        with log.open("wb") as out:
            code = subprocess.run(command, stdout=out, stderr=out, check=False).returncode
        if code:
            raise BadInput("lm-eval did not end well", value=harness.tasks, fix=_last(log))
        return read_samples(Path(folder))


def _last(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return "it said: " + " | ".join(lines[-3:])


@contextmanager
def served(engine: Engine) -> Iterator[tuple[str, str]]:
    """The engine behind HTTP on a free port of this machine: the address, and the model's name."""
    from ridgeline.serve.app import create_app
    from ridgeline.serve.config import ServerOptions
    from ridgeline.serve.server import GracefulServer, listen, url_of, uvicorn_config

    options, up = ServerOptions(port=0), threading.Event()
    with listen(options) as listener:
        app = create_app(engine, options)
        server = GracefulServer(uvicorn_config(app, options), app.state.service, up.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            if not up.wait(START_S):
                raise CannotRun("the server for lm-eval did not start", limit=f"{START_S:.0f} s")
            yield url_of(listener), app.state.service.name
        finally:
            server.should_exit = True
            thread.join()


def read_samples(folder: Path) -> Documents:
    """What lm-eval wrote with --log_samples: every number that a document was given."""
    found: Documents = {}
    for file in sorted(folder.rglob("samples_*.jsonl")):
        task = file.stem.removeprefix("samples_").rpartition("_")[0]
        for line in file.read_text(encoding="utf-8").splitlines():
            sample: dict[str, Any] = json.loads(line)
            for metric in sample["metrics"]:
                value, kind = sample[metric], sample.get("filter", "none")
                if isinstance(value, int | float) and math.isfinite(value):
                    name = metric if kind == "none" else f"{metric}, {kind}"
                    found.setdefault((task, name), {})[int(sample["doc_id"])] = float(value)
    return found


def compare(before: Documents, after: Documents, drop_max: float) -> tuple[HarnessScore, ...]:
    """Every metric of every task that both have, the first of right answers judged.

    Raises BadInput where there is none: nothing that was asked for has been compared.
    """
    scores: list[HarnessScore] = []
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
) -> HarnessScore:
    count = len(pairs)
    changes = [new - old for old, new in pairs]
    least_sd = 0.0 if drop_max is None else math.sqrt(1 / count)  # as one more flip would make it
    change = mean_interval(changes, least_sd=least_sd)
    name = f"{task}, {metric}"
    return HarnessScore(
        task=task,
        metric=metric,
        num_docs=count,
        before=sum(old for old, _ in pairs) / count,
        after=sum(new for _, new in pairs) / count,
        change=change,
        num_changed=sum(difference != 0 for difference in changes),
        check=None if drop_max is None else check_min(name, change, -drop_max),
    )
