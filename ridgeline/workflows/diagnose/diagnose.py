"""`ridgeline diagnose`: what latency is lost to, ranked, and what would give it back.

Three sources, one judgement: an engine here or a server at a URL is measured first (the flags of
`bench` say with what load), a recorded run is read. Own engines are judged by their steps, servers
by their histograms and the client's instants.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec
from rich.console import Console

from ridgeline.cli.render.bench import Physics
from ridgeline.cli.render.diagnose_html import diagnosis_page, finding_lines, shares_line
from ridgeline.config.settings import Settings
from ridgeline.diagnose import (
    Blame,
    Ranked,
    batch_facts,
    blame,
    blame_server,
    facts_of,
    findings,
    missed_prefix,
    step_facts,
    with_gpu,
)
from ridgeline.diagnose.baseline import learn
from ridgeline.diagnose.blame import Expected
from ridgeline.diagnose.causes import Server
from ridgeline.diagnose.chart import roofline_text
from ridgeline.diagnose.conditions import Value
from ridgeline.diagnose.seen_steps import seen_steps
from ridgeline.errors import BadInput
from ridgeline.measure.bench import BenchOptions, check
from ridgeline.measure.log import (
    Beside,
    beside_in_results,
    find_log,
    read_log,
    read_run,
)
from ridgeline.measure.server.config import ELSEWHERE
from ridgeline.measure.server.scrape import ServerReport
from ridgeline.records import RunTrace, Slo
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.workflows.bench.bench import Remote, beside_of, measure
from ridgeline.workflows.diagnose.roofline_points import RunRoofline, placed, roof_of
from ridgeline.workflows.load.server_utilisation import Device, device_of


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings, most worth first, and the losses that they rest on. `roof`: prefill, decode and
    mixed steps under a device's peaks, where the engine was here or a device was named.
    """

    target: str
    server: str
    findings: tuple[Ranked, ...]
    blame: Blame | None
    told: dict[str, float] = {}
    roof: RunRoofline | None = None


def command(
    options: BenchOptions,
    on: Settings | Remote | Path,
    *,
    baseline: Path | None = None,
    held: Held | None = None,
    as_json: bool = False,
    html: Path | None = None,
    console: Console | None = None,
) -> int:
    """Measure or read, judge, print; the exit code: 1 where nothing could be judged."""
    out = console or Console(highlight=False, soft_wrap=True)
    found = diagnose(options, on, baseline, out, held)
    if as_json:
        print(json_line(found))
    else:
        _print(found, out)
    if html is not None and found.blame is not None:
        write_file(html, [diagnosis_page(found).encode()])
    return 0 if found.blame is not None else 1


def diagnose(
    options: BenchOptions,
    on: Settings | Remote | Path,
    baseline: Path | None,
    out: Console,
    held: Held | None = None,
) -> Diagnosis:
    expected = learn(read_run(baseline).steps) if baseline is not None else None
    physics: Physics | None = None
    if isinstance(on, Path):
        run, beside = recorded(on)
    else:
        check(options)
        if held is not None and held.model is not None:
            held.device()  # a wrong name must not cost the run
        run, physics, seen = measure(options, on, out)
        beside = beside_of(options, seen)
    found = judged(run, beside, options.slo, expected)
    roof = None
    if physics is not None:
        points = placed(run.steps, physics.price, physics.peaks)
        roof = RunRoofline(points=points, peaks=physics.peaks)
    elif held is not None:
        roof = roof_of(run, beside, found.told, held.device(run))
    return msgspec.structs.replace(found, roof=roof)


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is held against: a model's directory, and what served it (`cli.distant`)."""

    model: str | None
    accelerator: str

    def device(self, run: RunTrace | None = None) -> Device:
        """With what a server of ours says that it does to the weights; `model` None: its own."""
        info = None if run is None or run.info is None else run.info
        model = self.model
        if model is None:
            ours = info is not None and info.device != ELSEWHERE
            model = str(info.settings.get("model", "")) if ours and info is not None else ""
        if not model:
            raise BadInput(
                "--accelerator needs the model whose arithmetic the run is held against",
                value=self.accelerator,
                fix="name its directory: ridgeline diagnose MODEL --run … --accelerator …",
            )
        return device_of(model, self.accelerator, info)


def judged(
    run: RunTrace, beside: Beside, slo: Slo | None, expected: Expected | None = None
) -> Diagnosis:
    """The same of a run that has just been measured and of one that was written down then."""
    report = beside.server
    words = {**told(report, run), **beside.machine.facts()}
    missed = missed_prefix(run, beside.shared_prompt_share, words)
    if run.steps:
        budget = run.info.settings.get("max_num_batched_tokens") if run.info else None
        lost = blame(
            run,
            missed_prefix=missed,
            expected=expected,
            token_budget=budget if isinstance(budget, int) else None,
        )
    else:
        lost = blame_server(run, words, missed)
    lost = None if lost is None else with_gpu(lost, run, words)
    server = cast("Server", report.server if report else _whose(run))
    facts = {**_facts(run, slo, words), **step_facts(run, expected)}
    if not run.steps:
        facts.update(batch_facts(seen_steps(run)))
    facts["missed_prefix_share"] = missed
    facts.setdefault("cpu_taken_share", 0.0)  # nobody saw anybody
    ranked = findings(lost, facts, server) if lost is not None else ()
    return Diagnosis(target=run.target, server=server, findings=ranked, blame=lost, told=words)


def recorded(path: Path) -> tuple[RunTrace, Beside]:
    """A run's log, or the one in its folder. A log without the server's words takes those of the
    result that `bench --json` wrote beside it.
    """
    run, beside = read_log(find_log(path))
    if beside is None and path.is_dir():
        beside = beside_in_results(path)
    return run, beside or Beside()


def _whose(run: RunTrace) -> Server:
    """Of a recorded run: ours tell all of themselves, others that they are elsewhere."""
    return "ridgeline" if run.info is not None and run.info.device != ELSEWHERE else "another"


def told(report: ServerReport | None, run: RunTrace) -> dict[str, float]:
    """A server's report as flat facts: means per request from its totals, where it has no
    histogram of them. A queue time that follows from nothing else follows from the number that
    waited, by Little's law.
    """
    if report is None:
        return {}
    flat = {**report.counts, **report.mean_s, **report.means}
    served = sum(1 for request in run.requests if request.token_s)
    if served and "prefill_total_s" in flat:
        flat.setdefault("prefill_s", flat["prefill_total_s"] / served)
    if served and "waiting_total_s" in flat:
        flat["waited_s"] = flat["waiting_total_s"] / served
    elif served and "waiting" in flat:
        flat["waited_s"] = flat["waiting"] * run.duration_s / served
    for what in ("full_waiting", "spent_waiting"):
        if flat.get("waiting_total_s") and f"{what}_total_s" in flat:
            flat[f"{what}_share"] = flat[f"{what}_total_s"] / flat["waiting_total_s"]
    if "waited_s" in flat and "prefill_s" not in flat:
        flat.setdefault("queue_s", flat["waited_s"])
    return {**flat, **{f"{name}_p95": value for name, value in report.p95.items()}}


def _facts(run: RunTrace, slo: Slo | None, words: Mapping[str, float]) -> dict[str, Value]:
    """The client's facts; where there are no steps, the server's own words under the same names.

    A server that does not tell its seats has as many as were taken while somebody waited.
    """
    names = {
        "kv_used_share": "kv_used_share_p95",
        "mean_running": "running",
        "mean_waiting": "waiting",
        "preemptions": "preemptions",
    }
    more: dict[str, Value] = {
        ours: words[theirs] for ours, theirs in names.items() if theirs in words
    }
    if "seats" in words:
        more["max_num_seqs"] = round(words["seats"])
    elif words.get("waiting_p95", 0.0) > 0 and "running_p95" in words:
        more["max_num_seqs"] = round(words["running_p95"])
    more |= {name: value for name, value in words.items() if name.startswith("gpu_")}
    facts = {**more, **facts_of(run, slo)}
    if words.get("queried_tokens") and not facts.get("cached_prompt_share"):
        facts["cached_prompt_share"] = words["hit_tokens"] / words["queried_tokens"]
    elif "hit_share" in words and not facts.get("cached_prompt_share"):
        facts["cached_prompt_share"] = words["hit_share"]
    return facts


def _print(found: Diagnosis, out: Console) -> None:
    if found.blame is None:
        raise BadInput(
            "nothing to diagnose: no request was served", value=found.target, fix="look at bench"
        )
    out.print(f"{found.target}: {found.blame.num_requests} requests", style="bold", markup=False)
    _tell(out, "where latency went: ", shares_line(found.blame), style="dim")
    if not found.findings:
        out.print("No finding: no cause takes enough of the latency to be worth mending.")
    for number, each in enumerate(found.findings, 1):
        out.print()
        _tell(out, f"{number}. ", f"{each.verdict}: {each.sentence}")
        for name, value in finding_lines(each).items():
            _tell(out, f"   {name:<14}", value)
    if found.roof is not None:
        out.print()
        for line in roofline_text(found.roof.points, found.roof.peaks):
            out.print(line, markup=False, no_wrap=True, crop=False)
        _tell(out, "", f"ceilings: {found.roof.peaks.source}. {found.roof.note}", style="dim")


def _tell(out: Console, label: str, text: str, style: str | None = None) -> None:
    """A label and its text; on a terminal the text's further lines begin under its first."""
    lines = [text]
    if out.is_terminal and text:
        lines = textwrap.wrap(text, max(30, out.width - len(label)))
    for i, line in enumerate(lines):
        lead = label if i == 0 else " " * len(label)
        out.print(f"{lead}{line}".rstrip(), style=style, markup=False)
