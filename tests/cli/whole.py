"""The whole command line, for tests of what all its commands must do."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Sequence

import pytest
import typer

from ridgeline.cli.app import app
from ridgeline.cli.main import main
from ridgeline.cli.params.engine import bare

SHAPE = ["llama-3.1-8b", "--device", "h100-sxm"]
NOBODY = ["--url", "http://127.0.0.1:9"]
NEEDED = {
    "generate": ["demo", "x"],
    "batch": ["requests.jsonl", "-o", "answers.jsonl"],
    "compare": ["a.json", "b.json"],
    "calibrate": ["--engine", "demo"],
    "predict": SHAPE,
    "plan": SHAPE,
    "simulate": SHAPE,
    "cost": SHAPE,
    "quantize": ["demo", "-o", "made"],
    "train-drafter": ["demo", "-o", "made"],
    "eval": ["demo", "demo"],
    "chat": NOBODY,
    "top": [*NOBODY, "--once"],
}
"""What a command cannot do without."""


def options() -> Iterator[tuple[str, str, type]]:
    """(command, parameter, its type): of the whole application."""
    for info in app.registered_commands:
        assert info.callback is not None
        for each in inspect.signature(info.callback, eval_str=True).parameters.values():
            if each.annotation is not typer.Context:
                kind = bare(typing.get_args(each.annotation)[0])
                yield info.name or info.callback.__name__, each.name, kind


def refused(capsys: pytest.CaptureFixture[str], args: Sequence[str], named: str) -> None:
    """Exit code 2 and a line that names what is wrong, whatever else stands there."""
    code = main(args)
    out, err = capsys.readouterr()
    assert code == 2 and not out, f"{args}: {code} {out[:80]} {err}"
    assert named in err and "Traceback" not in err and "internal error" not in err, err
