"""Measure an engine or a server, and find what limits it: bench, calibrate, diagnose."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any, Literal, Unpack

import msgspec

from ridgeline.api.keywords import (
    check_effective,
    command_options,
    engine_settings,
    options_from,
)
from ridgeline.config.load import (
    BenchOptions,
    BenchReport,
    BenchTarget,
    DiagnoseOptions,
    Endpoint,
    LabOptions,
)
from ridgeline.config.planning import CalibrateOptions
from ridgeline.config.settings import EngineSettings, Speculative
from ridgeline.config.tools import CompareOptions
from ridgeline.records import Slo
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.bench import bench as bench_workflow
from ridgeline.workflows.bench.bench import BenchResult
from ridgeline.workflows.calibrate import calibrate as calibrate_workflow
from ridgeline.workflows.calibrate.calibration_result import CalibrationResult
from ridgeline.workflows.compare_runs import ResultComparison, compare_runs
from ridgeline.workflows.diagnose import diagnose as diagnose_workflow
from ridgeline.workflows.diagnose.diagnose_run import Diagnosis
from ridgeline.workflows.lab.case_study import CaseStudy
from ridgeline.workflows.targets import bench_target


def bench(
    model: str | None = None,
    *,
    url: str | None = None,
    served_model_name: str | None = None,
    endpoint: Endpoint | None = None,
    api_key: str | None = None,
    tokenizer: str | None = None,
    accelerator: str | None = None,
    workload: str = "chat-and-code",
    num_prompts: int | None = None,
    duration_s: float | str | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    prefix_len: int = 0,
    ignore_eos: bool = True,
    stream: bool = True,
    timeout_s: float | str = 600.0,
    request_rate: float = inf,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    ramp_up_strategy: Literal["linear", "exponential"] | None = None,
    ramp_up_start_rps: float | None = None,
    ramp_up_end_rps: float | None = None,
    replay_speed: float | None = None,
    slo: Slo | str | None = None,
    percentile_metrics: str = "ttft,tpot,itl,e2e",
    metric_percentiles: str = "50,90,95,99",
    num_warmups: int = 4,
    warmup_s: float | str = 0.0,
    cooldown_s: float | str = 0.0,
    price_per_hour: float | None = None,
    observer: Observer = silent,
    **settings: Unpack[EngineSettings],
) -> BenchResult:
    """Measure an engine here, or any OpenAI-compatible server.

    >>> import ridgeline
    >>> run = ridgeline.bench("demo", input_len=16, output_len=4, num_prompts=4, num_warmups=0)
    >>> run.summary.num_ok
    4

    Args:
        model: Name of a model: a directory, a .gguf file or its address,
            OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or
            'dummy:SHAPE' (random weights) (default: smollm2).
        url: Measure the OpenAI-compatible server at this address.
        served_model_name: Model to request from the server (default: the first it lists).
        endpoint: With --url: API to use (default: auto).
        api_key: API key of the server.
        tokenizer: With --url: model whose tokenizer counts what the server does not, counts
            all answers once more to compare servers, and writes token ids as text for a server
            that takes none.
        accelerator: With --url and MODEL: what the server runs on (h100-sxm, 4xh100-sxm,
            here), for MFU.
        workload: Requests to send: chat-and-code, chat, code,
            synthetic:input=256,output=128, synthetic-chat, rag, code-edit, long-document,
            batch, FILE.jsonl, or recorded traffic: sharegpt:FILE, conversations:FILE,
            azure:FILE, burstgpt:FILE, mooncake:FILE.
        num_prompts: Requests to send (default: 100; with --duration-s no limit).
        duration_s: Time to send requests for.
        input_len: Send random prompts of this many tokens instead of a workload.
        output_len: Output tokens of random prompts.
        prefix_len: Prompt tokens that all random prompts share.
        ignore_eos: Generate as many tokens as the workload says, past the end of text.
        stream: Stream answers; without, only end-to-end latency is observed (with --url).
        timeout_s: Maximum time for one answer.
        request_rate: Requests per second, Poisson arrivals (default: inf: all at once).
        burstiness: Shape of the arrivals: 1 Poisson, below 1 burstier, above 1 more even.
        max_concurrency: Maximum requests in flight (default: unlimited).
        ramp_up_strategy: Increase the rate over the run, from the start to the end rate.
        ramp_up_start_rps: Requests per second at the start of the ramp.
        ramp_up_end_rps: Requests per second at the end of the ramp.
        replay_speed: Replay recorded arrival times, sped up by this factor.
        slo: Latency limits in milliseconds: 'ttft:200 tpot:50 e2e:5000 error:1%'.
        percentile_metrics: Metrics to report, separated by commas: ttft, visible (first token
            that is not reasoning), tpot, itl, e2e, queue, publish, user_tok_s (tokens/s of one
            user), fluidity (share of tokens in time); or all.
        metric_percentiles: Percentiles to report, separated by commas.
        num_warmups: Requests to send before the measurement.
        warmup_s: Exclude requests that arrive in this time at the start.
        cooldown_s: Exclude requests that arrive in this time at the end.
        price_per_hour: Price of this machine per hour.
        observer: Called with every progress event; `print` shows them as lines.
        settings: Engine settings, for a model that is measured here.

    Returns:
        Latencies, throughput and goodput, and what bounds them.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    keywords = locals()
    check_effective("bench", keywords)
    seed = engine_settings(model, settings).seed
    load = msgspec.structs.replace(options_from(BenchOptions, keywords), seed=seed)
    return bench_workflow.bench(
        load,
        bench_target(
            options_from(BenchTarget, keywords),
            lambda name: engine_settings(name, settings),
        ),
        dollars_per_hour=options_from(BenchReport, keywords).price_per_hour,
        observer=observer,
    )


def diagnose(
    model: str | None = None,
    *,
    url: str | None = None,
    run: str | Path | None = None,
    baseline: str | Path | None = None,
    accelerator: str | None = None,
    served_model_name: str | None = None,
    api_key: str | None = None,
    tokenizer: str | None = None,
    workload: str = "chat-and-code",
    num_prompts: int | None = None,
    duration_s: float | str | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    prefix_len: int = 0,
    ignore_eos: bool = True,
    timeout_s: float | str = 600.0,
    request_rate: float = inf,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    ramp_up_strategy: Literal["linear", "exponential"] | None = None,
    ramp_up_start_rps: float | None = None,
    ramp_up_end_rps: float | None = None,
    replay_speed: float | None = None,
    slo: Slo | str | None = None,
    percentile_metrics: str = "ttft,tpot,itl,e2e",
    metric_percentiles: str = "50,90,95,99",
    num_warmups: int = 4,
    warmup_s: float | str = 0.0,
    cooldown_s: float | str = 0.0,
    observer: Observer = silent,
    **settings: Unpack[EngineSettings],
) -> Diagnosis:
    """Find what latency is lost to, and the setting that helps.

    >>> import ridgeline
    >>> diagnosis = ridgeline.diagnose("demo", input_len=16, output_len=4, num_prompts=4)
    >>> diagnosis.losses.num_requests
    4

    Args:
        model: Name of a model: a directory, a .gguf file or its address,
            OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or
            'dummy:SHAPE' (random weights) (default: smollm2).
        url: Measure and diagnose the server at this address.
        run: Diagnose a recorded run: a file of `bench --log`, or its folder.
        baseline: Compare with an earlier run of this model on this machine.
        accelerator: With MODEL and --url or --run: add the roofline of what it ran on
            (h100-sxm, 4xh100-sxm, here).
        served_model_name: Model to request from the server (default: the first it lists).
        api_key: API key of the server.
        tokenizer: With --url: model whose tokenizer counts what the server does not, and
            writes token ids as text for a server that takes none.
        workload: Requests to send: chat-and-code, chat, code,
            synthetic:input=256,output=128, synthetic-chat, rag, code-edit, long-document,
            batch, FILE.jsonl, or recorded traffic: sharegpt:FILE, conversations:FILE,
            azure:FILE, burstgpt:FILE, mooncake:FILE.
        num_prompts: Requests to send (default: 100; with --duration-s no limit).
        duration_s: Time to send requests for.
        input_len: Send random prompts of this many tokens instead of a workload.
        output_len: Output tokens of random prompts.
        prefix_len: Prompt tokens that all random prompts share.
        ignore_eos: Generate as many tokens as the workload says, past the end of text.
        timeout_s: Maximum time for one answer.
        request_rate: Requests per second, Poisson arrivals (default: inf: all at once).
        burstiness: Shape of the arrivals: 1 Poisson, below 1 burstier, above 1 more even.
        max_concurrency: Maximum requests in flight (default: unlimited).
        ramp_up_strategy: Increase the rate over the run, from the start to the end rate.
        ramp_up_start_rps: Requests per second at the start of the ramp.
        ramp_up_end_rps: Requests per second at the end of the ramp.
        replay_speed: Replay recorded arrival times, sped up by this factor.
        slo: Latency limits in milliseconds: 'ttft:200 tpot:50 e2e:5000 error:1%'.
        percentile_metrics: Metrics to report, separated by commas: ttft, visible (first token
            that is not reasoning), tpot, itl, e2e, queue, publish, user_tok_s (tokens/s of one
            user), fluidity (share of tokens in time); or all.
        metric_percentiles: Percentiles to report, separated by commas.
        num_warmups: Requests to send before the measurement.
        warmup_s: Exclude requests that arrive in this time at the start.
        cooldown_s: Exclude requests that arrive in this time at the end.
        observer: Called with every progress event; `print` shows them as lines.
        settings: Engine settings, for a model that is measured here.

    Returns:
        The losses and the findings, ranked by how much there is to gain.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    keywords = locals()
    check_effective("diagnose", keywords)
    seed = engine_settings(model, settings).seed
    load = msgspec.structs.replace(options_from(BenchOptions, keywords), seed=seed)
    given = options_from(DiagnoseOptions, keywords)
    return diagnose_workflow.diagnose(
        load,
        diagnose_workflow.diagnosis_source(given, lambda name: engine_settings(name, settings)),
        baseline=given.baseline,
        reference=diagnose_workflow.reference_device(given),
        observer=observer,
    )


def compare(a: str | Path, b: str | Path, *, threshold: float = 2.0) -> ResultComparison:
    """Compare two results, or two folders of repeated runs.

    >>> import ridgeline
    >>> comparison = ridgeline.compare("before.json", "after.json")  # doctest: +SKIP
    >>> comparison.conclusion  # doctest: +SKIP
    'not regressed'

    Args:
        a: Result file, or a folder of repeated runs.
        b: The result to compare with A.
        threshold: Smallest change that matters.

    Returns:
        Every metric with its judgement, and a conclusion: not regressed, regressed or
        inconclusive.

    Raises:
        UserError: A file cannot be read.
    """
    options = command_options("compare", CompareOptions, locals())
    return compare_runs(options.a, options.b, threshold=options.threshold / 100)


def calibrate(
    *,
    engine: str | None = None,
    url: str | None = None,
    quantization: str | None = None,
    also: tuple[str, ...] = (),
    device: str = "auto",
    served_model_name: str | None = None,
    api_key: str | None = None,
    tokenizer: str | None = None,
    budget: float | str = 300.0,
    observer: Observer = silent,
) -> CalibrationResult:
    """Measure this machine or a server, to predict with.

    >>> import ridgeline
    >>> result = ridgeline.calibrate(engine="smollm2", budget="5m")  # doctest: +SKIP
    >>> result.save("calibration.json")  # doctest: +SKIP
    >>> ridgeline.predict(
    ...     "smollm2", accelerator="this-machine", calibration="calibration.json"
    ... )  # doctest: +SKIP

    Args:
        engine: Calibrate Ridgeline's engine here with this model, larger than the caches.
        url: Calibrate the server at this address, from outside.
        quantization: With --engine: weight formats to run, separated by commas: dense, int8,
            int4, bf16 (default: three of them).
        also: With --engine: another model to run, which makes the fit more general;
            repeatable.
        device: With --engine: device to run on: cpu, cuda, cuda:N or auto.
        served_model_name: Model to request from the server (default: the first it lists).
        api_key: API key of the server.
        tokenizer: With --url: model whose tokenizer counts what the server does not, and
            writes token ids as text for a server that takes none.
        budget: Time for the measurement, without loading models.
        observer: Called with every progress event; `print` shows them as lines.

    Returns:
        The calibration. Save it as JSON and name the file as `calibration` of other functions.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    options = command_options("calibrate", CalibrateOptions, locals())
    return calibrate_workflow.calibrate(options, observer)


def casestudy(
    model: str | None = None,
    *,
    device: str = "auto",
    num_threads: int | None = None,
    max_concurrency: int = 1,
    input_len: int = 128,
    output_len: int = 64,
    rounds: int = 3,
    stages: str | None = None,
    speculative_config: Speculative | dict[str, Any] | None = None,
    observer: Observer = silent,
) -> CaseStudy:
    """Measure one technique after another: eager PyTorch, torch.compile, kernels, INT8, INT4,
    speculation.

    >>> import ridgeline
    >>> study = ridgeline.casestudy("smollm2", device="cpu")  # doctest: +SKIP
    >>> [(stage.name, study.gain(stage)) for stage in study.stages]  # doctest: +SKIP

    Args:
        model: Name of a model: a directory, a .gguf file or its address,
            OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or
            'dummy:SHAPE' (random weights) (default: smollm2).
        device: Device to run on: cpu, cuda, cuda:N or auto.
        num_threads: CPU threads (default: the usable cores).
        max_concurrency: Sequences decoded at once.
        input_len: Prompt tokens of a request.
        output_len: Output tokens of a request.
        rounds: Rounds, each of which measures every stage once.
        stages: Stages to run, separated by commas: eager, compile, kernels, int8, int4,
            speculation (default: all).
        speculative_config: Drafts of the last stage, as vLLM's JSON (default: n-gram lookup).
        observer: Called with every progress event; `print` shows them as lines.

    Returns:
        Every stage with its speed, achieved bandwidth and quality, or why it cannot run here.

    Raises:
        UserError: An option is wrong, or the device or the model is not here.
    """
    from ridgeline.workflows.lab.run_case_study import run_case_study

    options = command_options("lab", LabOptions, locals() | {"study": "casestudy"})
    return run_case_study(options, observer)
