"""Before and after, line by line: functional, performance, cost, stability."""

from __future__ import annotations

import msgspec

from ridgeline.optimize.output import number_format
from ridgeline.optimize.result import ConfigurationFigures, ConfigurationSummary, LadderResult
from ridgeline.report.numbers import rounded
from ridgeline.stats import Interval

STEADY = 0.25  # run-to-run spread of the objective beyond which a configuration is called unsteady


class ChecklistLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line; `css` is good, flat or bad."""

    group: str
    what: str
    before: str
    after: str
    says: str
    css: str


def checklist(result: LadderResult) -> tuple[ChecklistLine, ...]:
    """Every line of the list."""
    old, new = result.baseline, result.final
    return (
        *_functional(result),
        _higher("Performance", "goodput (req/s)", old, new, "goodput_req_s"),
        _higher("", "output tokens/s", old, new, "output_tok_s"),
        _slo_line(result, "time to first token, p95", "ttft_p95_s"),
        _slo_line(result, "time per output token, p95", "tpot_p95_s"),
        _cost(result),
        *_stability(old.measured, new.measured),
    )


def _functional(result: LadderResult) -> tuple[ChecklistLine, ...]:
    lossy = [trial for trial in result.kept if trial.honesty == "lossy"]
    exact = [trial for trial in result.kept if trial.exactness is not None]
    tokens = sum(t.exactness.num_tokens for t in exact if t.exactness is not None)
    lines = [
        ChecklistLine(
            group="Functional",
            what="same greedy tokens (exact rungs)",
            before="reference",
            after=f"{len(exact)} rung(s), {tokens} tokens compared",
            says="same" if exact else "nothing to compare",
            css="good" if exact else "flat",
        )
    ]
    for trial in lossy:
        found = trial.quality
        lines.append(
            ChecklistLine(
                group="",
                what=f"held-out perplexity ({trial.label})",
                before=_perplexity(found.perplexity_before if found else None),
                after=_perplexity(found.perplexity_after if found else None),
                says="within limits" if found and found.verdict == "pass" else "not cleared",
                css="good" if found and found.verdict == "pass" else "bad",
            )
        )
    return tuple(lines)


def _perplexity(interval: Interval | None) -> str:
    return number_format.DASH if interval is None else rounded(interval.mid, 4)


def _higher(
    group: str, what: str, old: ConfigurationSummary, new: ConfigurationSummary, field: str
) -> ChecklistLine:
    before, after = getattr(old.measured, field), getattr(new.measured, field)
    times = after / before if before else None
    says = f"×{times:.2f}" if times else "from nothing" if after else "none"
    return ChecklistLine(
        group=group,
        what=what,
        before=number_format.rate(before),
        after=number_format.rate(after),
        says=says,
        css="flat" if times and 0.97 < times < 1.03 else "good" if after > before else "bad",
    )


def _slo_line(result: LadderResult, what: str, field: str) -> ChecklistLine:
    """Latency of each configuration at its own load, which must meet the SLO."""
    before, after = (getattr(s.measured, field) for s in (result.baseline, result.final))
    limit = _limit(result, field)
    met = after is not None and (limit is None or after <= limit)
    says = "no SLO" if limit is None else "met" if met else "missed"
    return ChecklistLine(
        group="",
        what=what + (f" (SLO {number_format.duration(limit)})" if limit else ""),
        before=number_format.duration(before),
        after=number_format.duration(after),
        says=says,
        css="flat" if limit is None else "good" if met else "bad",
    )


def _limit(result: LadderResult, field: str) -> float | None:
    from ridgeline.records import Slo

    slo = Slo.parse(result.provenance.slo)
    return slo.ttft_s if field.startswith("ttft") else slo.tpot_s


def _cost(result: LadderResult) -> ChecklistLine:
    before = result.baseline.cost.output_dollars_per_mtok
    after = result.final.cost.output_dollars_per_mtok
    both = before is not None and after is not None
    return ChecklistLine(
        group="Cost",
        what="$ per 1M output tokens",
        before=number_format.dollars(before),
        after=number_format.dollars(after),
        says=f"×{after / before:.2f}" if both and before and after else number_format.DASH,
        css="good" if both and before and after and after < 0.97 * before else "flat",
    )


def _stability(old: ConfigurationFigures, new: ConfigurationFigures) -> tuple[ChecklistLine, ...]:
    steady = new.spread is not None and new.spread < STEADY
    return (
        ChecklistLine(
            group="Stability",
            what="failed or cut requests",
            before=number_format.share(old.failed_share),
            after=number_format.share(new.failed_share),
            says="none" if not new.failed_share else "some",
            css="good" if new.failed_share <= old.failed_share else "bad",
        ),
        ChecklistLine(
            group="",
            what="preemptions",
            before=str(old.preemptions),
            after=str(new.preemptions),
            says="none" if not new.preemptions else "some",
            css="good" if not new.preemptions else "flat",
        ),
        ChecklistLine(
            group="",
            what="spread from run to run",
            before=number_format.share(old.spread),
            after=number_format.share(new.spread),
            says="one run" if new.spread is None else "steady" if steady else "unsteady",
            css="good" if steady else "flat",
        ),
    )
