"""Changes of a server that were not made: a dry run, and advice."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from ridgeline.cli.render.console import print_command, print_prose
from ridgeline.optimize.drivers.shell import shell_line
from ridgeline.optimize.output import number_format
from ridgeline.optimize.server_settings import shown_flags
from ridgeline.report.numbers import rounded
from ridgeline.workflows.optimize.advise import AdvisedChange, ServerAdvice
from ridgeline.workflows.optimize.dry_run import DryRun
from ridgeline.workflows.optimize.watch import WatchReport

REMARK = 14  # columns: where a remark on a change begins


def print_dry_run(console: Console, run: DryRun) -> None:
    """The server as it runs, the commands of the first change, the other flags, and the way
    back."""
    line, command = partial(_line, console), partial(print_command, console)
    line(f"Dry run: nothing is changed. The server ({run.server_kind}) runs as:", "bold")
    command(run.server_command)
    if run.changes:
        first = run.changes[0]
        line(f"\nA trial, here {first.label}, runs:", "bold")
        for words in first.commands:
            command(shell_line(words))
        line(f"\nThe trials of the first round ({len(run.changes)}) set:", "bold")
        for change in run.changes:
            command(shown_flags(change.flags))
    line("\nTo restore, after every failed trial and at the end:", "bold")
    for words in run.restore:
        command(shell_line(words))
    if not run.restore:
        line("  nothing: the servers that it starts end with it")


def print_watch(console: Console, report: WatchReport) -> None:
    """The live traffic against the tuned one, and what would gain now."""
    line, seen = partial(_line, console), report.seen
    rate = "" if seen.rate is None else f", {number_format.rate(seen.rate)} req/s"
    url = f"{report.url} ({report.twin})" if report.twin else report.url
    line(f"\n{url}: {seen.num_requests} requests in {report.duration_s:.0f} s{rate}", "bold")
    for check in report.checks:
        mark = "drifted" if check.drifted else "as tuned"
        detail = check.note or (
            f"p = {rounded(check.p_value, 2)}" if check.p_value is not None else ""
        )
        values = f"{rounded(check.tuned):>10} → {rounded(check.seen):<10}"
        line(f"  {check.part:16}{values}{mark:10}{detail}")
    for part in report.missing:
        line(f"  {part:16}not reported by this server", "dim")
    if not report.drifted:
        line("\nThe traffic matches what the server was tuned for.", "bold")
        return
    line("\nThe workload has drifted from the one that was tuned for.", "bold")
    if report.capacity is not None:
        share = "" if not seen.rate else f", and {seen.rate / report.capacity:.0%} of it is used"
        capacity = number_format.rate(report.capacity)
        line(f"  Predicted for this traffic: {capacity} req/s within {report.slo}{share}")
    for number, change in enumerate(report.changes, 1):
        low, high = change.predicted.low, change.predicted.high
        lossy = ", lossy" if change.lossy else ""
        line(
            f"  {number}. you would gain ~{change.predicted.gain:.1f}x [{low:.1f}, {high:.1f}] by "
            f"{change.label}{lossy}",
            column=5,
        )
        line(f"     flags    {shown_flags(change.flags)}", column=REMARK)
        line(f"     hurts    {change.hurts_when}", "dim")
    if report.unranked:
        line(f"  {report.unranked}")
    if report.not_ranked:
        line(f"  not ranked, at the limit of simulated work: {', '.join(report.not_ranked)}", "dim")
    line("\nProve it with:", "bold")
    print_command(console, report.prove)


def print_advice(console: Console, advice: ServerAdvice) -> None:
    """The server as measured, changes by predicted gain, and how to verify one."""
    line, measured = partial(_line, console), advice.baseline.measured
    kind = advice.twin or advice.server_kind
    line(f"\nThe server ({kind}) as it runs", "bold")
    print_command(console, advice.command)
    if advice.assumed:
        line(f"  assumed: {advice.assumed}", "yellow")
    line(
        f"  {number_format.rate(measured.goodput_req_s)} req/s within the SLO · "
        f"TTFT p95 {number_format.duration(measured.ttft_p95_s)} · "
        f"TPOT p95 {number_format.duration(measured.tpot_p95_s)} · "
        f"{number_format.cost(advice.baseline.cost)} per 1M output tokens",
        column=2,
    )
    line(f"  {advice.baseline.finding.sentence}", column=2)
    if advice.unranked:
        line(f"\nNo gain is predicted: {advice.unranked}.", "yellow")
        line("\nChanges that may help, in no order of gain (nothing was changed)", "bold")
    else:
        line("\nChanges, by predicted gain (nothing was changed)", "bold")
    for number, change in enumerate(advice.changes, 1):
        _print_change(console, number, change)
    if not advice.changes:
        line("  none: no change is predicted to gain")
    for left_out in advice.left_out:
        line(f"  not advised: {left_out.label}: {left_out.reason}", "dim", column=4)
    line("\nTo verify a change, measure before and after it:", "bold")
    for command in advice.verify:
        print_command(console, command)
    if any(change.lossy for change in advice.changes):
        line("\nTo verify the quality of a lossy one:", "bold")
        print_command(console, advice.verify_quality)


def _print_change(console: Console, number: int, change: AdvisedChange) -> None:
    line, predicted = partial(_line, console), change.predicted
    gain = "gain not predicted"
    if predicted is not None:
        gain = f"{predicted.gain:.2f}x [{predicted.low:.2f}, {predicted.high:.2f}]"
    dollars = f", {number_format.dollars(change.dollars)} per 1M output" if change.dollars else ""
    lossy = " (lossy: verify quality)" if change.lossy else ""
    style = "bold" if predicted else ""
    line(f"{number:>3}. {change.label}{lossy}: {gain}{dollars}", style, column=5)
    if change.note:
        line(f"     {change.note}", "dim", column=5)
    line(f"     flags    {shown_flags(change.flags)}", column=REMARK)
    if change.apply:
        line("     apply")
    for command in change.apply:
        print_command(console, command, 7)
    line(f"     helps    {change.why}", "dim")
    line(f"     hurts    {change.hurts_when}", "dim")


def _line(console: Console, text: str, style: str = "", column: int | None = None) -> None:
    print_prose(console, text, style, column=REMARK if style == "dim" and not column else column)
