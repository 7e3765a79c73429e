"""Watch the traffic of a tuned server: has it drifted, and which change would now gain?

The live shape (lengths, rate, prefix sharing) comes from the server's metrics; no prompt is read.
It is compared with the shape that `optimize` recorded, and the rate with the load that it measured.
If either has drifted, the rungs are predicted again on the simulator, with the step times that the
search measured and synthetic requests of the live shape. Nothing is applied, and no load is sent.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ridgeline.config.load import WatchOptions
from ridgeline.config.settings import Settings
from ridgeline.diagnose.drift import DriftCheck, drift, load_check
from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun, UserError
from ridgeline.hardware.machine import Machine
from ridgeline.hardware.probe import probe
from ridgeline.measure.monitors.traffic import TrafficReading, TrafficSample
from ridgeline.measure.workload import parse_workload
from ridgeline.measure.workload.synthetic import Synthetic
from ridgeline.optimize.drivers.fixed_server import FixedServer
from ridgeline.optimize.drivers.server_process import ServerCommand
from ridgeline.optimize.environment import Environment, Load
from ridgeline.optimize.external.inferred_steps import infer_steps
from ridgeline.optimize.external.server_flags import server_flags_for
from ridgeline.optimize.external.server_rungs import with_server_rungs
from ridgeline.optimize.ladder import Ladder, candidates_of, load_default_ladder, unmet_need
from ridgeline.optimize.ranking.predictor import Forecast, Predictor
from ridgeline.optimize.ranking.rung_ranking import (
    RUNS_WITHOUT_TRIALS,
    TOKENS_WITHOUT_TRIALS,
    WorkLimit,
)
from ridgeline.optimize.result import GainPrediction, LadderResult, Provenance
from ridgeline.optimize.search_state import STATE_FILE, SavedSearch
from ridgeline.records import Slo
from ridgeline.records.progress import Observer, silent, stage
from ridgeline.records.traffic import TrafficProfile
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result
from ridgeline.workflows.load.live_traffic import read_traffic, sample_live_traffic
from ridgeline.workflows.load.twin_servers import read_twin
from ridgeline.workflows.optimize.restartable_server import ServerRecipe, probe_for

WORTH_TELLING = 1.05  # predicted gain from which a change is named
MAX_CHANGES = 5
WINDOW_S, REQUESTS_PER_WINDOW, GRACE_S = 8.0, 20, 8.0  # of a simulated run


class WatchedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is predicted to gain on the live traffic."""

    label: str
    lossy: bool
    predicted: GainPrediction
    flags: tuple[str, ...]
    why: str
    hurts_when: str


class WatchReport(Result, frozen=True, kw_only=True):
    """The live traffic against the tuned one, and what would gain now.

    `twin`: what the server says of itself if it is a twin, else "". `capacity`: requests/s within
    the SLO that the present configuration is predicted to serve of this traffic. `unranked`: why no
    change was predicted, if none was. `prove`: the command that measures the changes.
    """

    url: str
    twin: str
    tuned: TrafficProfile
    seen: TrafficProfile
    duration_s: float
    checks: tuple[DriftCheck, ...]
    missing: tuple[str, ...]
    workload: str
    slo: str
    capacity: float | None
    changes: tuple[WatchedChange, ...]
    unranked: str
    not_ranked: tuple[str, ...]
    prove: str

    @property
    def drifted(self) -> bool:
        """Whether any part of the shape is another than the one that was tuned for."""
        return any(check.drifted for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {**dict(plain(self)), "drifted": self.drifted}


class TunedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What a search left: its result, its state, and the command line that it found."""

    ladder: LadderResult
    command: str
    saved: SavedSearch | None


def watch(
    options: WatchOptions,
    *,
    observer: Observer = silent,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> WatchReport:
    """Sample the traffic, compare it with the tuned one, and rank changes if it has drifted.

    Raises BadInput for a folder without a search of a server, CannotRun if there is no traffic to
    read.
    """
    tuned = read_tuned(options.tuned)
    before = tuned.ladder.traffic
    if before is None:
        raise BadInput(
            "this result does not have the shape of its workload",
            value=str(options.tuned),
            fix="run `ridgeline optimize` again: results before 0.3 do not record it",
        )
    with stage(observer, f"reading {options.url}/metrics for {options.duration:.0f} s"):
        sample = sample_traffic(options, clock, sleep)
    checks = drift(before, sample)
    sustained, rate = tuned.ladder.final.measured.goodput_req_s, sample.profile.rate
    if rate is not None and sustained > 0:
        checks += (load_check(sustained, rate),)
    workload = options.workload or workload_of(before, sample.profile)
    slo = tuned.ladder.provenance.slo
    ranked = _RankedChanges()
    unranked = "the traffic matches what the server was tuned for"
    if any(check.drifted for check in checks):
        with stage(observer, "predicting every change on this traffic"):
            try:
                ranked = _rank(tuned, options, workload, observer)
                unranked = "" if ranked.changes else "no change is predicted to gain"
            except UserError as error:
                unranked = str(error)
    return WatchReport(
        url=options.url,
        twin=str(read_twin(options.url, options.api_key) or ""),
        tuned=before,
        seen=sample.profile,
        duration_s=sample.duration_s,
        checks=checks,
        missing=sample.missing,
        workload=workload,
        slo=slo,
        capacity=ranked.capacity,
        changes=ranked.changes,
        unranked=unranked,
        not_ranked=ranked.not_ranked,
        prove=prove_command(tuned, workload),
    )


def read_tuned(folder: Path) -> TunedFolder:
    """The result of a search of a server. Raises BadInput."""
    try:
        ladder = msgspec.json.decode((folder / "ladder.json").read_bytes(), type=LadderResult)
        script = (folder / "serve.sh").read_text(encoding="utf-8").splitlines()[-1]
        state = folder / STATE_FILE
        saved = None
        if state.is_file():
            saved = msgspec.json.decode(state.read_bytes(), type=SavedSearch)
    except (OSError, IndexError, *DECODE_ERRORS) as error:
        raise BadInput(
            "the folder has no result of `ridgeline optimize --url`",
            value=str(folder),
            fix=str(error),
        ) from None
    return TunedFolder(ladder=ladder, command=script.removeprefix("exec "), saved=saved)


def sample_traffic(
    options: WatchOptions, clock: Callable[[], float], sleep: Callable[[float], None]
) -> TrafficSample:
    """Read the metrics at every interval. Raises CannotRun without a request in the meantime."""
    periods = options.duration, options.interval
    return sample_live_traffic(lambda: _read(options, clock), options.url, periods, clock, sleep)


def _read(options: WatchOptions, clock: Callable[[], float]) -> TrafficReading:
    return read_traffic(options.url, options.api_key, clock())


def workload_of(tuned: TrafficProfile, seen: TrafficProfile) -> str:
    """The live shape as a synthetic workload; what the server does not report stays as tuned."""
    prompt, output = seen.prompt or tuned.prompt, seen.output or tuned.output
    assert prompt is not None and output is not None, "a recorded profile has both"
    shared = seen.shared_share if seen.shared_share is not None else tuned.shared_share
    num_prompt = max(1, round(prompt.mean))
    cv = round(max(prompt.cv, output.cv), 1)
    prefix = round((shared or 0.0) * num_prompt / 16) * 16
    return Synthetic(
        input=num_prompt,
        output=max(1, round(output.mean)),
        cv=cv,
        prefix=min(prefix, num_prompt - 1),
    ).name


def prove_command(tuned: TunedFolder, workload: str) -> str:
    """The search that measures the changes on the live shape, on a separate server."""
    words = shlex.split(tuned.command)
    url = "http://127.0.0.1:8000"
    if "--port" in words[:-1]:
        place = words.index("--port") + 1
        words[place] = "{port}"
        url = "http://127.0.0.1:{port}"
    provenance = tuned.ladder.provenance
    command = ["ridgeline", "optimize", provenance.model, "--url", url]
    command += ["--restart-cmd", f"{shlex.join(words)} {{flags}}".replace("'{port}'", "{port}")]
    command += ["--workload", workload, "--slo", provenance.slo]
    return shlex.join([*command, "--budget", f"{max(5, round(provenance.budget_s / 60))}m"])


# ---- ranking -----------------------------------------------------------------------------------


class _RankedChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted goodput of the present configuration, the changes that beat it, and those that
    were not reached."""

    capacity: float | None = None
    changes: tuple[WatchedChange, ...] = ()
    not_ranked: tuple[str, ...] = ()


def _rank(
    tuned: TunedFolder, options: WatchOptions, workload: str, observer: Observer
) -> _RankedChanges:
    """Predict the present configuration and every rung on this workload."""
    if tuned.saved is None:
        raise CannotRun(
            "the search's measured steps are not in the folder, so nothing is predicted",
            value=str(options.tuned / STATE_FILE),
        )
    provenance = tuned.ladder.provenance
    recipe = _recipe(tuned, options)
    start = recipe.start_settings(Settings(model=provenance.model))
    with TemporaryDirectory(prefix="ridgeline-watch-") as folder:
        machine = probe_for(recipe, observer, probe)
        environment, before = (
            _environment(start, text, machine, recipe, Path(folder))
            for text in (workload, _tuned_workload(tuned))
        )
    for each in (environment, before):
        _learn(each, tuned, start)
    ladder = with_server_rungs(load_default_ladder(), recipe.flags, options.gpus)
    _refuse_misfit(_predictor(before, provenance, ladder), tuned, start)
    predictor = _predictor(environment, provenance, ladder)
    predictor.limit_requests(tuned.saved.incumbent.runs)
    rate = max(1e-3, tuned.ladder.final.measured.goodput_req_s)
    capacity = predictor.score(start, rate)
    forecasts, not_ranked = _forecasts(ladder, environment, predictor, start, rate)
    changes = [_change(forecast, recipe, start) for forecast in forecasts]
    return _RankedChanges(
        capacity=capacity if isinstance(capacity, float) else None,
        changes=tuple(changes[:MAX_CHANGES]),
        not_ranked=tuple(not_ranked),
    )


def _environment(
    start: Settings, workload: str, machine: Machine | None, recipe: ServerRecipe, folder: Path
) -> Environment:
    from ridgeline.workflows.optimize.server_environment import server_environment

    return server_environment(start, parse_workload(workload), machine, recipe, folder)


def _tuned_workload(tuned: TunedFolder) -> str:
    assert tuned.ladder.traffic is not None
    return workload_of(tuned.ladder.traffic, tuned.ladder.traffic)


def _predictor(environment: Environment, provenance: Provenance, ladder: Ladder) -> Predictor:
    return Predictor(
        environment.simulator,
        Slo.parse(provenance.slo),
        provenance.objective,  # type: ignore[arg-type]  # written by a search
        ladder.weights,
        lambda rate: _load(rate, provenance.seed),
    )


def _refuse_misfit(predictor: Predictor, tuned: TunedFolder, start: Settings) -> None:
    """Raises CannotRun if the simulator is far from what the search measured on its workload."""
    if tuned.saved is None or tuned.ladder.provenance.objective != "goodput":
        return
    predictor.limit_requests(tuned.saved.incumbent.runs)
    measured = tuned.ladder.final.measured.goodput_req_s
    if misfit := predictor.misfit(start, max(1e-3, measured), measured):
        raise CannotRun(f"no gain is predicted: on the tuned workload {misfit}")


def _recipe(tuned: TunedFolder, options: WatchOptions) -> ServerRecipe:
    command = ServerCommand(url=options.url, command=f"{tuned.command} {{flags}}")
    return ServerRecipe(
        command=command,
        flags=server_flags_for(tuned.command),
        driver=FixedServer(options.url),
        num_devices=options.gpus,
        accelerator=options.accelerator,
        api_key=options.api_key,
    )


def _learn(environment: Environment, tuned: TunedFolder, start: Settings) -> None:
    """Step times of the tuned configuration, as its search measured them."""
    assert tuned.saved is not None and tuned.ladder.traffic is not None
    shared = tuned.ladder.traffic.shared_share or 0.0
    for judged in tuned.saved.incumbent.runs:
        environment.simulator.learn(start, infer_steps(judged.trace, start, shared_share=shared))


def _load(rate: float, seed: int) -> Load:
    window_s = max(WINDOW_S, REQUESTS_PER_WINDOW / rate)
    return Load(rate=rate, seed=seed, window_s=window_s, grace_s=GRACE_S)


def _forecasts(
    ladder: Ladder, environment: Environment, predictor: Predictor, start: Settings, rate: float
) -> tuple[list[Forecast], list[str]]:
    """The best variant of every rung that is predicted to gain, largest first, and the titles of
    rungs that were not reached within the limit of simulated work."""
    facts = {**environment.facts, **msgspec.structs.asdict(start)}
    limit = WorkLimit(predictor, RUNS_WITHOUT_TRIALS, TOKENS_WITHOUT_TRIALS)
    best, not_ranked = [], []
    for rung in ladder.rungs:
        if unmet_need(rung, facts) is not None:
            continue
        if limit.why_over:
            not_ranked.append(rung.title)
            continue
        known = [
            forecast
            for candidate in candidates_of(rung, start, {})
            if (forecast := predictor.forecast(start, candidate, rate)).predicted is not None
            and not forecast.predicted.note
        ]
        if known:
            best.append(max(known, key=lambda forecast: forecast.predicted_gain))
    gaining = [forecast for forecast in best if forecast.predicted_gain > WORTH_TELLING]
    return sorted(gaining, key=lambda forecast: -forecast.predicted_gain), not_ranked


def _change(forecast: Forecast, recipe: ServerRecipe, start: Settings) -> WatchedChange:
    candidate = forecast.candidate
    assert forecast.predicted is not None
    return WatchedChange(
        label=candidate.label,
        lossy=candidate.rung.honesty == "lossy",
        predicted=forecast.predicted,
        flags=tuple(recipe.flags.words(candidate.settings, start)),
        why=candidate.rung.why,
        hurts_when=candidate.rung.hurts_when,
    )
