"""Advice for a server that may not be changed: measured, diagnosed, and predicted.

The server is measured as it runs, at loads up to the one that it sustains within the SLO. The
simulator learns its step times from what clients saw and predicts every rung of the ladder. Nothing
is applied: each change comes with the flags, the commands that would apply it where the server
runs, and the commands that verify it.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ridgeline.config.improve import OptimizeOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import CannotRun
from ridgeline.hardware.probe import probe
from ridgeline.measure.workload import parse_workload
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.optimize.drivers.base import Driver
from ridgeline.optimize.drivers.fixed_server import FixedServer
from ridgeline.optimize.drivers.server_process import ServerCommand
from ridgeline.optimize.drivers.shell import shell_line
from ridgeline.optimize.external.server_flags import server_flags_for
from ridgeline.optimize.ranking.predictor import Forecast
from ridgeline.optimize.ranking.rung_ranking import RankedRungs
from ridgeline.optimize.result import ConfigurationSummary, GainPrediction, NotTried
from ridgeline.optimize.search import rank_rungs
from ridgeline.records.progress import Observer, silent
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result
from ridgeline.workflows.load.twin_servers import TwinMark, read_twin
from ridgeline.workflows.optimize.optimize import prepare_search, with_model_of_server
from ridgeline.workflows.optimize.restartable_server import ServerRecipe, probe_for
from ridgeline.workflows.optimize.server_driver import RestartableServer, read_server
from ridgeline.workflows.run_async import run_async

VERIFY_RUNS = 8


class AdvisedChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `predicted` is None where the simulator does not model it (`note` says why).

    `command`: the whole command line with it. `apply`: commands for the place where the server
    runs, if that is known. `dollars`: per million output tokens, if the prediction holds.
    """

    label: str
    lossy: bool
    predicted: GainPrediction | None
    note: str
    flags: tuple[str, ...]
    command: str
    apply: tuple[str, ...]
    why: str
    hurts_when: str
    dollars: float | None


class ServerAdvice(Result, frozen=True, kw_only=True):
    """The server as measured, and changes by predicted gain.

    `twin`: what the server says of itself if it is a twin, else "".
    `assumed`: what was taken for granted about the server's flags. `rate`: the load, in requests/s,
    at which the verification compares. `unranked`: why no gain is predicted, if the simulated
    server is too far from the measured one. `verify`: commands to run around a change.
    """

    server_kind: str
    twin: str
    command: str
    assumed: str
    baseline: ConfigurationSummary
    rate: float
    unranked: str
    changes: tuple[AdvisedChange, ...]
    left_out: tuple[NotTried, ...]
    verify: tuple[str, ...]
    verify_quality: str

    def to_dict(self) -> dict[str, Any]:
        return dict(plain(self))


def advise(
    settings: Settings,
    options: OptimizeOptions,
    server: RestartableServer,
    *,
    observer: Observer = silent,
) -> ServerAdvice:
    """Measure a running server and rank changes. Nothing is applied.

    Raises BadInput if the server's flags are unknown, CannotRun if it cannot be measured.
    """
    from ridgeline.workflows.optimize.server_environment import server_environment

    started_s = time.perf_counter()
    twin = read_twin(server.url, server.api_key)
    with TemporaryDirectory(prefix="ridgeline-advise-") as folder:
        command, place = read_server(server, Path(folder), lambda line: None)
        recipe = _recipe(server, command, twin)
        settings = with_model_of_server(settings, options, recipe)
        job, ladder = prepare_search(settings, options, recipe)
        load_planning_spec(settings.model)
        workload = parse_workload(job.workload)
        machine = probe_for(recipe, observer, probe)
        has_gpu = machine is not None and bool(machine.gpus)
        device = recipe.assumed_device(has_gpu=has_gpu)
        environment = server_environment(job.settings, workload, machine, recipe, Path(folder))
        environment = msgspec.structs.replace(
            environment, start_description="measuring the server as it runs"
        )
        ranked = run_async(
            rank_rungs(
                job,
                environment,
                ladder,
                clock=time.perf_counter,
                begun_s=started_s,
                observer=observer,
            )
        )
        start = recipe.start_settings(settings)
        changes = tuple(
            _change(forecast, ranked, recipe, start, place) for forecast in ranked.forecasts
        )
    return ServerAdvice(
        server_kind=recipe.flags.name,
        twin=str(twin or ""),
        command=command.command.replace("{flags}", "").strip(),
        assumed="; ".join(filter(None, (_assumed(server, recipe), device))),
        baseline=ranked.baseline,
        rate=ranked.rate,
        unranked=ranked.misfit,
        changes=changes,
        left_out=ranked.left_out,
        verify=_verify_commands(server, options, ranked.rate),
        verify_quality=f"ridgeline eval --url {server.url} --url NEW_URL",
    )


def _recipe(
    server: RestartableServer, command: ServerCommand, twin: TwinMark | None
) -> ServerRecipe:
    """The server as it runs. A twin's device is known from what it says of itself."""
    return ServerRecipe(
        command=command,
        flags=server_flags_for(command.command, server.server),
        driver=FixedServer(server.url),
        served_model_name=server.served_model_name,
        num_devices=server.num_devices,
        accelerator=server.accelerator or (None if twin is None else twin.device),
        running_speed=1.0 if twin is None else twin.speed,
        api_key=server.api_key,
        candidate_models=server.candidate_models,
        candidate_drafters=server.candidate_drafters,
    )


def _change(
    forecast: Forecast,
    ranked: RankedRungs,
    recipe: ServerRecipe,
    start: Settings,
    place: Driver | None,
) -> AdvisedChange:
    candidate, predicted = forecast.candidate, forecast.predicted
    try:
        flags = tuple(recipe.flags.words(candidate.settings, start))
    except CannotRun as error:
        flags, note = (), str(error)
    else:
        note = predicted.note if predicted is not None else forecast.problem
    known = predicted if predicted is not None and not predicted.note else None
    cost = ranked.baseline.cost.output_dollars_per_mtok
    return AdvisedChange(
        label=candidate.label,
        lossy=candidate.rung.honesty == "lossy",
        predicted=known,
        note=note,
        flags=flags,
        command=shlex.join(recipe.command.words(flags, None)),
        apply=() if place is None else tuple(map(shell_line, place.plan(flags))),
        why=candidate.rung.why,
        hurts_when=candidate.rung.hurts_when,
        dollars=None if known is None or cost is None else cost / known.gain,
    )


def _assumed(server: RestartableServer, recipe: ServerRecipe) -> str:
    """What is not known about the server's flags; "" if its command line was read or given."""
    if server.server_cmd or server.kubernetes or server.docker or server.ray:
        return ""
    if recipe.flags.reads:
        read = ", ".join(sorted(recipe.flags.reads))
        return f"the server reports {read}; its other flags are taken to be the defaults"
    return "the server's flags are taken to be its defaults; --server-cmd gives them"


def _verify_commands(
    server: RestartableServer, options: OptimizeOptions, rate: float
) -> tuple[str, ...]:
    bench = (
        f"ridgeline bench --url {server.url} --workload {options.workload} "
        f'--slo "{options.slo}" --request-rate {rate:.3g} --num-runs {VERIFY_RUNS}'
    )
    return (
        "mkdir -p before after",
        f"{bench} --log before/run.jsonl",
        "# apply the change, then",
        f"{bench} --log after/run.jsonl",
        "ridgeline compare before after",
    )
