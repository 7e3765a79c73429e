"""A result never contradicts its measurements: baseline, file, headline."""

from __future__ import annotations

import shlex
import tomllib

import msgspec
import pytest

from ridgeline.config.settings import Settings, settings_from
from ridgeline.optimize.output.config_file import ridgeline_toml
from ridgeline.optimize.output.headline import headline
from ridgeline.optimize.report.page import report
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.result_builder import _finding
from ridgeline.optimize.search import optimize
from ridgeline.roofline import Peaks, Phase, RooflinePoint
from ridgeline.stats import Interval
from tests.optimize.simulated_servers import NAIVE, Fake, Physics, Quirks, SimulatedDeployment
from tests.optimize.test_search import job, only, search_ladder, trial_of

MINE = {"model": "demo", "max_num_seqs": 4, "enable_prefix_caching": False}


async def search_from(
    fake: Fake, settings: dict[str, object], *rungs: str, budget_s: float = 270.0
) -> LadderResult:
    """A search from these settings, with the defaults as a rival."""
    mine = msgspec.structs.replace(
        job(budget_s), settings=settings_from(settings), defaults=Settings(model="demo")
    )
    return await optimize(mine, fake.environment(), only(*rungs), clock=fake.clock)


async def test_the_given_settings_are_the_baseline() -> None:
    fake = Fake()
    result = await search_from(fake, MINE, "batch-limit")
    assert fake.opened[0] == settings_from(MINE)
    assert result.baseline.settings == {
        "model": "demo", "max_num_seqs": 4, "enable_prefix_caching": False
    }  # fmt: skip


async def test_defaults_are_tried_first_and_kept_where_they_are_better() -> None:
    result = await search_from(Fake(), {"model": "demo", **NAIVE}, "batch-limit")
    assert result.trials[0].rung == "defaults"
    assert result.trials[0].verdict == "kept"
    assert "batching" not in ridgeline_toml(result).partition("[provenance]")[0]


async def test_defaults_that_are_slower_are_not_kept() -> None:
    fake = Fake(quirks={("max_num_seqs", None): Quirks(speed=0.5)})
    result = await search_from(fake, MINE, "batch-limit")
    assert trial_of(result, "defaults").verdict in ("regressed", "unchanged")
    assert settings_from(result.final.settings).max_num_seqs is not None


async def test_defaults_without_time_are_listed_as_not_tried() -> None:
    result = await search_from(Fake(), MINE, "batch-limit", budget_s=44.0)
    assert result.ended == "budget spent" and not result.trials
    assert result.not_tried[0].rung == "defaults"
    assert headline(result).startswith("No rung was tried: a trial takes")
    assert "and the closing measurement" in headline(result)
    assert not any("settings found" in step for step in result.next_steps)
    same_slo = shlex.quote(result.provenance.slo)
    assert all(f"--slo {same_slo}" in step for step in result.next_steps)


@pytest.fixture
def slower_when_reopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept configuration collapses in the closing measurement."""
    whole = SimulatedDeployment.run

    async def run(self, load, on_finish=None):  # type: ignore[no-untyped-def]
        closing = self._fake.opened.count(self._fake.opened[0]) > 1
        changed = self._settings.batching == "continuous"
        hard = msgspec.structs.replace(load, rate=50 * load.rate)
        return await whole(self, hard if closing and changed else load, on_finish)

    monkeypatch.setattr(SimulatedDeployment, "run", run)


@pytest.mark.usefixtures("slower_when_reopened")
async def test_a_gain_that_the_closing_measurement_refutes_is_reverted() -> None:
    result = await search_ladder(Fake(), rungs=only("continuous-batching"))
    assert result.final.settings == result.baseline.settings
    assert [trial.verdict for trial in result.trials] == ["reverted"] and not result.kept
    assert result.rejected is not None
    assert result.rejected.settings != result.baseline.settings
    assert headline(result).startswith("Nothing beat the baseline: in the closing measurement")
    document = tomllib.loads(ridgeline_toml(result))
    assert document["engine"]["batching"] == "static"
    assert headline(result) in ridgeline_toml(result)
    assert headline(result) in report(result, {}).replace("&#39;", "'")


async def test_headline_says_first_that_the_slo_was_not_met() -> None:
    result = await search_ladder(Fake(), rungs=only("continuous-batching"))
    assert headline(result).startswith(f"{result.total.mid:.1f}×")  # type: ignore[union-attr]
    broken = msgspec.structs.replace(result, slo_holds=False)
    assert headline(broken).startswith("The SLO was not met")
    assert "slo_holds = false" in ridgeline_toml(broken)


async def test_headline_doubts_a_gain_whose_interval_includes_none() -> None:
    result = await search_ladder(Fake(), rungs=only("continuous-batching"))
    doubtful = msgspec.structs.replace(result, total=Interval(low=0.9, mid=1.1, high=1.3))
    assert headline(doubtful).endswith("not certain to be a gain")


async def test_file_holds_the_baseline_if_nothing_was_kept() -> None:
    fake = Fake(Physics(), quirks={("max_num_seqs", None): Quirks(speed=0.5)})
    result = await search_from(fake, MINE)
    document = tomllib.loads(ridgeline_toml(result))
    assert document["engine"] == MINE


@pytest.mark.parametrize(
    ("seconds", "bound"), [((0.1, 9.0), "bandwidth"), ((9.0, 0.1), "compute"), ((), "unknown")]
)
def test_bound_of_a_server_that_reports_no_steps_is_that_of_its_longest_phase(
    seconds: tuple[float, ...], bound: str
) -> None:
    peaks = Peaks(flops_s=100e12, bytes_s=1e12)
    phases: tuple[tuple[Phase, float], ...] = (("prefill", 500.0), ("decode", 2.0))
    points = [
        RooflinePoint(
            name="b",
            phase=phase,
            intensity=intensity,
            achieved_flops_s=0.8 * peaks.attainable_flops_s(intensity),
            achieved_bytes_s=1.0,
            roof_flops_s=peaks.attainable_flops_s(intensity),
            time_s=time_s,
            num_steps=1,
        )
        for (phase, intensity), time_s in zip(phases, seconds, strict=False)
    ]
    found = _finding({"mbu_share": 0.0}, points, peaks)
    assert found.bound == bound
    assert found.sentence.startswith("As clients saw" if seconds else "The bound is unknown")
