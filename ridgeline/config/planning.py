"""Options of the commands that plan: plan, simulate, cost, pack, calibrate."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ridgeline.config import shared
from ridgeline.config.option import About, Section
from ridgeline.config.settings import Batching, Speculative
from ridgeline.config.units import (
    BYTES,
    COUNT,
    DOLLARS,
    DURATION,
    MAX_REPLICAS,
    MAX_REQUESTS,
    MAX_SECONDS,
    NON_NEGATIVE_SECONDS,
    NUMBER,
    POSITIVE_DOLLARS,
    SHARE,
    TOKENS,
    Range,
)
from ridgeline.records import KvEviction, Slo
from ridgeline.records.price import Commitment

PLANNING_SLO = "ttft:1000 tpot:50"
Router = Literal["round-robin", "least-loaded", "power-of-two", "prefix-aware", "session", "ttft"]
PIN_SHARE = About(
    "Share of the KV cache that pinned prefixes may take; one API key gets half of it.",
    unit=SHARE,
    unset="0.5",
    since="0.3",
)
Cluster = Literal["gpu-operator", "gke", "eks", "eks-auto", "karpenter", "aks"]


class PlanOptions(Section, frozen=True, kw_only=True):
    """A fleet to choose: model, demand, SLO and limits. Lists are comma-separated names."""

    title: ClassVar[str] = "Demand"
    table: ClassVar[str] = "plan"
    prefix: ClassVar[str] = "plan_"

    model: Annotated[str, shared.SHAPE]
    workload: Annotated[str | None, shared.WORKLOAD] = None
    from_traffic: Annotated[
        str | None,
        About(
            "Take lengths, rate and prefix sharing from the metrics of this running server.",
            metavar="URL",
            ambient=False,
            since="0.3",
        ),
    ] = None
    traffic_duration: Annotated[
        float,
        About(
            "With --from-traffic: how long to read its metrics.",
            unit=DURATION,
            unset="1m",
            ambient=False,
            since="0.3",
        ),
    ] = 60.0
    api_key: Annotated[str | None, shared.API_KEY] = None
    input_len: Annotated[int | None, shared.INPUT_LEN.but(unset="1024")] = None
    output_len: Annotated[int | None, shared.OUTPUT_LEN.but(unset="256")] = None
    request_rate: Annotated[float, shared.REQUEST_RATE] = 1.0
    dropped_context_share: Annotated[float, shared.DROPPED_CONTEXT] = 0.0
    document_len: Annotated[int | None, shared.DOCUMENT_LEN] = None
    keep_ratio: Annotated[float | None, shared.KEEP_RATIO] = None
    new_document_share: Annotated[float, shared.NEW_DOCUMENTS] = 1.0
    fallback_share: Annotated[float, shared.FALLBACK_SHARE] = 0.0
    canary_shadow_share: Annotated[float, shared.SHADOW_SHARE] = 0.0
    batch_rate: Annotated[float, shared.BATCH_RATE] = 0.0
    mean_request_rate: Annotated[float | None, shared.MEAN_REQUEST_RATE] = None
    background_tokens: Annotated[
        int | None, shared.BACKGROUND_TOKENS.but(range=Range(1, MAX_REQUESTS))
    ] = None
    response_cache_share: Annotated[float, shared.RESPONSE_CACHE_SHARE] = 0.0
    semantic_cache_share: Annotated[float, shared.SEMANTIC_CACHE_SHARE] = 0.0
    question_len: Annotated[int | None, shared.QUESTION_LEN.but(unset="64")] = None
    pinned_len: Annotated[int, shared.PINNED_LEN] = 0
    pinned_prefixes: Annotated[int, shared.PINNED_PREFIXES] = 1
    cached_share: Annotated[
        float,
        About(
            "Share of prompt tokens found in the prefix cache.",
            unit=SHARE,
            old_names=("cached",),
            since="0.2",
        ),
    ] = 0.0
    kv_tier_memory_share: Annotated[
        float, About("Share found in its memory tier.", unit=SHARE, since="0.3")
    ] = 0.0
    kv_tier_file_share: Annotated[
        float, About("Share found in its files.", unit=SHARE, since="0.3")
    ] = 0.0
    kv_tier_memory_bandwidth: Annotated[int | None, shared.TIER_MEMORY_BANDWIDTH] = None
    kv_tier_file_bandwidth: Annotated[int | None, shared.TIER_FILE_BANDWIDTH] = None
    slo: Annotated[str, shared.SLO_TEXT] = PLANNING_SLO
    accelerator: Annotated[
        str | None,
        shared.ACCELERATOR.but(
            help="Accelerators to consider, separated by commas.",
            metavar="NAMES",
            unset="all that have a price",
            panel="Fleet",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        shared.QUANTIZATION.but(
            help="Weight formats to consider, separated by commas.",
            metavar="FORMATS",
            unset="as stored, and fp8",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        shared.KV_CACHE_DTYPE.but(
            help="KV cache formats to consider, separated by commas.",
            metavar="FORMATS",
            unset="as stored, and fp8",
        ),
    ] = None
    max_loras: Annotated[int | None, shared.MAX_LORAS] = None
    max_lora_rank: Annotated[int, shared.MAX_LORA_RANK] = 16
    monthly_budget: Annotated[
        float | None,
        About("Maximum cost per month.", unit=DOLLARS, range=POSITIVE_DOLLARS, since="0.2"),
    ] = None
    price_per_hour: Annotated[float | None, shared.DEVICE_PRICE] = None
    commitment: Annotated[Commitment, shared.COMMITMENT] = "on-demand"
    device_prices: Annotated[Path | None, shared.DEVICE_PRICES] = None
    accept_stale: Annotated[bool, shared.ACCEPT_STALE] = False
    max_devices: Annotated[int, About("Maximum devices of one replica.", unit=COUNT)] = 16
    interconnect: Annotated[str | None, shared.INTERCONNECT] = None
    network: Annotated[str | None, shared.NETWORK] = None
    max_model_len: Annotated[
        int | None,
        About(
            "Context length in the generated commands.", unit=TOKENS, unset="the longest request"
        ),
    ] = None
    catalogue: Annotated[Path | None, shared.CATALOGUE] = None
    calibration: Annotated[Path | None, shared.CALIBRATION] = None
    manifests: Annotated[
        Path | None,
        About(
            "Write Kubernetes and Ray Serve manifests to this folder.",
            panel="Deployment",
            path="folder",
            ambient=False,
        ),
    ] = None
    cluster: Annotated[
        Cluster, About("Kind of cluster whose node labels the manifests select by.")
    ] = "gpu-operator"
    node_label: Annotated[
        str | None, About("Select nodes by this label instead.", metavar="KEY=VALUE")
    ] = None
    image: Annotated[
        str | None,
        About("vLLM image, by tag or digest.", metavar="NAME:TAG", unset="a fixed release"),
    ] = None
    ray_image: Annotated[
        str | None,
        About("Ray image with vLLM, by tag or digest.", metavar="NAME:TAG", unset="a release"),
    ] = None
    html: Annotated[Path | None, shared.HTML.but(panel="Output")] = None
    json: Annotated[bool, shared.JSON] = False
    seed: int = 0
    today: date | None = None


class SimulateOptions(Section, frozen=True, kw_only=True):
    """A fleet and its load, for a run on a virtual clock."""

    title: ClassVar[str] = "Load"
    table: ClassVar[str] = "simulate"
    prefix: ClassVar[str] = "simulate_"

    model: Annotated[str, shared.SHAPE]
    what_if: Annotated[str | None, shared.WHAT_IF] = None
    workload: Annotated[str | None, shared.WORKLOAD] = None
    input_len: Annotated[int | None, shared.INPUT_LEN.but(unset="1024")] = None
    output_len: Annotated[int | None, shared.OUTPUT_LEN.but(unset="256")] = None
    request_rate: Annotated[float, shared.REQUEST_RATE] = 1.0
    num_prompts: Annotated[
        int,
        About(
            "Requests to send; of recorded traffic, at most this many.",
            unit=COUNT,
            range=Range(1, MAX_REQUESTS),
        ),
    ] = 1000
    replay_speed: Annotated[float | None, shared.REPLAY_SPEED] = None
    batch_share: Annotated[float, shared.BATCH_SHARE] = 0.0
    background_tokens: Annotated[int | None, shared.BACKGROUND_TOKENS] = None
    off_peak: Annotated[str | None, shared.OFF_PEAK] = None
    completion_window: Annotated[float | None, shared.COMPLETION_WINDOW] = None
    slo: Annotated[str | None, shared.SLO_TEXT] = None
    accelerator: Annotated[
        str | None,
        shared.ACCELERATOR.but(
            help="Accelerator of the catalogue, or a mixed fleet: h100-sxm=2,l40s=4.",
            panel="Fleet",
            unset="the calibrated one",
        ),
    ] = None
    replicas: Annotated[
        int,
        About("Replicas; with --autoscale, the minimum.", unit=COUNT, range=Range(1, MAX_REPLICAS)),
    ] = 1
    decode_replicas: Annotated[
        int,
        About(
            "Disaggregation: how many of --replicas decode, while the others prefill.",
            unit=COUNT,
            range=Range(0, MAX_REPLICAS),
        ),
    ] = 0
    router: Annotated[Router, About("How requests are routed to replicas.")] = "least-loaded"
    further_models: Annotated[Path | None, shared.FURTHER_MODELS] = None
    tensor_parallel_size: Annotated[int, shared.TENSOR_PARALLEL] = 1
    pipeline_parallel_size: Annotated[int, shared.PIPELINE_PARALLEL.but(since="0.3")] = 1
    expert_parallel_size: Annotated[int, shared.EXPERT_PARALLEL] = 1
    attention_dp_size: Annotated[int, shared.ATTENTION_DP] = 1
    context_parallel_size: Annotated[int, shared.CONTEXT_PARALLEL] = 1
    sequence_parallel: Annotated[bool, shared.SEQUENCE_PARALLEL] = False
    interconnect: Annotated[str | None, shared.INTERCONNECT] = None
    network: Annotated[str | None, shared.NETWORK] = None
    quantization: Annotated[str | None, shared.QUANTIZATION] = None
    kv_cache_dtype: Annotated[str | None, shared.KV_CACHE_DTYPE] = None
    kv_eviction_config: Annotated[KvEviction | None, shared.KV_EVICTION] = None
    max_loras: Annotated[int | None, shared.MAX_LORAS] = None
    max_lora_rank: Annotated[int, shared.MAX_LORA_RANK] = 16
    max_num_seqs: Annotated[int | None, shared.SLOTS] = None
    max_num_batched_tokens: Annotated[int | None, shared.STEP_TOKENS] = None
    enable_chunked_prefill: Annotated[bool, shared.CHUNKED_PREFILL] = True
    block_size: Annotated[int, shared.BLOCK_TOKENS] = 16
    enforce_eager: Annotated[bool, shared.ENFORCE_EAGER] = False
    async_scheduling: Annotated[bool, shared.ASYNC_SCHEDULING] = True
    structured_share: Annotated[float, shared.STRUCTURED_SHARE] = 0.0
    token_rules_share: Annotated[float, shared.RULED_SHARE] = 0.0
    enable_prefix_caching: Annotated[
        bool, About("Share the prefixes of recorded and of pinned prompts.")
    ] = False
    pinned_len: Annotated[int, shared.PINNED_LEN] = 0
    pinned_prefixes: Annotated[int, shared.PINNED_PREFIXES] = 1
    prefix_pin_share: Annotated[float | None, PIN_SHARE] = None
    response_cache_share: Annotated[float, shared.RESPONSE_CACHE_SHARE] = 0.0
    response_cache_size: Annotated[
        int | None,
        About(
            "Memory of each replica's response cache, which answers recorded prompts that repeat.",
            unit=BYTES,
            unset="off",
            since="0.3",
        ),
    ] = None
    response_cache_ttl: Annotated[
        float | None,
        About(
            "Time for which such an answer is kept.",
            unit=DURATION,
            range=NON_NEGATIVE_SECONDS,
            unset="1 h",
            since="0.3",
        ),
    ] = None
    semantic_cache_share: Annotated[float, shared.SEMANTIC_CACHE_SHARE] = 0.0
    question_len: Annotated[int | None, shared.QUESTION_LEN.but(unset="64")] = None
    kv_tier_memory: Annotated[int | None, shared.TIER_MEMORY] = None
    kv_tier_size: Annotated[int | None, shared.TIER_FILES] = None
    kv_tier_memory_bandwidth: Annotated[int | None, shared.TIER_MEMORY_BANDWIDTH] = None
    kv_tier_file_bandwidth: Annotated[int | None, shared.TIER_FILE_BANDWIDTH] = None
    batching: Annotated[Batching, About("How requests are combined into batches.", since="0.3")] = (
        "continuous"
    )
    batch_wait_ms: Annotated[float | None, shared.BATCH_WAIT] = None
    slo_throttle: Annotated[
        bool,
        About("Admit fewer requests while the p95 TTFT or TPOT violates --slo.", since="0.3"),
    ] = False
    num_speculative_tokens: Annotated[int, shared.DRAFT_TOKENS] = 0
    acceptance: Annotated[float | None, shared.ACCEPTANCE] = None
    speculative_config: Annotated[Speculative | None, shared.SPECULATIVE] = None
    draft_share: Annotated[float, shared.DRAFT_SHARE] = 1.0
    autoscale: Annotated[
        int | None,
        About(
            "Scale up to this many replicas: by requests in flight, the age of the queue against "
            "the TTFT of --slo, and the deadlines of batch requests.",
            panel="Scaling and failures",
            unit=COUNT,
            range=Range(1, MAX_REPLICAS),
            unset="off",
        ),
    ] = None
    target_in_flight: Annotated[
        float,
        About(
            "Autoscaling: target requests in flight per replica.",
            unit=NUMBER,
            range=Range(1e-3, 1e6),
        ),
    ] = 16.0
    startup_s: Annotated[
        float,
        About(
            "Autoscaling: time until a new replica serves.",
            unit=DURATION,
            range=NON_NEGATIVE_SECONDS,
        ),
    ] = 120.0
    mtbf_s: Annotated[
        float | None,
        About(
            "Mean time between failures of a replica.",
            unit=DURATION,
            range=Range(1, MAX_SECONDS),
            unset="never fails",
        ),
    ] = None
    repair_s: Annotated[
        float,
        About("Time to repair a replica.", unit=DURATION, range=NON_NEGATIVE_SECONDS),
    ] = 120.0
    resume_requests: Annotated[bool, shared.RESUME_REQUESTS] = True
    seed: Annotated[int, shared.SEED_OF_ALL.but(panel="Runs")] = 0
    num_seeds: Annotated[
        int, About("Repeat with this many seeds, for confidence intervals.", unit=COUNT)
    ] = 1
    sweep: Annotated[
        tuple[str, ...],
        About(
            "Compare settings, as replicas=2,4,8; repeat it for all combinations.",
            metavar="NAME=VALUES",
            ambient=False,
        ),
    ] = ()
    num_workers: Annotated[
        int | None, About("With --sweep: parallel processes.", unit=COUNT, unset="the cores")
    ] = None
    step_by_step: Annotated[bool, About("Plan every step; slower, with the same result.")] = False
    catalogue: Annotated[Path | None, shared.CATALOGUE] = None
    calibration: Annotated[Path | None, shared.CALIBRATION] = None
    html: Annotated[Path | None, shared.HTML.but(panel="Output")] = None
    trace: Annotated[Path | None, shared.TRACE] = None
    json: Annotated[bool, shared.JSON] = False

    @property
    def parsed_slo(self) -> Slo | None:
        return None if self.slo is None else Slo.parse(self.slo)


class CostOptions(Section, frozen=True, kw_only=True):
    """A fleet of one's own, to be compared with providers' prices."""

    title: ClassVar[str] = "Demand"
    table: ClassVar[str] = "cost"
    prefix: ClassVar[str] = "cost_"

    model: Annotated[str, shared.SHAPE]
    accelerator: Annotated[str, shared.ACCELERATOR.but(required=True)]
    workload: Annotated[str | None, shared.WORKLOAD] = None
    input_len: Annotated[int, shared.INPUT_LEN] = 1024
    output_len: Annotated[int, shared.OUTPUT_LEN] = 256
    request_rate: Annotated[float, shared.REQUEST_RATE] = 1.0
    slo: Annotated[str, shared.SLO_TEXT] = PLANNING_SLO
    prefix_len: Annotated[int, shared.PREFIX_LEN.but(old_names=("prefix",))] = 0
    hit_rate: Annotated[float, About("Share of requests whose prefix is cached.", unit=SHARE)] = 0.0
    num_prefixes: Annotated[
        int, About("Prefixes kept in the cache.", unit=COUNT, old_names=("prefixes",), since="0.2")
    ] = 1
    batch_api: Annotated[
        bool, About("Compare with the providers' batch prices.", old_names=("batch",), since="0.2")
    ] = False
    long_lived: Annotated[bool, About("Pay providers to cache prefixes for an hour.")] = False
    price_per_hour: Annotated[float | None, shared.DEVICE_PRICE.but(panel="Prices")] = None
    commitment: Annotated[Commitment, shared.COMMITMENT] = "on-demand"
    device_prices: Annotated[Path | None, shared.DEVICE_PRICES] = None
    spot_price: Annotated[
        float | None,
        About("Spot price per device and hour, shown in addition.", unit=DOLLARS),
    ] = None
    spot_interruptions: Annotated[
        float,
        About("Spot: interruptions of a device per hour.", unit=NUMBER, range=Range(0, 3600)),
    ] = 0.05
    spot_lost_s: Annotated[
        float,
        About(
            "Spot: time lost to an interruption, restart included.",
            unit=DURATION,
            range=NON_NEGATIVE_SECONDS,
        ),
    ] = 300.0
    owned_dollars: Annotated[
        float | None,
        About("Owned devices: purchase price of one, host included.", unit=DOLLARS),
    ] = None
    owned_years: Annotated[
        float,
        About(
            "Owned devices: years in service.",
            unit=NUMBER,
            range=Range(0, 1000, exclusive=True),
        ),
    ] = 4.0
    watts: Annotated[
        float | None,
        About(
            "Owned devices: power of one under load, host included.",
            unit=NUMBER,
            range=Range(0, 1e9),
        ),
    ] = None
    dollars_per_kwh: Annotated[float, About("Owned devices: price of power.", unit=DOLLARS)] = 0.12
    pue: Annotated[
        float,
        About(
            "Owned devices: power usage effectiveness of the data centre.",
            unit=NUMBER,
            range=Range(1, 1000),
        ),
    ] = 1.3
    prices: Annotated[
        Path | None,
        About("TOML file of provider prices to use instead of the built-in.", path="input"),
    ] = None
    accept_stale: Annotated[bool, shared.ACCEPT_STALE] = False
    catalogue: Annotated[Path | None, shared.CATALOGUE] = None
    calibration: Annotated[Path | None, shared.CALIBRATION] = None
    json: Annotated[bool, shared.JSON.but(panel="Output")] = False
    today: date | None = None


class CapacityOptions(Section, frozen=True, kw_only=True):
    """A model to hold in memory."""

    title: ClassVar[str] = "Model"
    table: ClassVar[str] = "capacity"
    prefix: ClassVar[str] = "capacity_"

    model: Annotated[str, shared.SHAPE]
    accelerator: Annotated[
        str | None,
        shared.ACCELERATOR.but(
            help="Accelerators to consider, separated by commas.", metavar="NAMES", unset="all"
        ),
    ] = None
    context: Annotated[
        str | None,
        About(
            "Context lengths in tokens, separated by commas.",
            metavar="LENGTHS",
            unset="2048, 8192, 32768, 131072 and the model's own limit",
            since="0.3",
        ),
    ] = None
    quantization: Annotated[str | None, shared.QUANTIZATION] = None
    kv_cache_dtype: Annotated[str | None, shared.KV_CACHE_DTYPE] = None
    max_devices: Annotated[
        int, About("Maximum devices, split by tensor parallelism.", unit=COUNT)
    ] = 8
    memory_utilization: Annotated[
        float, About("Share of the memory that the engine may use.", unit=SHARE, since="0.3")
    ] = 0.9
    commitment: Annotated[Commitment, shared.COMMITMENT] = "on-demand"
    device_prices: Annotated[Path | None, shared.DEVICE_PRICES] = None
    catalogue: Annotated[Path | None, shared.CATALOGUE] = None
    json: Annotated[bool, shared.JSON] = False


class PackOptions(Section, frozen=True, kw_only=True):
    """Several models for a stock of devices."""

    models: Annotated[
        Path,
        About(
            "TOML file of [[model]] rows: model, rate, isl, osl, weight_dtype.",
            positional=True,
            required=True,
            path="input",
        ),
    ]
    accelerator: Annotated[
        str,
        shared.ACCELERATOR.but(
            help="Devices in stock, by their names in the catalogue: h100-sxm=2,l4=4.",
            metavar="STOCK",
            required=True,
        ),
    ]
    catalogue: Annotated[Path | None, shared.CATALOGUE] = None
    json: Annotated[bool, shared.JSON] = False


class CalibrateOptions(Section, frozen=True, kw_only=True):
    """What to calibrate: the engine on this machine, or a server."""

    engine: Annotated[
        str | None,
        About(
            "Calibrate Ridgeline's engine here with this model, larger than the caches.",
            metavar="MODEL",
        ),
    ] = None
    url: Annotated[
        str | None, shared.URL.but(help="Calibrate the server at this address, from outside.")
    ] = None
    quantization: Annotated[
        str | None,
        About(
            "With --engine: weight formats to run, separated by commas: dense, int8, int4, bf16.",
            metavar="FORMATS",
            unset="three of them",
        ),
    ] = None
    also: Annotated[
        tuple[str, ...],
        About(
            "With --engine: another model to run, which makes the fit more general; repeatable.",
            metavar="MODEL=FORMAT",
        ),
    ] = ()
    device: Annotated[
        str,
        About(
            "With --engine: device to run on: cpu, cuda, cuda:N or auto.",
            metavar="DEVICE",
            since="0.3",
        ),
    ] = "auto"
    served_model_name: Annotated[str | None, shared.SERVED_MODEL_NAME] = None
    api_key: Annotated[str | None, shared.API_KEY] = None
    tokenizer: Annotated[
        str | None,
        shared.TOKENIZER.but(
            help="With --url: model whose tokenizer counts what the server does not, and writes "
            "token ids as text for a server that takes none."
        ),
    ] = None
    output: Annotated[Path, About("Where to write the calibration.", path="file")] = Path(
        "calibration.json"
    )
    budget: Annotated[
        float, About("Time for the measurement, without loading models.", unit=DURATION)
    ] = 300.0
    json: Annotated[bool, shared.JSON] = False
