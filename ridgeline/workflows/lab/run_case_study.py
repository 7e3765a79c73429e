"""Run the case study: eager PyTorch, torch.compile, kernels, INT8, INT4, speculation, in turn.

Every stage decodes the same prompts greedily. Rounds are interleaved: each measures every stage
once, so that a change of the machine meets all of them. The first round measures each stage as soon
as it is open, so that an interrupted study has figures of those that it reached. A stage that
cannot run here is kept with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import torch

from ridgeline.config.load import LabOptions
from ridgeline.config.settings import Settings, Speculative
from ridgeline.config.shared import DEFAULT_MODEL
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware import system
from ridgeline.hardware.ceilings import MeasuredCeilings, ceilings_of
from ridgeline.hub.download import ensure_downloaded
from ridgeline.measure.monitors.machine_load import LoadMeter
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec
from ridgeline.records.progress import Observer, StageAdvanced, silent, stage
from ridgeline.workflows.device_check import check_device
from ridgeline.workflows.lab.case_study import CaseStudy
from ridgeline.workflows.lab.stage_bench import StageBench
from ridgeline.workflows.lab.study_stages import STAGE_NAMES, StudyStage, study_stages
from ridgeline.workflows.lab.study_text import study_work

DRAFTS = Speculative(method="ngram")


def run_case_study(options: LabOptions, observer: Observer = silent) -> CaseStudy:
    """Measure every stage of the study on one device.

    Raises BadInput for an unknown stage, for a device that is not here, and for prompts that the
    model cannot hold; DownloadFailed for a model that cannot be fetched.
    """
    stages, settings = chosen_stages(options), study_settings(options)
    check_device(settings.device)
    ensure_downloaded(settings.model)
    check_context(options, load_spec(settings.model))
    resolved = resolve(settings)
    work, text = study_work(options, settings.model, resolved.spec.vocab_size)
    bench, meter = StageBench(settings, resolved.device, work), LoadMeter()
    with stage(observer, "bandwidth of the device"):
        before = ceilings_of(resolved.device, resolved.num_threads)
    interrupted = False
    try:
        measure_stages(bench, stages, options.rounds, observer)
    except KeyboardInterrupt:
        interrupted = True
        bench.leave_out_rest(stages)
    finally:
        bench.close()
    ceilings = before if interrupted else measure_again(before, resolved, observer)
    results = bench.results(ceilings.bandwidth)
    if interrupted and not any(one.rounds for one in results):
        raise KeyboardInterrupt
    return CaseStudy(
        model=settings.model,
        device=resolved.device,
        machine=machine_name(resolved),
        torch=str(torch.__version__),
        num_seqs=len(work.prompts),
        input_len=work.input_len,
        output_len=work.output_len,
        num_rounds=options.rounds,
        kept_open=bench.keeps_open,
        load=meter.read(),
        date=datetime.now(UTC).date().isoformat(),
        command=command_of(options),
        stages=results,
        text=text,
        interrupted=interrupted,
    )


def measure_stages(
    bench: StageBench, stages: Sequence[StudyStage], num_rounds: int, observer: Observer
) -> None:
    """Open every stage and measure it once, then all of them in the other rounds."""
    bench.plan_memory(stages)
    for one in stages:
        with stage(observer, f"stage {one.name}", detail=one.title):
            bench.open(one)
            bench.measure(one.name)
    name = "rounds"
    with stage(observer, name):
        for number in range(1, num_rounds):
            bench.run_round()
            observer(StageAdvanced(stage=name, completed=number + 1, total=float(num_rounds)))


def measure_again(
    before: MeasuredCeilings, resolved: ResolvedSettings, observer: Observer
) -> MeasuredCeilings:
    """The better of `before` and a second measurement.

    `before` alone if that is interrupted or fails: the stages have their figures by then.
    """
    again = stage(observer, "bandwidth of the device, again")
    with contextlib.suppress(KeyboardInterrupt, CannotRun), again:
        return before.best_of(ceilings_of(resolved.device, resolved.num_threads))
    return before


def chosen_stages(options: LabOptions) -> tuple[StudyStage, ...]:
    """The stages to run, in their order. Raises BadInput for an unknown name."""
    stages = study_stages(options.speculative_config or DRAFTS)
    if options.stages is None:
        return stages
    names = [name.strip() for name in options.stages.split(",")]
    for name in names:
        if name not in STAGE_NAMES:
            raise BadInput(
                "no such stage of the case study", value=name, limit=", ".join(STAGE_NAMES)
            )
    return tuple(one for one in stages if one.name in names)


def check_context(options: LabOptions, spec: ModelSpec) -> None:
    """Raises BadInput for prompts and outputs that the model cannot hold."""
    needed = options.input_len + options.output_len
    if needed > spec.max_positions:
        raise BadInput(
            "the prompt and its output are longer than the model's context",
            value=needed,
            limit=spec.max_positions,
            fix="lower --input-len or --output-len",
        )


def study_settings(options: LabOptions) -> Settings:
    """What all stages share: a KV cache for the prompts and their outputs, nothing reused."""
    return Settings(
        model=options.model or DEFAULT_MODEL,
        device=options.device,
        num_threads=options.num_threads,
        max_num_seqs=options.max_concurrency,
        max_model_len=options.input_len + options.output_len,
        enable_prefix_caching=False,
    )


def machine_name(resolved: ResolvedSettings) -> str:
    """The GPU, or the CPU and the number of threads."""
    if resolved.device.startswith("cuda"):
        return str(torch.cuda.get_device_name(resolved.device))
    return f"{system.cpu_model()}, {resolved.num_threads} threads"


def command_of(options: LabOptions) -> str:
    """The command line that repeats the study."""
    words = ["ridgeline lab casestudy", options.model or DEFAULT_MODEL]
    defaults = LabOptions(study=options.study)
    for name in ("device", "num_threads", "max_concurrency", "input_len", "output_len", "rounds"):
        value = getattr(options, name)
        if value != getattr(defaults, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    if options.stages is not None:
        words += ["--stages", options.stages.replace(" ", "")]
    if options.speculative_config is not None:
        given = msgspec.to_builtins(options.speculative_config)
        drafts = {name: value for name, value in given.items() if value is not None}
        words += ["--speculative-config", f"'{msgspec.json.encode(drafts).decode()}'"]
    return " ".join(words)
