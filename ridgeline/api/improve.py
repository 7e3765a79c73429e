"""Make a model or a deployment better, and check that it still answers as before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from ridgeline.api.keywords import check_effective, download_models, engine_settings, options_from
from ridgeline.config.improve import (
    OPTIMIZE_SLO,
    CheckpointFormat,
    EvaluateOptions,
    Goal,
    NumberFormat,
    OptimizeOptions,
    PlaybookName,
    QuantizeFiles,
    QuantizeOptions,
    ServerKind,
    TargetServerOptions,
)
from ridgeline.config.settings import EngineSettings
from ridgeline.config.shared import QuantizeMethod
from ridgeline.errors import BadInput
from ridgeline.hub.download import ensure_downloaded
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.optimize import optimize as optimize_workflow
from ridgeline.workflows.optimize.optimize import OptimizeResult
from ridgeline.workflows.optimize.restartable_server import restartable_server
from ridgeline.workflows.quantize import quantize as quantize_workflow
from ridgeline.workflows.quantize.quantize import QuantizeResult

if TYPE_CHECKING:
    from ridgeline.workflows.evaluate.evaluation import Evaluation


def optimize(
    model: str | None = None,
    *,
    workload: str = "chat-and-code",
    slo: str = OPTIMIZE_SLO,
    objective: Goal = "goodput",
    playbook: PlaybookName | None = None,
    budget: float | str = 300.0,
    price_per_hour: float | None = None,
    output: str | Path | None = None,
    ladder: str | Path | None = None,
    calibration: str | Path | None = None,
    resume: str | Path | None = None,
    shared_machine: bool = False,
    url: str | None = None,
    restart_cmd: str | None = None,
    apply_cmd: str | None = None,
    server_cmd: str | None = None,
    docker: str | None = None,
    kubernetes: str | None = None,
    slurm: str | Path | None = None,
    ray: str | Path | None = None,
    ready_url: str | None = None,
    server: ServerKind | None = None,
    served_model_name: str | None = None,
    eval_cmd: str | None = None,
    eval_margin: float = 0.0,
    candidate_model: tuple[str, ...] = (),
    candidate_drafter: tuple[str, ...] = (),
    candidate_cmd: tuple[str, ...] = (),
    gpus: int | None = None,
    accelerator: str | None = None,
    api_key: str | None = None,
    start_timeout: float | str = 600.0,
    compile_cache: str | None = None,
    observer: Observer = silent,
    **settings: Unpack[EngineSettings],
) -> OptimizeResult:
    """Find the fastest configuration, and prove it.

    >>> import ridgeline
    >>> result = ridgeline.optimize("demo", budget="5m")  # doctest: +SKIP
    >>> result.headline  # doctest: +SKIP
    >>> result.save_files("ridgeline-out")  # doctest: +SKIP

    Args:
        model: Name of a model: a directory, a .gguf file or its address,
            OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or
            'dummy:SHAPE' (random weights) (default: smollm2).
        workload: Requests to send: chat-and-code, chat, code,
            synthetic:input=256,output=128, synthetic-chat, rag, code-edit, long-document,
            batch, FILE.jsonl, or recorded traffic: sharegpt:FILE, conversations:FILE,
            azure:FILE, burstgpt:FILE, mooncake:FILE.
        slo: Latency limits in milliseconds: 'ttft:200 tpot:50 e2e:5000 error:1%'.
        objective: What to improve.
        playbook: Workload, SLO, objective and order of rungs for a goal, with a checklist at the
            end; options that you give win.
        budget: Time to spend (default: 5m).
        price_per_hour: Price of this machine per hour (default: a notional $1).
        output: Folder for the report and ridgeline.toml (default: nothing is written).
        ladder: TOML file of candidates, in place of the built-in.
        calibration: Predict with this file of `ridgeline calibrate`.
        resume: Continue the interrupted search whose results are in this folder; the other options
            as before; the budget may be larger.
        shared_machine: Count runs during which other work took the CPU, for machines that are
            never quiet; the intervals contain its noise.
        url: Optimise the server at this address: 'http://127.0.0.1:{port}'.
        restart_cmd: Command that starts it; {flags} and {port} are filled in.
        apply_cmd: Command that applies a configuration: RIDGELINE_FLAGS, or JSON in
            RIDGELINE_CONFIG.
        server_cmd: Command line that the server runs with now, for --apply-cmd and --advise.
        docker: Container to run with other flags (docker or podman).
        kubernetes: Deployment or StatefulSet to patch: NAMESPACE/NAME,
            NAMESPACE/statefulset/NAME. With {service} or {port} in --url a copy is changed.
        slurm: Job script with {flags} to submit; {node} in --url is the job's node.
        ray: Ray Serve configuration that is deployed, of one LLM.
        ready_url: Address that answers once a configuration is up (default: /v1/models of
            --url).
        server: Kind of server (default: recognised by its command).
        served_model_name: Model to request from the server (default: the first it lists).
        eval_cmd: Your own quality gate of lossy changes, with {url}: exit code or score.
        eval_margin: By how much the score of --eval-cmd may drop.
        candidate_model: Checkpoint to try in place of the model, such as a quantised one;
            repeatable.
        candidate_drafter: Drafter to try: eagle3:CHECKPOINT, eagle:CHECKPOINT,
            draft:CHECKPOINT, mtp; repeatable.
        candidate_cmd: Another command that starts it, such as prefill and decode apart; {flags}
            and {port} are filled in; repeatable.
        gpus: GPUs that tensor parallelism and replicas may use (default: as the command has it).
        accelerator: Device that the server runs on, by its name in the catalogue, to predict with
            (default: this machine's GPU or CPU).
        api_key: API key of the server.
        start_timeout: Maximum time for a start (default: 10m).
        compile_cache: Where compiled kernels are kept from start to start: a folder, for --docker
            also volume:NAME; for a copy on Kubernetes pvc:CLAIM or host:/FOLDER; or none
            (default: a volume for --docker, else where the server keeps them).
        observer: Called with every progress event; `print` shows them as lines.
        settings: Engine settings to start from.

    Returns:
        The baseline, every trial with its verdict, and the final configuration.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    keywords = locals()
    check_effective("optimize", keywords)
    engine = engine_settings(model, settings)
    server_options = options_from(TargetServerOptions, keywords)
    if output is None:
        del keywords["output"]  # in the table, which the command line needs, it has a default
    options, target = options_from(OptimizeOptions, keywords), restartable_server(server_options)
    if output is not None:
        optimize_workflow.check_search(engine, options, target)
    result = optimize_workflow.optimize(
        download_models(engine, observer),
        options,
        server=target,
        logs=None if output is None else options.output,
        observer=observer,
    )
    if output is not None:
        result.save_files(options.output)
    return result


def quantize(
    model: str,
    output: str | Path,
    *,
    method: QuantizeMethod | None = None,
    bits: Literal[3, 4, 5, 8, 16] = 4,
    bits_budget: float | None = None,
    step_budget: float | None = None,
    group_size: int | None = None,
    zeros: bool = False,
    numbers: NumberFormat = "int",
    rotate: bool = False,
    lm_head_bits: Literal[4, 8, 16] | None = None,
    embedding_bits: Literal[4, 8] | None = None,
    outlier_threshold: float | None = None,
    format: CheckpointFormat = "ridgeline",
    calibration_text: str | Path | None = None,
    calibration_windows: int | None = None,
    calibration_tokens: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    observer: Observer = silent,
) -> QuantizeResult:
    """Write a checkpoint in fewer bits.

    >>> import ridgeline
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     result = ridgeline.quantize("demo", folder, bits=8)
    ...     answer = ridgeline.generate(result.path, "import os", max_tokens=4)
    >>> answer.completions[0].usage.completion_tokens
    4

    Args:
        model: Name of a model: a directory, a .gguf file or its address,
            OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or
            'dummy:SHAPE' (random weights).
        output: Empty folder for the result.
        method: rtn and hqq need no text; gptq, awq, smoothquant and llm-int8 (8 bits)
            calibrate; qat trains (default: gptq at 3 to 5 bits, else rtn).
        bits: Bits per weight of the layers.
        bits_budget: Mean bits per weight, e.g. 5; sensitive layers get more, others fewer.
        step_budget: The same, by speed: time to read the weights of a decode step.
        group_size: 3 and 4 bits: inputs that share a scale: 32, 64 or 128 (default: 128).
        zeros: 3 and 4 bits: store a zero-point per group too.
        numbers: Number format: int; q4_k, q6_k (gguf); nf4 (bitsandbytes); fp8-tensor,
            fp8-channel (compressed-tensors); fp8-block (fp8).
        rotate: Rotate the model by R1 and R2 first (QuaRot).
        lm_head_bits: Bits of the LM head (default: as stored).
        embedding_bits: Bits of the embedding table, and of an LM head tied to it (default:
            as stored).
        outlier_threshold: llm-int8: inputs of at least this magnitude stay unquantised
            (default: 6).
        format: Checkpoint format; ridgeline is packed for this engine's kernels.
        calibration_text: Text to measure activations on (default: built-in text).
        calibration_windows: Windows of text to read (default: 64; awq 32).
        calibration_tokens: Tokens per window (default: 256).
        steps: qat: training steps (default: 200).
        seed: Seed of the windows and of --rotate.
        observer: Called with every progress event; `print` shows them as lines.

    Returns:
        Where the checkpoint is, and its sizes.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    keywords = locals()
    files = options_from(QuantizeFiles, keywords)
    options = options_from(QuantizeOptions, keywords)
    quantize_workflow.check_options(files.output, options)
    ensure_downloaded(files.model, observer)
    return quantize_workflow.quantize(files.model, files.output, options, observer)


def evaluate(
    a: str = "",
    b: str = "",
    *,
    budget: float | str = 120.0,
    lm_eval: str | None = None,
    lm_eval_path: str | Path | None = None,
    lm_eval_limit: int | None = None,
    lm_eval_program: str | None = None,
    observer: Observer = silent,
    **settings: Unpack[EngineSettings],
) -> Evaluation:
    """Compare a candidate's outputs with the original's.

    >>> import ridgeline
    >>> result = ridgeline.evaluate("demo", "demo", quantization="int8")  # doctest: +SKIP
    >>> result.verdict  # doctest: +SKIP
    'pass'

    Args:
        a: The original, by any name of a model.
        b: The candidate; engine flags apply to it.
        budget: Time to spend (default: 2m).
        lm_eval: lm-eval tasks to run on both models, separated by commas.
        lm_eval_path: Folder of YAML files with your own tasks.
        lm_eval_limit: Maximum documents per task (default: all).
        lm_eval_program: lm-eval executable, where it is installed in another environment.
        observer: Called with every progress event; `print` shows them as lines.
        settings: Engine settings of the candidate.

    Returns:
        The figures, and a verdict: pass, fail or inconclusive.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    keywords = locals()
    check_effective("eval", keywords)
    options = options_from(EvaluateOptions, keywords)
    if not a or not b:
        raise BadInput("evaluate compares two models", fix="name both: evaluate(a, b)")
    # imports torch, which must not happen before optimize has probed the machine
    from ridgeline.workflows.evaluate.evaluate import evaluate as evaluate_models
    from ridgeline.workflows.evaluate.lm_eval import lm_eval_options
    from ridgeline.workflows.evaluate.quality_reference import EvaluationSize

    return evaluate_models(
        download_models(engine_settings(options.a, {}), observer),
        download_models(engine_settings(options.b, settings), observer),
        EvaluationSize(budget_s=options.budget),
        lm_eval=lm_eval_options(options),
        observer=observer,
    )
