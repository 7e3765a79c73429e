"""benchmarks/gpu/run.sh without a GPU: every command of every part parses, so that none is wasted
on a machine that is at hand for ten minutes.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.cli.params.click_command import OptionCommand
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "run.sh"
SECONDS = 540
"""A GPU is at hand for ten minutes."""


class Parsed(Exception):
    """A script has read its arguments."""


def commands(out: Path, **variables: str) -> dict[str, tuple[int, list[str]]]:
    """Part → time limit in seconds and words of its command, as the script would run them."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"DRY_RUN": "1", "PYTHON": "python", **variables}
    done = subprocess.run(
        ["sh", str(SCRIPT), str(out)], env=environment, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    return {name: (int(limit), words) for name, limit, *words in lines}


def check_script(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script up to the end of its argument parser."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: object) -> None:
        parse(parser, *given)  # type: ignore[call-overload]
        raise Parsed

    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.syspath_prepend(str(ROOT / Path(words[0]).parent))
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def check_command(words: list[str]) -> None:
    """Parse a command of `ridgeline`."""
    calls: list[Invocation] = []
    OptionCommand(COMMANDS[words[0]], calls.append).main(words[1:], standalone_mode=False)
    assert len(calls) == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_part_parses(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = commands(tmp_path, DEVICE=device)
    assert {"steps8b", "engine", "casestudy", "doctor", "optimize"} <= set(parts)
    for name, (_, words) in parts.items():
        if words[0] == "env":
            assert words[1] == f"RIDGELINE_TEST_DEVICE={device}"
            words = words[2:]
        assert words.pop(0) == "python"
        if words[:2] == ["-m", "pytest"]:
            assert (ROOT / words[2]).is_dir(), name
        elif words[:2] == ["-m", "ridgeline"]:
            check_command(words[2:])
        else:
            with monkeypatch.context() as patch:
                check_script(words, patch)
        if "--device" in words:
            assert words[words.index("--device") + 1] == device, name


def test_parts_that_need_a_gpu_are_left_out_on_a_cpu(tmp_path: Path) -> None:
    on_gpu, on_cpu = commands(tmp_path), commands(tmp_path, DEVICE="cpu")
    left_out = {"peer8b", "peer1b", "ahead", "tests", "products", "kernels"}
    assert set(on_gpu) - set(on_cpu) == left_out
    assert set(on_cpu) < set(on_gpu)


def test_the_search_comes_last_and_the_rest_has_room(tmp_path: Path) -> None:
    """A part that hangs takes its limit; the first ones, which are worth most, must fit."""
    parts = commands(tmp_path)
    assert list(parts)[-1] == "optimize"
    first = [limit for name, (limit, _) in parts.items()][:6]
    assert sum(first) <= SECONDS


def test_unknown_part_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(SCRIPT), str(tmp_path)],
        env={**os.environ, "DRY_RUN": "1", "PARTS": "nothing"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "unknown part nothing"
