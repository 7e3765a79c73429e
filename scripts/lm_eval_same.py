"""Does lm-eval say the same of the server as of the weights themselves?

    python scripts/lm_eval_same.py [--home DIR] [--use lm_eval=DIR] [--model demo]

Creates a separate environment (`benchmarks/peers/environments.py`), serves the model, and has lm-
eval score one local task twice: with its `hf` model on the model's directory in float32, and with
`local-completions` against the server. The task is made of the held-out texts: given the beginning
of a text, which of four continuations follows, and how likely is each. Prints how many
loglikelihoods were compared, the largest difference, and whether all greedy flags agree; exits with
1 beyond 1e-3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from peers import environments

ASSETS = Path(__file__).resolve().parent.parent / "ridgeline" / "assets"
TASK, MOST, NUM_DOCS = "continuations", 1e-3, 40
RECIPE = """
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""


def write_task(folder: Path) -> None:
    """Beginnings and continuations of the held-out texts, in characters."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ASSETS / "heldout").rglob("*.*"))]
    pieces = [text[at : at + 400] for text in texts for at in range(0, len(text) - 400, 400)]
    pieces = pieces[:: max(1, len(pieces) // NUM_DOCS)][:NUM_DOCS]
    rows = [
        {
            "text": piece[:320],
            "choices": [pieces[(at + step) % len(pieces)][320:360] for step in range(4)],
        }
        for at, piece in enumerate(pieces)
    ]
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = RECIPE.format(task=TASK, data=data)
    (folder / f"{TASK}.yaml").write_text(recipe, encoding="utf-8")


def scores(folder: Path, kind: str, arguments: str) -> list[list[tuple[float, bool]]]:
    """(loglikelihood, is greedy) of every choice of every document. Runs inside the environment."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found: Any = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        batch_size=1,
        device="cpu" if kind == "hf" else None,
    )
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    return [[tuple(answer) for answer in sample["filtered_resps"]] for sample in samples]


def compare(folder: Path, model: str, url: str) -> int:
    """Score twice and print what differs."""
    exact = scores(folder, "hf", f"pretrained={model},dtype=float32")
    arguments = f"model={Path(model).name},tokenizer={model},base_url={url}/completions"
    served = scores(folder, "local-completions", arguments + ",num_concurrent=4,max_length=2048")
    pairs = [
        (ours, theirs)
        for one, other in zip(served, exact, strict=True)
        for ours, theirs in zip(one, other, strict=True)
    ]
    worst = max(abs(float(ours[0]) - float(theirs[0])) for ours, theirs in pairs)
    greedy = sum(str(ours[1]) == str(theirs[1]) for ours, theirs in pairs)
    answer = {"compared": len(pairs), "max_difference": worst, "greedy_flags_agree": greedy}
    print(json.dumps(answer))
    return int(worst > MOST or greedy < len(pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    environments.add_flags(parser)
    parser.add_argument("--model", default=str(ASSETS / "demo"), help="a model directory")
    parser.add_argument("--inside", nargs=2, metavar=("FOLDER", "URL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return compare(Path(given.inside[0]), given.model, given.inside[1])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        python = environments.ensure(given.home, ["lm_eval"], dict(given.use))["lm_eval"]
        write_task(folder)
        serve = [sys.executable, "-m", "ridgeline", "serve", given.model, "--port", "0"]
        server = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        lines = (line for line in server.stderr if "is served at" in line)
        url = next(lines).split("is served at ")[1].strip()
        command = [python, __file__, "--model", given.model, "--inside", str(folder), url]
        try:
            return subprocess.run(command, check=False).returncode
        finally:
            server.terminate()
            server.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main())
