"""report.html: the result of an optimisation as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from ridgeline.optimize.output import number_format
from ridgeline.optimize.output.headline import headline
from ridgeline.optimize.output.vllm_command import VllmCommand
from ridgeline.optimize.report.checklist import checklist
from ridgeline.optimize.report.forest import forest_cell, forest_range
from ridgeline.optimize.report.ladder_chart import ladder_chart
from ridgeline.optimize.report.style import VERDICT_CSS
from ridgeline.optimize.result import LadderResult, by_reason
from ridgeline.records import Slo
from ridgeline.report.distribution_chart import distribution_figure
from ridgeline.report.html import HtmlTable, Tile, render_page
from ridgeline.report.numbers import rounded
from ridgeline.report.roofline_chart import PHASE_LEGEND, Mark, roofline_figure
from ridgeline.roofline import RooflinePoint

ROOFLINE_INTRO = (
    "How fast each phase computed against what this machine can do. Left of the ridge, bandwidth "
    "is the limit; right of it, compute. The distance from a mark up to the roof is overhead."
)


def report(result: LadderResult, commands: Mapping[str, VllmCommand]) -> str:
    """The whole page. `commands`: what deploys the result, by its heading."""
    provenance = result.provenance
    facts = " · ".join((provenance.model, provenance.workload, provenance.slo, provenance.started))
    price = f"At ${result.price.dollars_per_hour:g} per machine-hour"
    if result.price.notional:
        price += " (notional: give your own with --price-per-hour)"
    return render_page(
        "optimize/report/report.html",
        title=f"Ridgeline report: {provenance.model}",
        eyebrow=f"Ridgeline {provenance.version} · {facts}",
        heading=headline(result),
        lede=result.final.finding.sentence,
        result=result,
        headlines=_tiles(result),
        ladder_chart=ladder_chart(result),
        trials=_trials(result),
        **_roofline(result),
        distributions=_distributions(result),
        costs=_costs(result),
        costs_intro=f"{price}. Only tokens of requests that met the SLO count: late ones were "
        "paid for but not delivered.",
        checklist=checklist(result),
        commands=commands,
        not_tried=HtmlTable(
            columns=("Rungs", "Reason"),
            rows=[
                ("; ".join(labels), reason)
                for reason, labels in by_reason(result.not_tried).items()
            ],
            num_text=2,
        ),
        provenance=_provenance(result),
    )


def _tiles(result: LadderResult) -> list[Tile]:
    old, new = result.baseline.measured, result.final.measured
    was_cost = f"was {number_format.cost(result.baseline.cost)}"
    return [
        Tile(
            "Goodput",
            number_format.rate(new.goodput_req_s),
            "req/s",
            f"was {number_format.rate(old.goodput_req_s)}",
        ),
        Tile(
            "Time to first token, p95",
            number_format.duration(new.ttft_p95_s),
            remark=f"was {number_format.duration(old.ttft_p95_s)}",
        ),
        Tile(
            "Time per output token, p95",
            number_format.duration(new.tpot_p95_s),
            remark=f"was {number_format.duration(old.tpot_p95_s)}",
        ),
        Tile("Cost per 1M output tokens", number_format.cost(result.final.cost), remark=was_cost),
    ]


def _trials(result: LadderResult) -> list[dict[str, object]]:
    if not result.trials:
        return []
    low, high = forest_range(result.trials)
    return [
        {
            "label": trial.label,
            "predicted": f"{trial.predicted.gain:.2f}×",
            "forest": forest_cell(trial, low, high),
            "ratio": number_format.ratio(trial.ratio),
            "goodput": number_format.change(trial.before, trial.after),
            "verdict": trial.verdict,
            "css": VERDICT_CSS[trial.verdict],
            "reason": trial.reason,
            "quality": number_format.quality(trial),
            "flags": number_format.settings_line(trial.changes),
        }
        for trial in result.trials
    ]


def _roofline(result: LadderResult) -> dict[str, object]:
    standings = (result.baseline, result.final)
    figure = Markup()
    if result.peaks is not None:
        label = "Roofline of this machine with every measured configuration"
        figure = roofline_figure(_marks(result), result.peaks, label, _decode_path(result))
    source = f" Peaks: {result.peaks.source}." if result.peaks and result.peaks.source else ""
    return {
        "roofline": figure,
        "roofline_intro": ROOFLINE_INTRO + source,
        "roofline_key": f"{PHASE_LEGEND}\nB baseline · F final · numbers: rungs of the table",
        "findings": [
            f"{standing.label.capitalize()}: {standing.finding.sentence}" for standing in standings
        ],
    }


def _marks(result: LadderResult) -> list[Mark]:
    """In drawing order: baseline and final stay on top."""
    marks = [
        Mark(str(number), VERDICT_CSS[trial.verdict], point)
        for number, trial in enumerate(result.trials, 1)
        for point in trial.points
    ]
    marks += [Mark("B", "before", point) for point in result.baseline.points]
    return marks + [Mark("F", "after", point) for point in result.final.points]


def _decode_path(result: LadderResult) -> list[RooflinePoint]:
    """Decode from the baseline over each kept rung to the final configuration."""
    chain = [result.baseline.points, *(trial.points for trial in result.kept), result.final.points]
    return [point for points in chain for point in points if point.phase == "decode"]


def _distributions(result: LadderResult) -> list[Markup]:
    slo = Slo.parse(result.provenance.slo)
    old, new = result.baseline.samples, result.final.samples
    return [
        distribution_figure("time to first token", old.ttft_s, new.ttft_s, slo.ttft_s),
        distribution_figure("time per output token", old.tpot_s, new.tpot_s, slo.tpot_s),
    ]


def _costs(result: LadderResult) -> HtmlTable:
    return HtmlTable(
        columns=(
            "",
            "$ per 1M output tokens",
            "$ per 1M tokens, in and out",
            "Output tokens/s within the SLO",
        ),
        rows=[
            (
                standing.label.capitalize(),
                number_format.dollars(standing.cost.output_dollars_per_mtok),
                number_format.dollars(standing.cost.total_dollars_per_mtok),
                number_format.rate(standing.measured.good_output_tok_s),
            )
            for standing in (result.baseline, result.final)
        ],
    )


def _provenance(result: LadderResult) -> list[tuple[str, str]]:
    provenance = result.provenance
    facts = {
        "ended": f"{result.ended}, after {provenance.spent_s:.0f} of {provenance.budget_s:.0f} s",
        "objective": provenance.objective,
        "seed": provenance.seed,
        **({"server": provenance.server} if provenance.server else {}),
        **{f"machine {name}": value for name, value in provenance.machine.items()},
        **{f"model {name}": value for name, value in provenance.model_facts.items()},
    }
    return [
        (
            name.replace("_", " "),
            rounded(value, 4) if isinstance(value, float) else str(value),
        )
        for name, value in facts.items()
    ]
