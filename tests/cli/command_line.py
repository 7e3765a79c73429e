"""The whole command line, for tests of what all its commands must do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from ridgeline.cli.main import main
from ridgeline.config.commands import COMMANDS
from ridgeline.config.option import Option

SHAPE = ["llama-3.1-8b", "--accelerator", "h100-sxm"]
NO_SERVER = ["--url", "http://127.0.0.1:9"]
NEEDED = {
    "generate": ["demo", "x"],
    "batch": ["requests.jsonl", "-o", "answers.jsonl"],
    "compare": ["a.json", "b.json"],
    "lab": ["casestudy", "demo"],
    "calibrate": ["--engine", "demo"],
    "predict": SHAPE,
    "plan": SHAPE[:1],
    "simulate": SHAPE,
    "cost": SHAPE,
    "quantize": ["demo", "-o", "made"],
    "prune": ["demo", "-o", "made"],
    "distill": ["--teacher", "demo", "--student", "demo", "-o", "made"],
    "train-drafter": ["demo", "-o", "made"],
    "eval": ["demo", "demo"],
    "watch": ["--url", "http://127.0.0.1:9", "--tuned", "tuned"],
    "top": [*NO_SERVER, "--once"],
    "inspect": ["demo"],
    "new-key": ["alice"],
    "pack": ["models.toml", "--accelerator", "l4=1"],
    "completion": ["bash"],
}
"""What a command cannot do without."""


def options() -> Iterator[tuple[str, Option]]:
    """(command, option) of the whole application."""
    for command in COMMANDS.values():
        yield from ((command.name, option) for option in command.options.values())


def refused(capsys: pytest.CaptureFixture[str], args: Sequence[str], named: str) -> None:
    """Exit code 2 and one line that names what is wrong."""
    code = main(args)
    out, err = capsys.readouterr()
    assert code == 2 and not out, f"{args}: {code} {out[:80]} {err}"
    assert named in err and "Traceback" not in err and "internal error" not in err, err
