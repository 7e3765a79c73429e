"""`optimize --playbook`: its goals and order as data, and every command that it prints parses."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from ridgeline.cli.main import main
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.improve import OptimizeOptions, PlaybookName
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize import ladder
from ridgeline.optimize.external.server_flags import load_server_flags
from ridgeline.optimize.external.server_rungs import parallel_rungs, server_rungs
from ridgeline.optimize.playbook import find_playbook, place_of, playbook_checks, playbooks
from ridgeline.records import Slo
from ridgeline.workflows.optimize.optimize import checklist_lines, job_of, ladder_of, with_playbook

NAMES = sorted(playbooks())


def all_rungs() -> set[str]:
    servers = load_server_flags()
    rungs = {rung.id for rung in ladder.load_default_ladder().rungs}
    rungs |= {rung.id for server in servers for rung in server_rungs(server)}
    return rungs | {rung.id for server in servers for rung in parallel_rungs(server, 8)}


def test_option_names_every_playbook() -> None:
    assert sorted(get_args(PlaybookName)) == NAMES
    with pytest.raises(BadInput, match="latency-api"):
        find_playbook("speed")


@pytest.mark.parametrize("name", NAMES)
def test_playbook_names_rungs_workload_and_slo_that_exist(name: str) -> None:
    book = find_playbook(name)
    parse_workload(book.workload)
    Slo.parse(book.slo)
    rungs = all_rungs()
    for first in book.first:
        assert any(place_of(rung, [first]) == 0 for rung in rungs), first


def test_typed_options_win_over_the_playbook() -> None:
    book = find_playbook("batch")
    options = with_playbook(OptimizeOptions(playbook="batch"))
    assert (options.workload, options.slo, options.objective) == (
        book.workload,
        book.slo,
        book.objective,
    )
    options = with_playbook(OptimizeOptions(playbook="batch", slo="ttft:9 tpot:9"))
    assert options.slo == "ttft:9 tpot:9" and options.workload == book.workload
    assert with_playbook(OptimizeOptions()) == OptimizeOptions()
    job = job_of(Settings(model="demo"), OptimizeOptions(playbook="batch"))
    assert job.objective == "cost" and job.workload == "batch"


def test_rungs_of_the_playbook_come_first() -> None:
    options = OptimizeOptions(playbook="out-of-memory")
    ordered = ladder_of(options.ladder, options.playbook)
    assert ordered.first == find_playbook("out-of-memory").first
    assert place_of("vllm-kv-fp8", ordered.first) < place_of("vllm-fp8", ordered.first)
    assert place_of("vllm-graphs", ordered.first) == len(ordered.first)


class Parsed(Exception):
    pass


def commands() -> Iterator[str]:
    for name in NAMES:
        options = with_playbook(OptimizeOptions(playbook=name))  # type: ignore[arg-type]
        for line in checklist_lines(options, "demo", "http://127.0.0.1:8000"):
            yield line.partition("      #")[0]


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_printed_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real command line, up to the point where the command would begin."""
    seen: list[str] = []

    def stop(invocation: Invocation) -> None:
        seen.append(invocation.command.name)
        raise BadInput("parsed")

    monkeypatch.setattr("ridgeline.cli.validate.preflight.check_before", stop)
    words = shlex.split(command)
    assert words[0] == "ridgeline" and "{" not in command
    assert main(words[1:]) == 2
    assert seen == [words[1]]


def test_checklist_covers_every_group() -> None:
    groups = {check.group for check in playbook_checks()}
    assert groups == {"functional", "performance", "cost", "stability"}


def test_order_of_the_playbook_decides_among_equally_certain_rungs() -> None:
    fields: dict[str, Any] = msgspec.structs.asdict(ladder.load_default_ladder())
    assert fields["first"] == ()
