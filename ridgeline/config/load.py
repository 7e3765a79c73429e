"""Options of a load, of the server it is sent to, and of the report: bench and diagnose; and of the
operating point that predict computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ridgeline.config import shared
from ridgeline.config.option import About, Section
from ridgeline.config.settings import Speculative
from ridgeline.config.shared import QuantizeMethod
from ridgeline.config.units import (
    COUNT,
    DURATION,
    MAX_COUNT,
    MAX_LENGTH,
    NON_NEGATIVE_COUNT,
    NON_NEGATIVE_SECONDS,
    NUMBER,
    RATE,
    TOKENS,
    Range,
)
from ridgeline.errors import BadInput
from ridgeline.records import KvEviction, Slo

METRICS = ("ttft", "visible", "tpot", "itl", "e2e", "queue", "publish", "user_tok_s", "fluidity")
DEFAULT_NUM_PROMPTS = 100
_ALIASES = {"e2el": "e2e"}
Endpoint = Literal["auto", "completions", "chat"]
OperatorTimes = Literal["analytic", "measured"]
ReportLayout = Literal["ridgeline", "vllm"]


class BenchOptions(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A load, under the names of `vllm bench serve`. Times are seconds, lengths tokens."""

    title: ClassVar[str] = "Load"
    table: ClassVar[str] = "load"

    workload: Annotated[str, shared.WORKLOAD] = "chat-and-code"
    num_prompts: Annotated[
        int | None,
        About(
            "Requests to send.",
            unit=COUNT,
            unset=f"{DEFAULT_NUM_PROMPTS}; with --duration-s no limit",
        ),
    ] = None
    duration_s: Annotated[float | None, About("Time to send requests for.", unit=DURATION)] = None
    input_len: Annotated[
        int | None,
        shared.INPUT_LEN.but(
            help="Send random prompts of this many tokens instead of a workload.",
            old_names=("random-input-len", "isl"),
        ),
    ] = None
    output_len: Annotated[
        int | None,
        shared.OUTPUT_LEN.but(
            help="Output tokens of random prompts.", old_names=("random-output-len", "osl")
        ),
    ] = None
    prefix_len: Annotated[
        int,
        shared.PREFIX_LEN.but(
            help="Prompt tokens that all random prompts share.", old_names=("random-prefix-len",)
        ),
    ] = 0
    ignore_eos: Annotated[
        bool, About("Generate as many tokens as the workload says, past the end of text.")
    ] = True
    stream: Annotated[
        bool, About("Stream answers; without, only end-to-end latency is observed (with --url).")
    ] = True
    timeout_s: Annotated[float, About("Maximum time for one answer.", unit=DURATION)] = 600.0
    request_rate: Annotated[
        float,
        shared.REQUEST_RATE.but(
            range=Range(0, math.inf, exclusive=True),
            old_names=("rate",),
            unset="inf: all at once",
            panel="Arrivals",
        ),
    ] = math.inf
    burstiness: Annotated[
        float,
        About(
            "Shape of the arrivals: 1 Poisson, below 1 burstier, above 1 more even.",
            unit=NUMBER,
            range=Range(0, math.inf, exclusive=True),
        ),
    ] = 1.0
    max_concurrency: Annotated[
        int | None, About("Maximum requests in flight.", unit=COUNT, unset="unlimited")
    ] = None
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None,
        About("Increase the rate over the run, from the start to the end rate."),
    ] = None
    ramp_up_start_rps: Annotated[
        float | None, About("Requests per second at the start of the ramp.", unit=RATE)
    ] = None
    ramp_up_end_rps: Annotated[
        float | None, About("Requests per second at the end of the ramp.", unit=RATE)
    ] = None
    replay_speed: Annotated[float | None, shared.REPLAY_SPEED] = None
    slo: Annotated[Slo | None, shared.SLO.but(panel="Measurement")] = None
    percentile_metrics: Annotated[
        str,
        About(
            "Metrics to report, separated by commas: ttft, visible (first token that is not "
            "reasoning), tpot, itl, e2e, queue, publish, user_tok_s (tokens/s of one "
            "user), fluidity (share of tokens in time); or all.",
            metavar="METRICS",
        ),
    ] = "ttft,tpot,itl,e2e"
    metric_percentiles: Annotated[
        str, About("Percentiles to report, separated by commas.", metavar="PERCENTILES")
    ] = "50,90,95,99"
    num_warmups: Annotated[
        int,
        About("Requests to send before the measurement.", unit=COUNT, range=NON_NEGATIVE_COUNT),
    ] = 4
    warmup_s: Annotated[
        float,
        About(
            "Exclude requests that arrive in this time at the start.",
            unit=DURATION,
            range=NON_NEGATIVE_SECONDS,
        ),
    ] = 0.0
    cooldown_s: Annotated[
        float,
        About(
            "Exclude requests that arrive in this time at the end.",
            unit=DURATION,
            range=NON_NEGATIVE_SECONDS,
        ),
    ] = 0.0
    seed: int = 0

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics to report, in the order given. Raises BadInput."""
        given = [part.strip() for part in self.percentile_metrics.split(",") if part.strip()]
        names = METRICS if given == ["all"] else tuple(_ALIASES.get(name, name) for name in given)
        for name in names:
            if name not in METRICS:
                raise BadInput(
                    "--percentile-metrics: unknown metric",
                    value=name,
                    limit=", ".join(METRICS),
                    fix="name some of them, separated by commas, or write all",
                )
        return names

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to report, 0..100. Raises BadInput."""
        try:
            values = tuple(float(part) for part in self.metric_percentiles.split(","))
        except ValueError:
            values = (math.nan,)
        if not all(0 <= value <= 100 for value in values):
            raise BadInput(
                "--metric-percentiles must be percentiles",
                value=self.metric_percentiles,
                limit="0..100",
                fix="write e.g. 50,90,99",
            )
        return values

    @property
    def max_requests(self) -> int | None:
        """How many requests to send; None: as many as come within the duration."""
        if self.num_prompts is None and self.duration_s is None:
            return DEFAULT_NUM_PROMPTS
        return self.num_prompts


class BenchTarget(Section, frozen=True, kw_only=True):
    """What `bench` measures: MODEL in this process, or a server."""

    title: ClassVar[str] = "Target"

    model: Annotated[str | None, shared.OPTIONAL_MODEL] = None
    named_model: Annotated[
        str | None,
        About(
            "The same as MODEL, in vLLM's spelling; with --url, as --served-model-name.",
            flag="model",
            metavar="MODEL",
            ambient=False,
        ),
    ] = None
    url: Annotated[
        str | None, shared.URL.but(help="Measure the OpenAI-compatible server at this address.")
    ] = None
    served_model_name: Annotated[str | None, shared.SERVED_MODEL_NAME] = None
    endpoint: Annotated[
        Endpoint | None, About("With --url: API to use.", unset="auto", ambient=False)
    ] = None
    api_key: Annotated[str | None, shared.API_KEY] = None
    tokenizer: Annotated[str | None, shared.TOKENIZER] = None
    accelerator: Annotated[
        str | None,
        About(
            "With --url and MODEL: what the server runs on (h100-sxm, 4xh100-sxm, here), for MFU.",
            metavar="NAME",
            ambient=False,
        ),
    ] = None


class BenchReport(Section, frozen=True, kw_only=True):
    """Repetitions of a bench run, and the files it writes."""

    title: ClassVar[str] = "Repetition"
    table: ClassVar[str] = "bench"
    prefix: ClassVar[str] = "bench_"

    num_runs: Annotated[
        int | None,
        About(
            "Repeat the run, and report confidence intervals.",
            unit=COUNT,
            range=Range(2, MAX_COUNT),
        ),
    ] = None
    sweep: Annotated[
        str | None, About("Measure at each of these request rates: 1,2,4.", metavar="RATES")
    ] = None
    find_goodput: Annotated[
        str | None,
        About("Find the highest request rate in LOW:HIGH that meets --slo.", metavar="LOW:HIGH"),
    ] = None
    layout: Annotated[ReportLayout, About("Layout of the console report.", panel="Output")] = (
        "ridgeline"
    )
    price_per_hour: Annotated[float | None, shared.PRICE_PER_HOUR] = None
    output_json: Annotated[
        Path | None,
        About(
            "Write the result as JSON, under vLLM's keys.",
            path="file",
            ambient=False,
            since="0.2",
        ),
    ] = None
    log: Annotated[
        Path | None,
        About(
            "Write every request and step: JSON lines, or a table if FILE ends in .parquet.",
            path="file",
            ambient=False,
        ),
    ] = None
    html: Annotated[Path | None, shared.HTML] = None
    trace: Annotated[Path | None, shared.TRACE] = None
    json: Annotated[
        bool,
        shared.JSON.but(help="Print JSON instead of text, as in --output-json.", panel="Output"),
    ] = False


class DiagnoseOptions(Section, frozen=True, kw_only=True):
    """What `diagnose` judges, and what it is held against."""

    title: ClassVar[str] = "Source"

    model: Annotated[str | None, shared.OPTIONAL_MODEL] = None
    url: Annotated[
        str | None, shared.URL.but(help="Measure and diagnose the server at this address.")
    ] = None
    run: Annotated[
        Path | None,
        About(
            "Diagnose a recorded run: a file of `bench --log`, or its folder.",
            metavar="PATH",
            path="input",
            ambient=False,
        ),
    ] = None
    nsight: Annotated[
        Path | None, About("Diagnose a CSV export of nsys or ncu.", path="input", ambient=False)
    ] = None
    profile: Annotated[
        bool, About("Time every operator of prefill and decode steps instead.", ambient=False)
    ] = False
    baseline: Annotated[
        Path | None,
        About(
            "Compare with an earlier run of this model on this machine.",
            path="input",
            ambient=False,
        ),
    ] = None
    accelerator: Annotated[
        str | None,
        About(
            "With MODEL and --url or --run: add the roofline of what it ran on (h100-sxm, "
            "4xh100-sxm, here).",
            metavar="NAME",
            ambient=False,
        ),
    ] = None
    served_model_name: Annotated[str | None, shared.SERVED_MODEL_NAME] = None
    api_key: Annotated[str | None, shared.API_KEY] = None
    tokenizer: Annotated[
        str | None,
        shared.TOKENIZER.but(
            help="With --url: model whose tokenizer counts what the server does not, and writes "
            "token ids as text for a server that takes none."
        ),
    ] = None
    html: Annotated[
        Path | None, shared.HTML.but(help="Write an HTML page with the roofline.", panel="Output")
    ] = None
    json: Annotated[bool, shared.JSON] = False


class LabOptions(Section, frozen=True, kw_only=True):
    """An experiment of the lab: a model, the work of every stage, and how often it is measured."""

    title: ClassVar[str] = "Experiment"
    table: ClassVar[str] = "lab"
    prefix: ClassVar[str] = "lab_"

    study: Annotated[
        Literal["casestudy"],
        About(
            "casestudy: eager PyTorch, torch.compile, kernels, INT8, INT4, speculation.",
            positional=True,
            required=True,
            since="0.3",
        ),
    ]
    model: Annotated[str | None, shared.OPTIONAL_MODEL.but(since="0.3")] = None
    device: Annotated[
        str,
        About("Device to run on: cpu, cuda, cuda:N or auto.", metavar="DEVICE", since="0.3"),
    ] = "auto"
    num_threads: Annotated[
        int | None,
        About("CPU threads.", unit=COUNT, unset="the usable cores", since="0.3"),
    ] = None
    max_concurrency: Annotated[
        int, About("Sequences decoded at once.", unit=COUNT, since="0.3")
    ] = 1
    input_len: Annotated[int, shared.INPUT_LEN.but(since="0.3")] = 128
    output_len: Annotated[int, shared.OUTPUT_LEN.but(range=Range(8, MAX_LENGTH), since="0.3")] = 64
    rounds: Annotated[
        int, About("Rounds, each of which measures every stage once.", unit=COUNT, since="0.3")
    ] = 3
    stages: Annotated[
        str | None,
        About(
            "Stages to run, separated by commas: eager, compile, kernels, int8, int4, speculation.",
            metavar="NAMES",
            unset="all",
            since="0.3",
        ),
    ] = None
    speculative_config: Annotated[
        Speculative | None,
        About(
            "Drafts of the last stage, as vLLM's JSON.",
            unset='\'{"method": "ngram"}\'',
            since="0.3",
        ),
    ] = None
    output_json: Annotated[
        Path | None,
        About("Write the record as JSON.", path="file", panel="Output", ambient=False, since="0.3"),
    ] = None
    html: Annotated[Path | None, shared.HTML.but(since="0.3")] = None
    json: Annotated[bool, shared.JSON.but(since="0.3")] = False


class WatchOptions(Section, frozen=True, kw_only=True):
    """Which server's traffic is compared with the one that it was tuned for."""

    title: ClassVar[str] = "Watch"

    url: Annotated[str, shared.URL.but(help="Address of the server.", required=True)]
    tuned: Annotated[
        Path,
        About(
            "Folder of the search that tuned it.",
            path="folder",
            required=True,
            ambient=False,
            since="0.3",
        ),
    ]
    duration: Annotated[
        float,
        About("How long to read its metrics.", unit=DURATION, unset="5m", ambient=False),
    ] = 300.0
    interval: Annotated[
        float,
        About("Time between two readings.", unit=DURATION, unset="15s", ambient=False),
    ] = 15.0
    workload: Annotated[
        str | None,
        shared.WORKLOAD.but(
            help="Requests to predict with, such as a log that may be read.",
            unset="synthetic, of the live lengths",
        ),
    ] = None
    gpus: Annotated[
        int | None,
        About(
            "GPUs that tensor parallelism and replicas may use.",
            unit=COUNT,
            unset="as the command has it",
            ambient=False,
        ),
    ] = None
    accelerator: Annotated[str | None, shared.SERVER_ACCELERATOR] = None
    api_key: Annotated[str | None, shared.API_KEY] = None
    cronjob: Annotated[
        bool,
        About("Print a Kubernetes CronJob that runs this, and do nothing.", ambient=False),
    ] = False
    image: Annotated[
        str,
        About("Image of the CronJob.", metavar="IMAGE", ambient=False),
    ] = "ridgeline"
    schedule: Annotated[
        str,
        About("When the CronJob runs, in cron's notation.", metavar="CRON", ambient=False),
    ] = "17 * * * *"
    json: Annotated[bool, shared.JSON.but(panel="Output")] = False


class PredictOptions(Section, frozen=True, kw_only=True):
    """One operating point, or a file of them."""

    title: ClassVar[str] = "Operating point"
    table: ClassVar[str] = "predict"
    prefix: ClassVar[str] = "predict_"

    model: Annotated[str | None, shared.SHAPE.but(required=False)] = None
    what_if: Annotated[str | None, shared.WHAT_IF] = None
    accelerator: Annotated[str | None, shared.ACCELERATOR.but(unset="the calibrated one")] = None
    input_len: Annotated[int, shared.INPUT_LEN] = 1024
    output_len: Annotated[int, shared.OUTPUT_LEN] = 256
    thinking_len: Annotated[int, shared.THINKING_LEN] = 0
    thinking_token_budget: Annotated[int | None, shared.THINKING_BUDGET] = None
    beam_width: Annotated[int, shared.BEAM_WIDTH] = 1
    max_concurrency: Annotated[
        int, About("Requests in flight, in a closed loop.", unit=COUNT, old_names=("batch",))
    ] = 1
    cached_tokens: Annotated[
        int,
        About(
            "Prompt tokens found in the prefix cache.",
            unit=TOKENS,
            range=NON_NEGATIVE_COUNT,
            old_names=("cached",),
            since="0.2",
        ),
    ] = 0
    kv_tier_memory_tokens: Annotated[
        int,
        About(
            "Further tokens found in its memory tier.",
            unit=TOKENS,
            range=NON_NEGATIVE_COUNT,
            since="0.3",
        ),
    ] = 0
    kv_tier_file_tokens: Annotated[
        int,
        About(
            "Further tokens found in its files.", unit=TOKENS, range=NON_NEGATIVE_COUNT, since="0.3"
        ),
    ] = 0
    kv_tier_memory_bandwidth: Annotated[int | None, shared.TIER_MEMORY_BANDWIDTH] = None
    kv_tier_file_bandwidth: Annotated[int | None, shared.TIER_FILE_BANDWIDTH] = None
    quantization: Annotated[str | None, shared.QUANTIZATION] = None
    quantization_method: Annotated[QuantizeMethod | None, shared.QUANTIZATION_METHOD] = None
    embedding_bits: Annotated[Literal[4, 8] | None, shared.EMBEDDING_BITS] = None
    kv_cache_dtype: Annotated[str | None, shared.KV_CACHE_DTYPE] = None
    kv_eviction_config: Annotated[KvEviction | None, shared.KV_EVICTION] = None
    max_loras: Annotated[int | None, shared.MAX_LORAS] = None
    max_lora_rank: Annotated[int, shared.MAX_LORA_RANK] = 16
    tensor_parallel_size: Annotated[int, shared.TENSOR_PARALLEL] = 1
    pipeline_parallel_size: Annotated[int, shared.PIPELINE_PARALLEL] = 1
    expert_parallel_size: Annotated[int, shared.EXPERT_PARALLEL] = 1
    context_parallel_size: Annotated[int, shared.CONTEXT_PARALLEL] = 1
    sequence_parallel: Annotated[bool, shared.SEQUENCE_PARALLEL] = False
    moe_tensor_parallel_size: Annotated[int | None, shared.MOE_TENSOR_PARALLEL] = None
    attention_dp_size: Annotated[int, shared.ATTENTION_DP] = 1
    backend: Annotated[str | None, shared.BACKEND] = None
    interconnect: Annotated[str | None, shared.INTERCONNECT] = None
    network: Annotated[str | None, shared.NETWORK] = None
    max_num_batched_tokens: Annotated[int | None, shared.STEP_TOKENS] = None
    num_speculative_tokens: Annotated[int, shared.DRAFT_TOKENS] = 0
    acceptance: Annotated[float | None, shared.ACCEPTANCE] = None
    draft_model: Annotated[
        str | None,
        About(
            "Speculative decoding: draft model on the same devices.",
            metavar="MODEL",
            unset="n-gram lookup, at no cost",
        ),
    ] = None
    speculative_config: Annotated[Speculative | None, shared.SPECULATIVE] = None
    draft_share: Annotated[float, shared.DRAFT_SHARE] = 1.0
    input: Annotated[
        str | None,
        About(
            "JSONL file of operating points; - reads stdin.",
            panel="Input and output",
            metavar="FILE",
            ambient=False,
        ),
    ] = None
    output: Annotated[
        Path | None,
        About("With --input: where to write JSONL.", path="file", ambient=False, unset="stdout"),
    ] = None
    catalogue: Annotated[Path | None, shared.CATALOGUE] = None
    calibration: Annotated[Path | None, shared.CALIBRATION] = None
    operators: Annotated[
        OperatorTimes,
        About(
            "Times of products, experts, attention and all-reduces: analytic, or measured on this "
            "device under --backend (needs ridgeline[silicon]).",
            since="0.3",
        ),
    ] = "analytic"
    explain: Annotated[
        bool,
        About("Show the terms of the prediction: where the time goes.", ambient=False, since="0.3"),
    ] = False
    list_models: Annotated[
        bool, About("List the known models and accelerators, and exit.", ambient=False)
    ] = False
    json: Annotated[bool, shared.JSON] = False
