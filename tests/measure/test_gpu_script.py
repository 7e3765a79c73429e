"""benchmarks/gpu/run.sh without a GPU: every command of every part parses, so that none is wasted
on a machine that is at hand for ten minutes.
"""

from __future__ import annotations

import argparse
import os
import re
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
    assert set(on_gpu) - set(on_cpu) == {"peer8b", "ahead", "tests"}
    assert set(on_cpu) - set(on_gpu) == {
        "compiled",
        "steps1b",
        "torch_layers",
    }  # only where they are named


def test_limits_add_up_to_the_time_and_leave_room_for_the_search(tmp_path: Path) -> None:
    """Even if every part takes its limit, the last one, the search, has two minutes."""
    limits = {name: limit for name, (limit, _) in commands(tmp_path).items()}
    assert list(limits)[-1] == "optimize" and limits["optimize"] >= 120  # less is refused
    assert sum(limits.values()) <= SECONDS


def test_limits_are_above_what_parts_took_on_a_card(tmp_path: Path) -> None:
    """Parts that earlier runs recorded, with the same work or more."""
    summary = SCRIPT.parent / "results" / "summary.txt"
    found = re.findall(r"^(\w+): exit 0 after (\d+) s", summary.read_text(encoding="utf-8"), re.M)
    took = {name: int(seconds) for name, seconds in found if name != "steps1b"}
    limits = {name: limit for name, (limit, _) in commands(tmp_path).items()}
    compared = took.keys() & limits.keys()
    assert len(compared) >= 6
    assert {name for name in compared if limits[name] < 1.1 * took[name]} == set()


@pytest.mark.slow
def test_a_part_that_hangs_is_killed_and_the_search_gets_what_is_left(tmp_path: Path) -> None:
    """The script itself, with commands that take their time: each writes when it was run."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$*" >> "$RAN"\ncase "$*" in *peer*) exec sleep 60 ;; esac\n')
    fake.chmod(0o755)
    ran = tmp_path / "ran.txt"
    done = subprocess.run(
        ["sh", str(SCRIPT), str(tmp_path / "out")],
        env={
            **os.environ,
            "PYTHON": str(fake),
            "RAN": str(ran),
            "PARTS": "steps8b peer optimize",
            "SECONDS_LEFT": "12",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(
        r"peer8b: exit 124 after \d+ s, at \d+ s, stopped at its limit of \d+ s", done.stdout
    )
    assert "optimize: left out, the time is over" in done.stdout
    assert len(ran.read_text(encoding="utf-8").splitlines()) == 3  # two parts and the table


def test_json_of_a_command_and_what_it_says_are_kept_apart(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho '{}'\necho words >&2\n")
    fake.chmod(0o755)
    out = tmp_path / "out"
    subprocess.run(
        ["sh", str(SCRIPT), str(out)],
        env={**os.environ, "PYTHON": str(fake), "PARTS": "doctor"},
        capture_output=True,
        check=True,
    )
    for name in ("doctor", "explain", "profile"):
        assert (out / f"{name}.json").read_text(encoding="utf-8") == "{}\n"
        assert (out / f"{name}.log").read_text(encoding="utf-8") == "words\n"
    assert "words" in (out / "bench.log").read_text(encoding="utf-8")


def test_a_part_that_is_killed_before_its_limit_was_not_stopped_at_it(tmp_path: Path) -> None:
    """The system kills a process that takes too much memory with the same signal."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nkill -9 $$\n")
    fake.chmod(0o755)
    out = tmp_path / "out"
    done = subprocess.run(
        ["sh", str(SCRIPT), str(out)],
        env={**os.environ, "PYTHON": str(fake), "PARTS": "doctor"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"doctor: exit 137 .*, killed before its limit of 12 s", done.stdout)
    assert "stopped at its limit" not in done.stdout
    assert not (out / "doctor.json").exists() and (out / "doctor.log").exists()


def test_unknown_part_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(SCRIPT), str(tmp_path)],
        env={**os.environ, "DRY_RUN": "1", "PARTS": "nothing"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "unknown part nothing"
