"""What commands print at 80 columns: no trailing blanks, words and identifiers whole."""

from __future__ import annotations

import io
import shlex

import msgspec
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.cli.render.console import ReportConsole, print_command, print_prose
from ridgeline.cli.render.improve.optimize import print_ladder
from ridgeline.cli.render.serving import served_lines
from ridgeline.optimize.result import Trial
from ridgeline.records import EngineInfo
from ridgeline.report.numbers import rounded
from ridgeline.workflows.serving.serve import ServedModel

SENTENCE = "Prompts are long: of 158 s left 78 s are kept for the closing measurement, says it."


def test_tables_end_no_line_with_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("name")
    table.add_column("why", style="dim")
    table.add_row("a", "short")
    table.add_row("b", "x" * 30)
    console = ReportConsole()
    console.print(table)
    console.print("ask> ", end="")
    lines = capsys.readouterr().out.split("\n")
    assert lines[:3] == ["name  why", "a     short", f"b     {'x' * 30}"]
    assert lines[-1] == "ask> "  # a prompt keeps its blank


@pytest.mark.parametrize("column", [None, 8])
def test_prose_is_wrapped_between_words_on_a_terminal(column: int | None) -> None:
    out = io.StringIO()
    print_prose(Console(file=out, width=40, force_terminal=True), f"  {SENTENCE}", column=column)
    first, *rest = out.getvalue().splitlines()
    assert first.startswith("  Prompts") and len(rest) >= 2
    assert all(line.startswith(" " * (column or 4)) and line[column or 4] != " " for line in rest)
    assert all(len(line) <= 40 for line in (first, *rest))
    assert " ".join(" ".join((first, *rest)).split()) == SENTENCE


COMMAND = (
    "ridgeline optimize m --restart-cmd 'vllm serve m --max-num-seqs 4 {flags}' --workload "
    'synthetic:input=512 --slo "ttft:500 tpot:50" --shared-machine'
)


def test_command_is_broken_so_that_a_shell_reads_the_same() -> None:
    out = io.StringIO()
    print_command(Console(file=out, width=72, force_terminal=True), COMMAND)
    rows = out.getvalue().splitlines()
    assert len(rows) > 2 and all(len(row) <= 72 for row in rows)
    assert all(row.endswith(" \\") for row in rows[:-1])
    joined = " ".join(row.removesuffix("\\") for row in rows)
    assert shlex.split(joined) == shlex.split(COMMAND)
    assert not any(row.removesuffix(" \\").endswith(("-cmd", "-workload", "-slo")) for row in rows)
    out = io.StringIO()
    print_command(Console(file=out, width=72), COMMAND)
    assert out.getvalue() == f"  {COMMAND}\n"


def test_prose_is_one_line_in_a_pipe() -> None:
    out = io.StringIO()
    print_prose(Console(file=out, width=40), Text(f"{SENTENCE}\n\n{SENTENCE}"), "dim")
    assert out.getvalue() == f"{SENTENCE}\n\n{SENTENCE}\n"


def test_ladder_breaks_no_identifier() -> None:
    settings = "max_num_batched_tokens=256, max_num_seqs=128"
    trial = msgspec.convert(
        {
            "rung": "joint", "label": f"Several settings together ({settings})", "technique": "",
            "honesty": "exact", "changes": {}, "settings": {}, "verdict": "inconclusive",
            "reason": "", "predicted": {"gain": 1.13, "low": 1.0, "high": 1.3},
        },
        Trial,
    )  # fmt: skip
    out = io.StringIO()
    print_ladder(Console(file=out, width=80), [trial, trial])
    heading, *rows = (line.rstrip() for line in out.getvalue().splitlines())
    assert heading.split() == ["Rung", "Predicted", "Ratio", "[95%", "CI]", "req/s", "Verdict"]
    assert len(rows) == 4 and rows[0].endswith("inconclusive")
    assert rows[0].startswith("Several settings together ") and settings in rows[1]


def test_ladder_cuts_no_figure_off() -> None:
    """The name of a rung is folded instead."""
    out = io.StringIO()
    trial = msgspec.convert(
        {
            "rung": "shipped", "label": "The settings as they are shipped", "technique": "",
            "honesty": "exact", "changes": {}, "settings": {}, "verdict": "inconclusive",
            "reason": "", "predicted": {"gain": 11.49, "low": 1.0, "high": 20.0},
            "ratio": {"low": 6.89, "mid": 15.12, "high": 33.15},
        },
        Trial,
    )  # fmt: skip
    print_ladder(Console(file=out, width=80), [trial])
    heading, first, *_ = (line.rstrip() for line in out.getvalue().splitlines())
    assert "Predicted" in heading
    assert "15.12x [6.89, 33.15]" in first and first.endswith("inconclusive")
    assert max(map(len, out.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.01234, "0.0123"), (44.62, "44.6"), (999.4, "999"), (999.6, "1,000"), (123456.7, "123,457")],
)
def test_rates_are_printed_without_exponents(value: float, shown: str) -> None:
    assert rounded(value) == shown


@pytest.mark.parametrize(("dtype", "is_named"), [("float32", False), ("bfloat16", True)])
def test_server_says_that_tokens_depend_on_the_batch(dtype: str, is_named: bool) -> None:
    served = _served(dtype)
    assert any("can depend on the batch" in line for line in served_lines(served)) is is_named


@pytest.mark.parametrize("needs_key", [False, True])
def test_server_says_where_its_clients_need_a_key(needs_key: bool) -> None:
    text = "\n".join(served_lines(_served("float32", needs_key)))
    assert ("chat --url http://127.0.0.1:1 --api-key KEY\n" in text) is needs_key
    assert ("OPENAI_BASE_URL=http://127.0.0.1:1/v1 OPENAI_API_KEY=KEY" in text) is needs_key


def _served(dtype: str, needs_key: bool = False) -> ServedModel:
    info = EngineInfo(
        model="m",
        settings={},
        derivations={},
        max_model_len=16,
        num_blocks=1,
        block_size=16,
        weight_bytes=1,
        kv_bytes_per_token=1,
        device="cpu",
        compute_dtype=dtype,
    )
    return ServedModel(
        name="m", url="http://127.0.0.1:1", admin_url=None, engine=info, needs_key=needs_key
    )
