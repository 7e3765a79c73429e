"""How far a quantisation is: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ridgeline.cli.render.quantize_progress import Drawn, bar_on, telling
from ridgeline.compress.progress import QuantizeProgress


def _layer(done: int, note: str = "") -> QuantizeProgress:
    return QuantizeProgress(
        layer=done - 1, num_layers=3, took_s=2.0, left_s=60.0 * (3 - done), note=note
    )


def test_a_log_has_a_line_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    with telling() as tell:
        tell(_layer(1, "o: rounded to nearest"))
        tell(_layer(3))
    assert capsys.readouterr().err.splitlines() == [
        "  layer 1 of 3: 2.0 s, about 2 min left",
        "    o: rounded to nearest",
        "  layer 3 of 3: 2.0 s",
    ]


def test_a_terminal_has_a_bar_that_says_what_is_left() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with bar_on(console) as bar:
        drawn = Drawn(bar)
        bar.refresh()
        assert "the first layer" in screen.getvalue()
        drawn.tell(_layer(2, "o: rounded to nearest"))
        bar.refresh()
        shown = screen.getvalue()
        assert "layer 2 of 3" in shown and "about 60 s left" in shown
        assert "layer 2: o: rounded to nearest" in shown
        drawn.tell(QuantizeProgress(unit="step", layer=0, num_layers=9, took_s=1.0, left_s=8.0))
        bar.refresh()
        assert "step 1 of 9" in screen.getvalue()
