"""Optimise an engine or a server: measure, diagnose, apply, verify, keep what helps."""

from __future__ import annotations

import shlex
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ridgeline.config.improve import OptimizeOptions
from ridgeline.config.settings import Settings, with_default_performance
from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun
from ridgeline.hardware.probe import probe
from ridgeline.measure.workload import Workload, parse_workload
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.drivers.server_process import DEFAULT_PORT
from ridgeline.optimize.environment import Environment
from ridgeline.optimize.external.server_rungs import with_server_rungs
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.ladder import Ladder, load_default_ladder, parse_ladder
from ridgeline.optimize.output.config_file import final_settings, ladder_json, ridgeline_toml
from ridgeline.optimize.output.headline import headline
from ridgeline.optimize.output.server_configs import (
    DEPLOYMENT_FILES,
    STARTS,
    TunedServer,
    deployment_files,
    program_words,
    split_command,
)
from ridgeline.optimize.output.vllm_command import VllmCommand, serve_command
from ridgeline.optimize.playbook import find_playbook, playbook_checks
from ridgeline.optimize.report.page import report
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search import optimize as search
from ridgeline.optimize.search_state import StateFile
from ridgeline.optimize.server_settings import WHOLE_COMMAND, flags_of
from ridgeline.optimize.time_budget import SMALLEST_BUDGET_S
from ridgeline.plan.calibration.calibration import Calibration, load_calibration
from ridgeline.records import Slo
from ridgeline.records.progress import Message, Observer, silent
from ridgeline.report.files import check_writable, write_files
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result
from ridgeline.workflows.load.token_workload import note, workload_for
from ridgeline.workflows.models.fetch_models import fetch_models
from ridgeline.workflows.optimize.restartable_server import (
    PROBING,
    ServerRecipe,
    model_of_server,
    probe_for,
    server_recipe,
)
from ridgeline.workflows.optimize.server_driver import RestartableServer
from ridgeline.workflows.run_async import run_async

ENGINE_FILES = ("report.html", "ladder.json", "ridgeline.toml", "vllm.sh")
SERVER_FILES = ("report.html", "ladder.json", "serve.sh")
"""Files of a result, for an engine and for a server."""


class OptimizeResult(Result, frozen=True, kw_only=True):
    """The search and what it found.

    `ladder`: baseline, trials and final configuration. `files`: what is written by `save_files`, by
    name: the report, the ladder as JSON, and what deploys the final configuration.
    """

    ladder: LadderResult
    files: dict[str, str]

    @property
    def headline(self) -> str:
        """The gain in one line, with its interval."""
        return headline(self.ladder)

    @property
    def settings(self) -> Settings:
        """The final configuration."""
        return final_settings(self.ladder)

    def to_dict(self) -> dict[str, Any]:
        """Everything that was measured and decided, as in ladder.json."""
        return dict(plain(self.ladder))

    def to_html(self) -> str:
        """The report."""
        return self.files["report.html"]

    def save_files(self, folder: str | Path) -> tuple[Path, ...]:
        """Write all files, or none, and return their paths."""
        return write_files(Path(folder), self.files)


def optimize(
    settings: Settings,
    options: OptimizeOptions,
    *,
    server: RestartableServer | None = None,
    logs: Path | None = None,
    observer: Observer = silent,
) -> OptimizeResult:
    """Search for the best configuration of the engine, or of `server`, within the budget.

    `logs`: folder for the output of a server's processes and for the state to resume from (None:
    not kept). An interruption ends the search with what it found so far. Raises UserError if an
    option is wrong or the budget hopeless.
    """
    started_s = time.perf_counter()
    folder = options.resume or logs
    state = None if folder is None else StateFile(folder, resume=options.resume is not None)
    with ExitStack() as stack:
        if logs is None:
            logs = Path(stack.enter_context(TemporaryDirectory(prefix="ridgeline-logs-")))
        logs.mkdir(parents=True, exist_ok=True)
        recipe = None
        if server is not None:
            recipe = server_recipe(server, logs, partial(_report_line, observer))
            stack.enter_context(recipe.driver)
            settings = with_model_of_server(settings, options, recipe)
        job, ladder = prepare_search(settings, options, recipe)
        calibration = _calibration(options, recipe)
        workload = parse_workload(job.workload)
        if server is None:
            fetch_models(settings, observer)
            load_spec(settings.model)  # an unknown name must not cost the probe
            if job.workload != with_playbook(options).workload:
                _report_line(observer, note(settings.model, job.workload))
        else:
            load_planning_spec(settings.model)
        environment = _environment(job, workload, calibration, recipe, logs, observer)
        if recipe is not None and folder is not None:
            steps_after = msgspec.structs.replace(environment.next_steps, folder=str(folder))
            environment = msgspec.structs.replace(environment, next_steps=steps_after)
        result = run_async(
            search(
                job,
                environment,
                ladder,
                clock=time.perf_counter,
                begun_s=started_s,
                observer=observer,
                state=state,
            )
        )
    url = f"http://127.0.0.1:{DEFAULT_PORT}" if recipe is None else recipe.command.at(DEFAULT_PORT)
    steps = (*result.next_steps, *checklist_lines(options, result.provenance.model, url))
    result = msgspec.structs.replace(result, next_steps=steps)
    if recipe is None:
        return OptimizeResult(ladder=result, files=_engine_files(result))
    return OptimizeResult(ladder=result, files=_server_files(result, recipe, settings))


def _report_line(observer: Observer, line: str) -> None:
    observer(Message(text=line))


def with_model_of_server(
    settings: Settings, options: OptimizeOptions, recipe: ServerRecipe
) -> Settings:
    """The settings with the model whose sizes and tokenizer a search of a server uses."""
    model = model_of_server(recipe.command.command, options.model, settings.model)
    return msgspec.structs.replace(settings, model=model)


def prepare_search(
    settings: Settings, options: OptimizeOptions, recipe: ServerRecipe | None
) -> tuple[OptimizeJob, Ladder]:
    """The job and the ladder of the engine, or of a server. Raises BadInput."""
    job, ladder = job_of(settings, options), ladder_of(options.ladder, options.playbook)
    if recipe is None:
        workload = workload_for(settings.model, job.workload)
        return msgspec.structs.replace(job, workload=workload), ladder
    job = msgspec.structs.replace(
        job,
        settings=recipe.start_settings(settings),
        defaults=recipe.default_settings(settings),
        price=msgspec.structs.replace(job.price, speed=recipe.speed),
    )
    if options.ladder is None:
        ladder = with_server_rungs(ladder, recipe.flags, recipe.num_devices)
    rungs = (*ladder.rungs, *recipe.candidate_rungs)
    return job, msgspec.structs.replace(ladder, rungs=rungs)


def check_search(
    settings: Settings,
    options: OptimizeOptions,
    server: RestartableServer | None = None,
    config: Path | None = None,
) -> None:
    """Check everything that needs no measurement. Raises BadInput.

    `config`: the file that the settings were read from, which must not be overwritten.
    """
    job = job_of(settings, options)
    if job.budget_s < SMALLEST_BUDGET_S:
        raise BadInput(
            "the budget is too small for a baseline, one trial and the closing measurement",
            value=f"{job.budget_s:.0f} s",
            limit=f"{SMALLEST_BUDGET_S:.0f} s even for the fastest model",
            fix="--budget 5m",
        )
    ladder_of(options.ladder, options.playbook)
    recipe = None if server is None else server_recipe(server, options.output)
    _calibration(options, recipe)
    names = ENGINE_FILES if server is None else (*SERVER_FILES, *DEPLOYMENT_FILES)
    written = {(options.output / name).resolve() for name in names}
    for path in (config, options.ladder, options.calibration):
        if path is not None and path.resolve() in written:
            raise BadInput(
                "the results would overwrite a file that they are made from",
                value=str(path),
                fix="give another --output",
            )
    check_writable(options.output)


def job_of(settings: Settings, options: OptimizeOptions) -> OptimizeJob:
    """The options, checked before anything is loaded. Raises BadInput."""
    options = with_playbook(options)
    dollars = options.price_per_hour
    if dollars is not None and not dollars > 0:
        raise BadInput("--price-per-hour must be positive", value=dollars, limit="> 0 $/hour")
    price = MachinePrice()
    if dollars is not None:
        price = MachinePrice(dollars_per_hour=dollars, notional=False)
    return OptimizeJob(
        settings=settings,
        defaults=with_default_performance(settings),
        workload=options.workload,
        slo=Slo.parse(options.slo),
        objective=options.objective,
        budget_s=options.budget,
        price=price,
        seed=settings.seed,
        shared_machine=options.shared_machine,
    )


def with_playbook(options: OptimizeOptions) -> OptimizeOptions:
    """The options with the playbook's in place of those that were left at their defaults."""
    if options.playbook is None:
        return options
    book, usual = find_playbook(options.playbook), OptimizeOptions()
    return msgspec.structs.replace(
        options,
        workload=book.workload if options.workload == usual.workload else options.workload,
        slo=book.slo if options.slo == usual.slo else options.slo,
        objective=book.objective if options.objective == usual.objective else options.objective,
    )


def checklist_lines(options: OptimizeOptions, model: str, url: str) -> tuple[str, ...]:
    """The commands of the playbook's checklist; none without a playbook."""
    if options.playbook is None:
        return ()
    options = with_playbook(options)
    values = {
        "model": model,
        "url": url,
        "other_url": url.replace(":8000", ":8001"),
        "workload": options.workload,
        "slo": options.slo,
        "out": str(options.output),
    }
    return tuple(check.line(values) for check in playbook_checks())


def ladder_of(path: Path | None, playbook: str | None = None) -> Ladder:
    """The rungs of a file, or the built-in ones, in the order of a playbook."""
    first = () if playbook is None else find_playbook(playbook).first
    if path is None:
        return msgspec.structs.replace(load_default_ladder(), first=first)
    try:
        ladder = parse_ladder(path.read_text(encoding="utf-8"))
        return msgspec.structs.replace(ladder, first=first)
    except (OSError, *DECODE_ERRORS) as error:
        raise BadInput("cannot read the ladder", value=str(path), fix=str(error)) from None


def _calibration(options: OptimizeOptions, recipe: ServerRecipe | None) -> Calibration | None:
    if options.calibration is None:
        return None
    if recipe is not None:
        raise CannotRun(
            "a calibration has the step times of Ridgeline's own engine, not of a server",
            value=str(options.calibration),
            fix="remove --calibration, or --url",
        )
    return load_calibration(options.calibration)


def _environment(
    job: OptimizeJob,
    workload: Workload,
    calibration: Calibration | None,
    recipe: ServerRecipe | None,
    logs: Path,
    observer: Observer,
) -> Environment:
    """Imports torch, after the probe has had the cores for itself."""
    if recipe is not None:
        server_machine = probe_for(recipe, observer, probe)
        has_gpu = server_machine is not None and bool(server_machine.gpus)
        if assumed := recipe.assumed_device(has_gpu=has_gpu):
            observer(Message(text=assumed))
        from ridgeline.workflows.optimize.server_environment import server_environment

        return server_environment(job.settings, workload, server_machine, recipe, logs)
    observer(Message(text=PROBING))
    machine = probe()
    from ridgeline.workflows.optimize.calibrated_step_times import CalibratedStepTimes
    from ridgeline.workflows.optimize.engine_environment import engine_environment

    step_times = None if calibration is None else CalibratedStepTimes(calibration)
    return engine_environment(job.settings, workload, machine, step_times)


def _engine_files(result: LadderResult) -> dict[str, str]:
    config = ridgeline_toml(result)
    vllm = serve_command(final_settings(result), result.provenance.model)
    notes = "".join(f"# {note}\n" for note in vllm.notes)
    page = report(result, {"ridgeline.toml": VllmCommand(config), "The same for vLLM": vllm})
    script = f"#!/bin/sh\n{notes}{vllm.text}\n"
    contents = (page, ladder_json(result), config, script)
    return dict(zip(ENGINE_FILES, contents, strict=True))


def _server_files(result: LadderResult, recipe: ServerRecipe, settings: Settings) -> dict[str, str]:
    script = recipe.serve_script(final_settings(result), recipe.start_settings(settings))
    page = report(result, {"serve.sh": VllmCommand(script)})
    files = dict(zip(SERVER_FILES, (page, ladder_json(result), script), strict=True))
    if WHOLE_COMMAND in dict(flags_of(final_settings(result))):
        return files  # a layout of several processes, which no single container is
    words = program_words(shlex.split(script.splitlines()[-1].removeprefix("exec ")), recipe.flags)
    if recipe.flags.name in STARTS:
        named, _ = split_command(words, recipe.flags.name)
        server = TunedServer(
            kind=recipe.flags.name,
            words=words,
            model=named or settings.model,
            settings=final_settings(result),
        )
        files |= deployment_files(server)
    return files
