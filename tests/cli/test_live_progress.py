"""Progress of a workflow: lines in a log, bars on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ridgeline.cli.render.live_progress import live_progress
from ridgeline.records.progress import Message, StageAdvanced


def _layer(done: int) -> StageAdvanced:
    return StageAdvanced(
        stage="layer", completed=done, total=3, detail="2.0 s", remaining_s=60.0 * (3 - done)
    )


def test_log_has_one_line_per_layer(capsys: pytest.CaptureFixture[str]) -> None:
    with live_progress(steps=True) as observer:
        observer(_layer(1))
        observer(Message(text="layer 1: o: rounded to nearest"))
        observer(_layer(3))
    assert capsys.readouterr().err.splitlines() == [
        "  layer 1 of 3, 2.0 s, about 2 min left",
        "layer 1: o: rounded to nearest",
        "  layer 3 of 3, 2.0 s",
    ]


def test_log_without_steps_has_only_messages(capsys: pytest.CaptureFixture[str]) -> None:
    with live_progress() as observer:
        observer(_layer(1))
        observer(Message(text="rounded to nearest"))
    assert capsys.readouterr().err.splitlines() == ["rounded to nearest"]


def test_terminal_bar_shows_the_stage_and_the_time_left() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with live_progress(console) as observer:
        observer(_layer(2))
        observer(Message(text="layer 2: o: rounded to nearest"))
        observer(StageAdvanced(stage="step", completed=1, total=9, remaining_s=8.0))
    shown = screen.getvalue()
    assert "layer" in shown and "about 60 s left" in shown
    assert "layer 2: o: rounded to nearest" in shown
    assert "step" in shown and "about 8 s left" in shown
