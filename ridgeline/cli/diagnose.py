"""`ridgeline diagnose`: what latency is lost to, ranked, and what would give it back.

Three sources, one judgement: an engine here or a server at a URL is measured first (the flags of
`bench` say with what load), a recorded run is read. Own engines are judged by their steps, servers
by their histograms and the client's instants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
from rich.console import Console

from ridgeline.cli.bench import Remote, measure
from ridgeline.cli.beside import Seen
from ridgeline.diagnose import (
    Blame,
    Ranked,
    blame,
    blame_server,
    facts_of,
    findings,
    missed_prefix,
    step_facts,
    with_gpu,
)
from ridgeline.diagnose.baseline import learn
from ridgeline.diagnose.causes import Server
from ridgeline.diagnose.conditions import Value
from ridgeline.errors import BadInput
from ridgeline.measure.bench import BenchOptions, check, workload_of
from ridgeline.measure.log import read_run
from ridgeline.measure.server.config import ELSEWHERE
from ridgeline.measure.server.scrape import ServerReport
from ridgeline.measure.workload import Chat, LoadRequest, plain_chat
from ridgeline.measure.workload.sharing import shared_prompt_share
from ridgeline.records import RunTrace, Slo
from ridgeline.settings import Settings

SAMPLE = 200
CHAR_BLOCK = 64  # characters that stand for a block of tokens, where nothing tokenizes


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings, most worth first, and the losses that they rest on."""

    target: str
    server: str
    findings: tuple[Ranked, ...]
    blame: Blame | None
    told: dict[str, float] = {}


def command(
    options: BenchOptions,
    on: Settings | Remote | Path,
    *,
    baseline: Path | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> int:
    """Measure or read, judge, print; the exit code: 1 where nothing could be judged."""
    out = console or Console(highlight=False, soft_wrap=True)
    found = diagnose(options, on, baseline, out)
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(found, out)
    return 0 if found.blame is not None else 1


def diagnose(
    options: BenchOptions, on: Settings | Remote | Path, baseline: Path | None, out: Console
) -> Diagnosis:
    expected = learn(read_run(baseline).steps) if baseline is not None else None
    if isinstance(on, Path):
        run, seen = read_run(on), Seen()
        shared = 0.0  # a log keeps no prompts
    else:
        check(options)
        run, _, seen = measure(options, on, out)
        shared = shared_of(list(workload_of(options).sample(SAMPLE, options.seed)))
    report = seen.server
    words = {**told(report, run), **seen.machine.facts()}
    missed = missed_prefix(run, shared, words)
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
    facts = {**_facts(run, options.slo, words), **step_facts(run, expected)}
    facts["missed_prefix_share"] = missed
    ranked = findings(lost, facts, server) if lost is not None else ()
    return Diagnosis(target=run.target, server=server, findings=ranked, blame=lost, told=words)


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


def shared_of(requests: Sequence[LoadRequest]) -> float:
    """How much of the load repeats the head of an earlier prompt; of text, by characters."""
    ids = [r.prompt for r in requests if isinstance(r.prompt, tuple)]
    if ids:
        return shared_prompt_share(ids)
    texts = [plain_chat(r.prompt) if isinstance(r.prompt, Chat) else r.prompt for r in requests]
    return shared_prompt_share(([ord(c) for c in str(t)] for t in texts), CHAR_BLOCK)


def _print(found: Diagnosis, out: Console) -> None:
    if found.blame is None:
        raise BadInput(
            "nothing to diagnose: no request was served", value=found.target, fix="look at bench"
        )
    out.print(f"{found.target}: {found.blame.num_requests} requests", style="bold", markup=False)
    out.print(f"where latency went: {_shares(found.blame)}", style="dim", markup=False)
    if not found.findings:
        out.print("No finding: no cause takes enough of the latency to be worth mending.")
    for number, each in enumerate(found.findings, 1):
        out.print(f"\n{number}. {each.verdict}: {each.sentence}", markup=False)
        for name, value in _lines(each).items():
            out.print(f"   {name:<14}{value}", markup=False)


def _lines(each: Ranked) -> Mapping[str, str]:
    gain, more = each.gain, each.with_consequences - each.gain.mid
    worth = f"up to {gain.mid:.0%} of latency [{gain.low:.0%}, {gain.high:.0%}]"
    if more > 0.01:
        worth += f", and {more:.0%} that follows from it"
    evidence = ", ".join(f"{name} = {_figure(value)}" for name, value in each.evidence.items())
    return {
        "fix": each.fix,
        "flag": each.flag,
        "gain": worth,
        "trade-off": each.trade_off,
        "will not help": each.not_help,
        "evidence": evidence,
    }


def _figure(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _shares(found: Blame) -> str:
    rows = sorted(found.shares.items(), key=lambda item: -item[1].mid)
    return ", ".join(f"{name} {share.mid:.0%}" for name, share in rows if share.mid >= 0.005)
