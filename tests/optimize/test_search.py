"""The whole search on a virtual clock: every verdict, the budget, interruption, and a new rung."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ridgeline.cli.render.improve.optimize_progress import SearchLines
from ridgeline.config.settings import Settings, settings_from
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.open_files import OpenFilesError
from ridgeline.optimize import ladder
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.environment import Load
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.ranking.rung_ranking import Ranking
from ridgeline.optimize.result import LadderResult, Trial
from ridgeline.optimize.search import InterruptedEarlyError, optimize
from ridgeline.records import RunTrace, Slo
from tests.optimize.simulated_servers import NAIVE, Fake, Physics, Quirks, SimulatedDeployment

INT8 = ("quantization", "int8")


def job(
    budget_s: float = 270.0, objective: str = "goodput", shared_machine: bool = False
) -> OptimizeJob:
    return OptimizeJob(
        settings=settings_from({"model": "demo", **NAIVE}),
        workload="chat-and-code",
        slo=Slo.parse("ttft:500 tpot:50"),
        objective=objective,  # type: ignore[arg-type]
        budget_s=budget_s,
        price=MachinePrice(dollars_per_hour=2.0, notional=False),
        shared_machine=shared_machine,
    )


async def search_ladder(
    fake: Fake, *, rungs: ladder.Ladder | None = None, budget_s: float = 270.0, **more: Any
) -> LadderResult:
    found = await optimize(
        job(budget_s, **more),
        fake.environment(),
        rungs or ladder.load_default_ladder(),
        clock=fake.clock,
    )
    assert fake.num_open == 0, "an engine was left open"
    assert fake.most_open <= 2
    return found


def only(*ids: str) -> ladder.Ladder:
    shipped = ladder.load_default_ladder()
    return ladder.Ladder(tuple(r for r in shipped.rungs if r.id in ids), shipped.weights)


def trial_of(result: LadderResult, rung: str) -> Trial:
    return next(trial for trial in result.trials if trial.rung == rung)


@pytest.mark.slow
async def test_the_search_finds_what_helps_and_ends_within_its_budget() -> None:
    fake = Fake()
    result = await search_ladder(fake)
    assert fake.clock.now_s <= 270
    assert result.provenance.spent_s <= 270
    assert {"continuous-batching", "prefix-caching"} <= {trial.rung for trial in result.kept}
    assert result.total is not None
    assert result.total.low > 4
    assert result.slo_holds
    final = settings_from(result.final.settings)
    assert final.batching == "continuous"
    assert final.enable_prefix_caching
    assert result.final.cost.output_dollars_per_mtok is not None
    assert result.baseline.cost.output_dollars_per_mtok is not None
    assert result.final.cost.output_dollars_per_mtok < result.baseline.cost.output_dollars_per_mtok


@pytest.mark.slow
async def test_missing_files_of_the_load_client_are_no_limit_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt: list[Settings] = []
    monkeypatch.setattr(
        Ranking, "learn_failure", lambda self, settings, incumbent: learnt.append(settings)
    )
    for error, number in ((OpenFilesError(), 0), (CannotRun("out of memory"), 1)):
        fake = Fake(quirks={INT8: Quirks(run_error=error)})
        result = await search_ladder(fake, rungs=only("int8"))
        assert trial_of(result, "int8").verdict not in ("kept", "unchanged")
        assert len(learnt) >= number and bool(learnt) == bool(number)


@pytest.mark.slow
async def test_a_rung_that_gains_nothing_is_reported_as_such() -> None:
    fake = Fake(quirks={INT8: Quirks(speed=0.8)})
    result = await search_ladder(fake, rungs=only("continuous-batching", "int8"))
    trial = trial_of(result, "int8")
    assert trial.verdict in ("regressed", "unchanged")
    assert "%" in trial.reason
    assert trial.quality is not None, "a lossy rung carries its quality, kept or not"
    assert settings_from(result.final.settings).quantization is None


@pytest.mark.slow
async def test_a_fast_rung_that_breaks_quality_is_taken_back() -> None:
    fake = Fake(Physics(int8_speed=1.6), quirks={INT8: Quirks(logit_noise=2.0)})
    result = await search_ladder(fake, rungs=only("continuous-batching", "int8"))
    trial = trial_of(result, "int8")
    assert trial.verdict == "quality failed"
    assert trial.ratio is None, "what fails at the first look is not measured"
    assert trial.quality is not None and trial.quality.num_looks == 1
    assert "limit" in trial.reason
    assert settings_from(result.final.settings).quantization is None


@pytest.mark.slow
async def test_a_fast_rung_of_good_quality_is_kept() -> None:
    result = await search_ladder(
        Fake(Physics(int8_speed=1.6)), rungs=only("continuous-batching", "int8")
    )
    assert trial_of(result, "int8").verdict == "kept"
    assert settings_from(result.final.settings).quantization == "int8"


@pytest.mark.slow
async def test_noise_without_a_gain_is_inconclusive() -> None:
    fake = Fake(quirks={INT8: Quirks(noise=0.25), ("batching", "continuous"): Quirks(noise=0.25)})
    result = await search_ladder(fake, rungs=only("continuous-batching", "int8"))
    trial = trial_of(result, "int8")
    assert trial.verdict == "inconclusive"
    assert settings_from(result.final.settings).quantization is None


async def test_an_exact_rung_with_other_tokens_is_refused_before_it_is_measured() -> None:
    fake = Fake(quirks={("batching", "continuous"): Quirks(wrong_tokens=True)})
    result = await search_ladder(fake, rungs=only("continuous-batching"))
    assert {trial.verdict for trial in result.trials} == {"not exact"}
    assert all(trial.ratio is None for trial in result.trials)
    assert result.total is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quirks", "verdict", "reason"),
    [
        (Quirks(open_error=CannotRun("no INT8 here", fix="buy one")), "cannot run", "no INT8"),
        (Quirks(open_error=MemoryError()), "crashed", "MemoryError"),
        (Quirks(run_error=RuntimeError("out of memory")), "crashed", "out of memory"),
    ],
)
async def test_a_crash_is_an_outcome(quirks: Quirks, verdict: str, reason: str) -> None:
    fake = Fake(Physics(int8_speed=1.6), quirks={INT8: quirks})
    result = await search_ladder(fake, rungs=only("continuous-batching", "int8"))
    trial = trial_of(result, "int8")
    assert trial.verdict == verdict
    assert reason in trial.reason
    assert result.total is not None


@pytest.mark.slow
async def test_trial_beyond_the_budget_is_skipped_with_a_reason() -> None:
    fake = Fake()
    result = await search_ladder(fake, budget_s=110.0)
    assert fake.clock.now_s <= 110
    assert result.ended == "budget spent"
    assert any("the budget ended" in left.reason for left in result.not_tried)
    assert result.total is not None


async def test_too_small_budget_is_rejected_with_the_minimum() -> None:
    with pytest.raises(BadInput, match=r"budget is too small.*--budget \d+"):
        await search_ladder(Fake(), budget_s=15.0)


async def test_preparations_are_part_of_the_budget_that_was_asked_for() -> None:
    """The probe and the download come before the baseline; the error names the user's number."""
    fake = Fake()
    with pytest.raises(BadInput, match="got '90 s'"):
        await optimize(
            job(90.0),
            fake.environment(),
            ladder.load_default_ladder(),
            clock=fake.clock,
            begun_s=fake.clock() - 80.0,
        )


@pytest.mark.slow
async def test_an_interruption_leaves_a_valid_result() -> None:
    whole = await search_ladder(Fake())
    fake = Fake(interrupt_at_s=60.0)
    result = await search_ladder(fake)
    assert result.ended == "interrupted"
    assert result.total is None
    assert 0 < len(result.trials) < len(whole.trials)
    assert result.final.measured.num_requests > 0


async def test_an_interruption_before_the_baseline_has_nothing_to_report() -> None:
    with pytest.raises(InterruptedEarlyError):
        await search_ladder(Fake(interrupt_at_s=3.0))


async def test_new_rung_needs_only_a_ladder_row(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A rung that no code has heard of: it is ranked, tried and kept."""
    row = """
        [weights]
        risk = 0.02
        complexity = 0.01
        [[rung]]
        id = "eight-slots-at-once"
        title = "Eight slots at once"
        technique = "continuous-batching"
        changes = { batching = "continuous", max_num_seqs = 8 }
        needs = ["batching == 'static'"]
        honesty = "exact"
        term = "weight bytes per token"
        risk = 0
        complexity = 0
        why = "a test wants it"
        hurts_when = "never in this test"
    """
    file = tmp_path / "ladder.toml"
    file.write_text(row)
    result = await search_ladder(Fake(), rungs=ladder.parse_ladder(file.read_text()))
    assert [trial.rung for trial in result.kept] == ["eight-slots-at-once"]
    assert result.kept[0].predicted.gain > 1.5


async def test_rung_without_predicted_gain_is_skipped_with_a_reason() -> None:
    fake = Fake(believed=Physics(int8_speed=0.4))
    result = await search_ladder(fake, rungs=only("continuous-batching", "int8"))
    assert all(trial.rung != "int8" for trial in result.trials)
    left = next(left for left in result.not_tried if left.rung == "int8")
    assert "predicted" in left.reason
    assert left.predicted is not None
    assert left.predicted.gain < 0.7


@pytest.mark.slow
async def test_the_loss_of_a_rung_is_remembered_for_its_next_variant() -> None:
    fake = Fake(quirks={("max_num_seqs", n): Quirks(speed=0.5) for n in (64, 128)})
    result = await search_ladder(fake, rungs=only("continuous-batching", "batch-limit"))
    assert [trial.rung for trial in result.trials].count("batch-limit") <= 2


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["latency", "cost"])
async def test_other_objectives_are_searched_too(objective: str) -> None:
    result = await search_ladder(Fake(), objective=objective)
    assert result.kept
    assert result.total is not None
    assert result.total.low > 1


async def test_when_nothing_helps_the_baseline_stays() -> None:
    fake = Fake(quirks={("batching", "continuous"): Quirks(speed=0.1)})
    result = await search_ladder(fake, rungs=only("continuous-batching"))
    assert not result.kept
    assert result.final.settings == result.baseline.settings
    assert result.total is None


async def test_plain_progress_lists_stages_and_verdicts() -> None:
    fake, lines = Fake(), []
    await optimize(
        job(120.0),
        fake.environment(),
        only("continuous-batching"),
        clock=fake.clock,
        observer=SearchLines(lines.append),
    )
    assert any("Baseline" in line for line in lines)
    assert any(line.strip().startswith("kept:") for line in lines)


MADE_ROW = """
    [weights]
    risk = 0.02
    complexity = 0.01
    [[rung]]
    id = "made"
    title = "Made"
    technique = "gptq"
    changes = { quantization = "int8" }
    variants = [{ make = "gptq" }, { make = "awq" }]
    needs = []
    honesty = "lossy"
    term = "weight bytes"
    risk = 0
    complexity = 0
    why = "a test wants it"
    hurts_when = "never"
"""


@pytest.mark.slow
async def test_prepared_weights_are_kept_in_the_result() -> None:
    fake, made = Fake(Physics(int8_speed=1.6)), []

    def make(settings: Settings, method: str, allowed_s: float) -> Settings:
        made.append((settings.quantization, method))
        assert allowed_s > 0
        return settings_from({"model": "made-by-" + method, "quantization": "int8"})

    environment = msgspec.structs.replace(fake.environment(), make=make)
    rungs = ladder.parse_ladder(MADE_ROW)
    result = await optimize(job(), environment, rungs, clock=fake.clock)
    assert made[0] == ("int8", "gptq")
    assert settings_from(result.final.settings).model == "made-by-gptq"
    assert result.kept[0].label == "Made (gptq)"


async def test_weights_that_cannot_be_made_are_an_outcome() -> None:
    result = await search_ladder(Fake(Physics(int8_speed=1.6)), rungs=ladder.parse_ladder(MADE_ROW))
    assert {trial.verdict for trial in result.trials} == {"cannot run"}


@pytest.mark.slow
async def test_change_the_simulator_cannot_predict_is_tried_last() -> None:
    unseen = MADE_ROW.replace("made", "unseen").replace('{ quantization = "int8" }', "{ seed = 7 }")
    unseen = unseen.replace('variants = [{ make = "gptq" }, { make = "awq" }]', "")
    seen = MADE_ROW.split("[[rung]]")[1].replace(
        'variants = [{ make = "gptq" }, { make = "awq" }]', ""
    )
    both = ladder.parse_ladder(unseen + "[[rung]]" + seen)
    result = await search_ladder(Fake(Physics(int8_speed=1.04)), rungs=both)
    assert [trial.rung for trial in result.trials][:2] == ["made", "unseen"]
    assert "does not model" in result.trials[1].predicted.note


@pytest.mark.slow
async def test_ranking_ends_with_its_share_of_the_time() -> None:
    """A simulator that takes 3 s a run: without a share the ranking would eat the budget."""
    fake = Fake()
    environment = fake.environment()

    class Slow:
        learn = environment.simulator.learn

        def run(self, settings: Settings, load: Load) -> RunTrace:
            fake.clock.now_s += 3.0
            return environment.simulator.run(settings, load)

    result = await optimize(
        job(),
        msgspec.structs.replace(environment, simulator=Slow()),
        ladder.load_default_ladder(),
        clock=fake.clock,
    )
    assert fake.clock.now_s <= 270
    assert len(result.trials) >= 2


@pytest.mark.slow
async def test_one_bad_first_run_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold server, a disturbed machine: the search begins again, lower."""
    whole, rates = SimulatedDeployment.run, []

    async def first_overloaded(self, load, on_finish=None):  # type: ignore[no-untyped-def]
        rates.append(load.rate)
        hard = msgspec.structs.replace(load, rate=200 * load.rate)
        return await whole(self, load if len(rates) > 1 else hard, on_finish)

    monkeypatch.setattr(SimulatedDeployment, "run", first_overloaded)
    result = await search_ladder(Fake())
    assert rates[1] < rates[0]
    assert result.kept
