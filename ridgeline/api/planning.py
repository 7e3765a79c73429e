"""Planning without hardware: plan, predict, cost and more."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any, Literal

from ridgeline.api.keywords import command_options
from ridgeline.config.load import OperatorTimes, PredictOptions
from ridgeline.config.planning import (
    PLANNING_SLO,
    CapacityOptions,
    Cluster,
    CostOptions,
    PackOptions,
    PlanOptions,
)
from ridgeline.config.settings import Speculative
from ridgeline.config.shared import QuantizeMethod
from ridgeline.config.tools import TABLES_URL, CatalogueOptions
from ridgeline.records import KvEviction
from ridgeline.records.price import Commitment
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.planning import capacity as capacity_workflow
from ridgeline.workflows.planning import catalogue as catalogue_workflow
from ridgeline.workflows.planning import cost as cost_workflow
from ridgeline.workflows.planning import pack as pack_workflow
from ridgeline.workflows.planning import plan as plan_workflow
from ridgeline.workflows.planning import predict as predict_workflow
from ridgeline.workflows.planning.capacity import CapacityResult
from ridgeline.workflows.planning.catalogue import CatalogueResult
from ridgeline.workflows.planning.cost import CostResult
from ridgeline.workflows.planning.pack import PackResult
from ridgeline.workflows.planning.plan import PlanResult
from ridgeline.workflows.planning.predict import OperatingPointResult


def plan(
    model: str,
    *,
    workload: str | None = None,
    from_traffic: str | None = None,
    traffic_duration: float | str = 60.0,
    api_key: str | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    request_rate: float = 1.0,
    dropped_context_share: float = 0.0,
    document_len: int | None = None,
    keep_ratio: float | None = None,
    new_document_share: float = 1.0,
    fallback_share: float = 0.0,
    canary_shadow_share: float = 0.0,
    batch_rate: float = 0.0,
    mean_request_rate: float | None = None,
    background_tokens: int | None = None,
    response_cache_share: float = 0.0,
    semantic_cache_share: float = 0.0,
    question_len: int | None = None,
    pinned_len: int = 0,
    pinned_prefixes: int = 1,
    cached_share: float = 0.0,
    kv_tier_memory_share: float = 0.0,
    kv_tier_file_share: float = 0.0,
    kv_tier_memory_bandwidth: int | str | None = None,
    kv_tier_file_bandwidth: int | str | None = None,
    slo: str = PLANNING_SLO,
    accelerator: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    max_loras: int | None = None,
    max_lora_rank: int = 16,
    monthly_budget: float | None = None,
    price_per_hour: float | None = None,
    commitment: Commitment = "on-demand",
    device_prices: str | Path | None = None,
    accept_stale: bool = False,
    max_devices: int = 16,
    interconnect: str | None = None,
    network: str | None = None,
    max_model_len: int | None = None,
    catalogue: str | Path | None = None,
    calibration: str | Path | None = None,
    manifests: str | Path | None = None,
    cluster: Cluster = "gpu-operator",
    node_label: str | None = None,
    image: str | None = None,
    ray_image: str | None = None,
) -> PlanResult:
    """Choose hardware and a fleet for a demand and an SLO.

    >>> import ridgeline
    >>> plan = ridgeline.plan(
    ...     "llama-3.1-8b", accelerator="h100-sxm", max_devices=1, quantization="bfloat16"
    ... )
    >>> cheapest = plan.fleets[0]
    >>> cheapest.device, cheapest.num_devices
    ('h100-sxm', 1)

    Args:
        model: Name of a published architecture, a config.json, or a model directory.
        workload: Requests to send: chat-and-code, chat, code,
            synthetic:input=256,output=128, synthetic-chat, rag, code-edit, long-document,
            batch, FILE.jsonl, or recorded traffic: sharegpt:FILE, conversations:FILE,
            azure:FILE, burstgpt:FILE, mooncake:FILE.
        from_traffic: Take lengths, rate and prefix sharing from the metrics of this running
            server.
        traffic_duration: With --from-traffic: how long to read its metrics (default: 1m).
        api_key: API key of the server.
        input_len: Prompt tokens of a request (default: 1024).
        output_len: Output tokens of a request (default: 256).
        request_rate: Requests per second, Poisson arrivals.
        dropped_context_share: Share of the prompt tokens that context reduction drops as
            duplicates.
        document_len: Tokens of a prompt that are documents to compress (default: 0).
        keep_ratio: Share of the documents' tokens that compression keeps (default: not compressed).
        new_document_share: Share of the documents that were not compressed before, and are read
            once to score them.
        fallback_share: Share of the requests that a managed API answers, at its price.
        canary_shadow_share: Canary: share of the requests whose copy a new version answers, on
            replicas for it alone.
        batch_rate: Batch requests per second, on average, that the fleet serves in the troughs.
        mean_request_rate: With --batch-rate: mean of the rate over a completion window, of which
            --request-rate is the peak (default: --request-rate).
        background_tokens: Token budget of background (batch) requests in a step that also serves
            interactive requests (default: what --slo leaves).
        response_cache_share: Share of requests that the response cache answers without a step.
        semantic_cache_share: Share of requests that get the stored answer to a similar question.
        question_len: With --semantic-cache-share: tokens of a question, which are embedded for
            every request without an exact answer (default: 64).
        pinned_len: Tokens at the start of every prompt that are a pinned prefix, as by
            cache_control.
        pinned_prefixes: With --pinned-len: how many different prefixes there are.
        cached_share: Share of prompt tokens found in the prefix cache.
        kv_tier_memory_share: Share found in its memory tier.
        kv_tier_file_share: Share found in its files.
        kv_tier_memory_bandwidth: Bytes per second between the KV cache and its memory tier
            (default: 4 GB).
        kv_tier_file_bandwidth: Bytes per second from its files (default: 0.5 GB).
        slo: Latency limits in milliseconds: 'ttft:200 tpot:50 e2e:5000 error:1%'.
        accelerator: Accelerators to consider, separated by commas (default: all that have a
            price).
        quantization: Weight formats to consider, separated by commas (default: as stored,
            and fp8).
        kv_cache_dtype: KV cache formats to consider, separated by commas (default: as
            stored, and fp8).
        max_loras: LoRA adapters that are loaded, and used in every step (default: none).
        max_lora_rank: Rank of those adapters.
        monthly_budget: Maximum cost per month.
        price_per_hour: Price per device and hour (default: from the catalogue).
        commitment: Which of the catalogue's prices to count with: on-demand, spot,
            reserved-1y, reserved-3y or owned.
        device_prices: TOML file of [[price]] rows to use with the catalogue's;
            `ridgeline catalogue --output` writes one.
        accept_stale: Use prices older than a year; the output says so.
        max_devices: Maximum devices of one replica.
        interconnect: Link between the devices of a node: nvlink3 to nvlink5, pcie3 to pcie5
            (default: the device's own).
        network: Link between nodes, one per device: ethernet-10, -25, -100, infiniband-hdr,
            -ndr, -xdr (default: 400 Gbit/s).
        max_model_len: Context length in the generated commands (default: the longest
            request).
        catalogue: TOML catalogue of accelerators to use instead of the built-in.
        calibration: Calibration written by `ridgeline calibrate`; adds its device,
            this-machine.
        manifests: Write Kubernetes and Ray Serve manifests to this folder.
        cluster: Kind of cluster whose node labels the manifests select by.
        node_label: Select nodes by this label instead.
        image: vLLM image, by tag or digest (default: a fixed release).
        ray_image: Ray image with vLLM, by tag or digest (default: a release).

    Returns:
        The fleets that meet the SLO, cheapest first, and the commands that start the first.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    options = command_options("plan", PlanOptions, locals())
    result = plan_workflow.plan(options)
    if options.manifests is not None:
        result.save_manifests(options.manifests)
    return result


def predict(
    model: str | None = None,
    *,
    what_if: str | None = None,
    accelerator: str | None = None,
    input_len: int = 1024,
    output_len: int = 256,
    thinking_len: int = 0,
    thinking_token_budget: int | None = None,
    beam_width: int = 1,
    max_concurrency: int = 1,
    cached_tokens: int = 0,
    kv_tier_memory_tokens: int = 0,
    kv_tier_file_tokens: int = 0,
    kv_tier_memory_bandwidth: int | str | None = None,
    kv_tier_file_bandwidth: int | str | None = None,
    quantization: str | None = None,
    quantization_method: QuantizeMethod | None = None,
    embedding_bits: Literal[4, 8] | None = None,
    kv_cache_dtype: str | None = None,
    kv_eviction_config: KvEviction | dict[str, Any] | None = None,
    max_loras: int | None = None,
    max_lora_rank: int = 16,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    moe_tensor_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    sequence_parallel: bool = False,
    attention_dp_size: int = 1,
    backend: str | None = None,
    interconnect: str | None = None,
    network: str | None = None,
    max_num_batched_tokens: int | None = None,
    num_speculative_tokens: int = 0,
    acceptance: float | None = None,
    draft_model: str | None = None,
    speculative_config: Speculative | dict[str, Any] | None = None,
    draft_share: float = 1.0,
    catalogue: str | Path | None = None,
    calibration: str | Path | None = None,
    operators: OperatorTimes = "analytic",
    explain: bool = False,
) -> OperatingPointResult:
    """Predict latency, throughput and memory from arithmetic alone.

    >>> import ridgeline
    >>> point = ridgeline.predict("llama-3.1-8b", accelerator="h100-sxm", max_concurrency=32)
    >>> point.prediction.bound
    'bandwidth'

    Args:
        model: Name of a published architecture, a config.json, or a model directory.
        what_if: Edit the model's shape: 'key=N' of layers, channels, experts_per_token,
            attention_every, own_head, latent, kv_heads, window, global_every and share.
        accelerator: Accelerator, by its name in the catalogue (`ridgeline predict
            --list-models`) (default: the calibrated one).
        input_len: Prompt tokens of a request.
        output_len: Output tokens of a request.
        thinking_len: Tokens of an output that are thinking.
        thinking_token_budget: Tokens after which the thinking is ended (default: no limit).
        beam_width: Beam search: beams of every request.
        max_concurrency: Requests in flight, in a closed loop.
        cached_tokens: Prompt tokens found in the prefix cache.
        kv_tier_memory_tokens: Further tokens found in its memory tier.
        kv_tier_file_tokens: Further tokens found in its files.
        kv_tier_memory_bandwidth: Bytes per second between the KV cache and its memory tier
            (default: 4 GB).
        kv_tier_file_bandwidth: Bytes per second from its files (default: 0.5 GB).
        quantization: Weight format: float32, bfloat16, float16, fp8, fp8-block, int8, int8-wo,
            llm-int8, int4, int4-g64, mxfp4, nvfp4, nf4, sparse-24, sparse-24-int8, or mixed-B of B
            bits on average (default: as stored).
        quantization_method: Method of `ridgeline quantize` whose cost to make the weights is
            predicted too (default: not predicted).
        embedding_bits: Bits of a packed embedding table (default: as stored).
        kv_cache_dtype: KV cache format: float32, bfloat16, float16, fp8, int8 or int4 (default:
            as stored).
        kv_eviction_config: Policy by which Ridgeline's engine evicts keys and values (lossy), as
            JSON: '{"method": "streaming", "budget": 1024}' (default: all are kept).
        max_loras: LoRA adapters that are loaded, and used in every step (default: none).
        max_lora_rank: Rank of those adapters.
        tensor_parallel_size: Devices that every layer is split over.
        pipeline_parallel_size: Stages that the layers are divided into.
        expert_parallel_size: Devices that whole experts are spread over.
        context_parallel_size: Devices, for each one that a layer is split over, that divide the KV
            cache of every sequence.
        sequence_parallel: With tensor parallelism, each process or device normalises a part of a
            step's rows.
        moe_tensor_parallel_size: Devices that each expert's matrices are split over (default:
            what expert parallelism leaves).
        attention_dp_size: Data-parallel attention groups: separate sequences, shared experts.
        backend: Engine whose overheads are predicted: vllm, sglang or trtllm (default: the
            mean of the three).
        interconnect: Link between the devices of a node: nvlink3 to nvlink5, pcie3 to pcie5
            (default: the device's own).
        network: Link between nodes, one per device: ethernet-10, -25, -100, infiniband-hdr,
            -ndr, -xdr (default: 400 Gbit/s).
        max_num_batched_tokens: Token budget of one step (default: 8192; with --calibration
            512).
        num_speculative_tokens: Speculative decoding: draft tokens per sequence and step.
        acceptance: Speculative decoding: probability that a draft token is accepted.
        draft_model: Speculative decoding: draft model on the same devices (default: n-gram
            lookup, at no cost).
        speculative_config: Speculative decoding, as of `serve`: '{"method": "eagle",
            "num_speculative_tokens": 3}'; without a number, as many as pay (default: off).
        draft_share: Share of the sequences that have a draft in a step, such as requests with a
            prediction; of method auto, that have one by lookup.
        catalogue: TOML catalogue of accelerators to use instead of the built-in.
        calibration: Calibration written by `ridgeline calibrate`; adds its device,
            this-machine.
        operators: Times of products, experts, attention and all-reduces: analytic, or measured
            on this device under --backend (needs ridgeline[silicon]).
        explain: Show the terms of the prediction: where the time goes.

    Returns:
        The prediction, with its memory and bounds.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    options = command_options("predict", PredictOptions, locals())
    return predict_workflow.predict_point(
        predict_workflow.operating_point(options),
        predict_workflow.sources_of(options),
        explain=options.explain,
    )


def cost(
    model: str,
    *,
    accelerator: str,
    workload: str | None = None,
    input_len: int = 1024,
    output_len: int = 256,
    request_rate: float = 1.0,
    slo: str = PLANNING_SLO,
    prefix_len: int = 0,
    hit_rate: float = 0.0,
    num_prefixes: int = 1,
    batch_api: bool = False,
    long_lived: bool = False,
    price_per_hour: float | None = None,
    commitment: Commitment = "on-demand",
    device_prices: str | Path | None = None,
    spot_price: float | None = None,
    spot_interruptions: float = 0.05,
    spot_lost_s: float | str = 300.0,
    owned_dollars: float | None = None,
    owned_years: float = 4.0,
    watts: float | None = None,
    dollars_per_kwh: float = 0.12,
    pue: float = 1.3,
    prices: str | Path | None = None,
    accept_stale: bool = False,
    catalogue: str | Path | None = None,
    calibration: str | Path | None = None,
) -> CostResult:
    """Compare the cost of a fleet with API providers.

    >>> import ridgeline
    >>> cost = ridgeline.cost(
    ...     "llama-3.1-8b", accelerator="l4", price_per_hour=0.7, accept_stale=True
    ... )
    >>> cost.dollars_per_hour
    0.7

    Args:
        model: Name of a published architecture, a config.json, or a model directory.
        accelerator: Accelerator, by its name in the catalogue (`ridgeline predict
            --list-models`).
        workload: Requests to send: chat-and-code, chat, code,
            synthetic:input=256,output=128, synthetic-chat, rag, code-edit, long-document,
            batch, FILE.jsonl, or recorded traffic: sharegpt:FILE, conversations:FILE,
            azure:FILE, burstgpt:FILE, mooncake:FILE.
        input_len: Prompt tokens of a request.
        output_len: Output tokens of a request.
        request_rate: Requests per second, Poisson arrivals.
        slo: Latency limits in milliseconds: 'ttft:200 tpot:50 e2e:5000 error:1%'.
        prefix_len: Prompt tokens that all requests share.
        hit_rate: Share of requests whose prefix is cached.
        num_prefixes: Prefixes kept in the cache.
        batch_api: Compare with the providers' batch prices.
        long_lived: Pay providers to cache prefixes for an hour.
        price_per_hour: Price per device and hour (default: from the catalogue).
        commitment: Which of the catalogue's prices to count with: on-demand, spot,
            reserved-1y, reserved-3y or owned.
        device_prices: TOML file of [[price]] rows to use with the catalogue's;
            `ridgeline catalogue --output` writes one.
        spot_price: Spot price per device and hour, shown in addition.
        spot_interruptions: Spot: interruptions of a device per hour.
        spot_lost_s: Spot: time lost to an interruption, restart included.
        owned_dollars: Owned devices: purchase price of one, host included.
        owned_years: Owned devices: years in service.
        watts: Owned devices: power of one under load, host included.
        dollars_per_kwh: Owned devices: price of power.
        pue: Owned devices: power usage effectiveness of the data centre.
        prices: TOML file of provider prices to use instead of the built-in.
        accept_stale: Use prices older than a year; the output says so.
        catalogue: TOML catalogue of accelerators to use instead of the built-in.
        calibration: Calibration written by `ridgeline calibrate`; adds its device,
            this-machine.

    Returns:
        What the fleet costs, and every provider's offer, cheapest first.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    return cost_workflow.cost(command_options("cost", CostOptions, locals()))


def capacity(
    model: str,
    *,
    accelerator: str | None = None,
    context: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    max_devices: int = 8,
    memory_utilization: float = 0.9,
    commitment: Commitment = "on-demand",
    device_prices: str | Path | None = None,
    catalogue: str | Path | None = None,
) -> CapacityResult:
    """Show which devices hold a model, and how many sequences of which length.

    >>> import ridgeline
    >>> row, = ridgeline.capacity("llama-3.1-8b", accelerator="l4", context="4096").rows
    >>> row.num_devices, row.num_seqs[4096] > 0
    (1, True)

    Args:
        model: Name of a published architecture, a config.json, or a model directory.
        accelerator: Accelerators to consider, separated by commas (default: all).
        context: Context lengths in tokens, separated by commas (default: 2048, 8192, 32768,
            131072 and the model's own limit).
        quantization: Weight format: float32, bfloat16, float16, fp8, fp8-block, int8, int8-wo,
            llm-int8, int4, int4-g64, mxfp4, nvfp4, nf4, sparse-24, sparse-24-int8, or mixed-B of B
            bits on average (default: as stored).
        kv_cache_dtype: KV cache format: float32, bfloat16, float16, fp8, int8 or int4 (default: as
            stored).
        max_devices: Maximum devices, split by tensor parallelism.
        memory_utilization: Share of the memory that the engine may use.
        commitment: Which of the catalogue's prices to count with: on-demand, spot,
            reserved-1y, reserved-3y or owned.
        device_prices: TOML file of [[price]] rows to use with the catalogue's;
            `ridgeline catalogue --output` writes one.
        catalogue: TOML catalogue of accelerators to use instead of the built-in.

    Returns:
        For each device the smallest replica, least memory first, and why others are too small.

    Raises:
        UserError: An option is wrong, or a file cannot be read.
    """
    return capacity_workflow.capacity(command_options("capacity", CapacityOptions, locals()))


def catalogue(
    device: str | None = None,
    *,
    commitment: Commitment = "on-demand",
    prices: str | Path | None = None,
    as_of: date | None = None,
    update: bool = False,
    tables_url: str = TABLES_URL,
    catalogue: str | Path | None = None,
    observer: Observer = silent,
) -> CatalogueResult:
    """List accelerators and what they cost to rent.

    >>> import ridgeline
    >>> row, = ridgeline.catalogue("h100-sxm").rows
    >>> row.device.memory_bytes, row.chosen.price.commitment
    (80000000000, 'on-demand')

    Args:
        device: Show this accelerator with all its prices.
        commitment: Which of the catalogue's prices to count with: on-demand, spot,
            reserved-1y, reserved-3y or owned.
        prices: Add prices: a TOML file of [[price]] rows, or a folder of SkyPilot's price
            tables (CLOUD/vms.csv). They replace those of the same provider and commitment.
        as_of: With a folder of price tables: the day they were fetched.
        update: Download today's prices: SkyPilot's tables of six clouds.
        tables_url: With --update: where the tables are.
        catalogue: TOML catalogue of accelerators to use instead of the built-in.
        observer: Receives the progress of the download.

    Returns:
        The devices with their prices; save them with `ridgeline.hardware.catalogue.prices_toml`.

    Raises:
        UserError: A file cannot be read, a device is unknown, or the download failed.
    """
    options = command_options("catalogue", CatalogueOptions, locals())
    return catalogue_workflow.catalogue(options, observer)


def pack(
    models: str | Path, *, accelerator: str, catalogue: str | Path | None = None
) -> PackResult:
    """Place several models on a stock of devices.

    >>> import ridgeline
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> rows = ["[[model]]", "model = 'llama-3.1-8b'", "rate = 1.0", "isl = 512", "osl = 128"]
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "models.toml")
    ...     _ = file.write_text(chr(10).join(rows))
    ...     result = ridgeline.pack(file, accelerator="h100-sxm=1")
    >>> [device.name for device in result.packing.devices]
    ['h100-sxm']

    Args:
        models: TOML file of [[model]] rows: model, rate, isl, osl, weight_dtype.
        accelerator: Devices in stock, by their names in the catalogue: h100-sxm=2,l4=4.
        catalogue: TOML catalogue of accelerators to use instead of the built-in.

    Returns:
        Which models share which device.

    Raises:
        UserError: An option is wrong, or the models do not fit.
    """
    options = command_options("pack", PackOptions, locals())
    return pack_workflow.pack(options.models, options.accelerator, catalogue=options.catalogue)
