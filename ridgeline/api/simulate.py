"""`ridgeline.simulate`: the keywords of `ridgeline simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.api.keywords import command_options
from ridgeline.config.planning import Router, SimulateOptions
from ridgeline.config.settings import Batching, Speculative
from ridgeline.records import KvEviction
from ridgeline.workflows.planning import simulate as simulate_workflow
from ridgeline.workflows.planning.simulate import SimulationResult


def simulate(
    model: str,
    *,
    what_if: str | None = None,
    workload: str | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    request_rate: float = 1.0,
    num_prompts: int = 1000,
    replay_speed: float | None = None,
    batch_share: float = 0.0,
    background_tokens: int | None = None,
    off_peak: str | None = None,
    completion_window: float | str | None = None,
    slo: str | None = None,
    accelerator: str | None = None,
    replicas: int = 1,
    decode_replicas: int = 0,
    router: Router = "least-loaded",
    further_models: str | Path | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    attention_dp_size: int = 1,
    context_parallel_size: int = 1,
    sequence_parallel: bool = False,
    interconnect: str | None = None,
    network: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    kv_eviction_config: KvEviction | dict[str, Any] | None = None,
    max_loras: int | None = None,
    max_lora_rank: int = 16,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    enable_chunked_prefill: bool = True,
    block_size: int = 16,
    enforce_eager: bool = False,
    async_scheduling: bool = True,
    structured_share: float = 0.0,
    token_rules_share: float = 0.0,
    enable_prefix_caching: bool = False,
    pinned_len: int = 0,
    pinned_prefixes: int = 1,
    prefix_pin_share: float | None = None,
    response_cache_share: float = 0.0,
    response_cache_size: int | str | None = None,
    response_cache_ttl: float | str | None = None,
    semantic_cache_share: float = 0.0,
    question_len: int | None = None,
    kv_tier_memory: int | str | None = None,
    kv_tier_size: int | str | None = None,
    kv_tier_memory_bandwidth: int | str | None = None,
    kv_tier_file_bandwidth: int | str | None = None,
    batching: Batching = "continuous",
    batch_wait_ms: float | None = None,
    slo_throttle: bool = False,
    num_speculative_tokens: int = 0,
    acceptance: float | None = None,
    speculative_config: Speculative | dict[str, Any] | None = None,
    draft_share: float = 1.0,
    autoscale: int | None = None,
    target_in_flight: float = 16.0,
    startup_s: float | str = 120.0,
    mtbf_s: float | str | None = None,
    repair_s: float | str = 120.0,
    resume_requests: bool = True,
    seed: int = 0,
    step_by_step: bool = False,
    catalogue: str | Path | None = None,
    calibration: str | Path | None = None,
) -> SimulationResult:
    """Simulate a fleet under a load, with the engine's own scheduler.

    >>> import ridgeline
    >>> run = ridgeline.simulate("qwen3-8b", accelerator="l40s", num_prompts=50, slo="ttft:500")
    >>> run.summary.attainment
    1.0

    Args:
        model: Name of a published architecture, a config.json, or a model directory.
        what_if: Edit the model's shape: 'key=N' of layers, channels, experts_per_token,
            attention_every, own_head, latent, kv_heads, window, global_every and share.
        workload: Requests to send: chat-and-code, chat, code,
            synthetic:input=256,output=128, synthetic-chat, rag, code-edit, long-document,
            batch, FILE.jsonl, or recorded traffic: sharegpt:FILE, conversations:FILE,
            azure:FILE, burstgpt:FILE, mooncake:FILE.
        input_len: Prompt tokens of a request (default: 1024).
        output_len: Output tokens of a request (default: 256).
        request_rate: Requests per second, Poisson arrivals.
        num_prompts: Requests to send; of recorded traffic, at most this many.
        replay_speed: Replay recorded arrival times, sped up by this factor.
        batch_share: Share of requests that run in the background.
        background_tokens: Token budget of background (batch) requests in a step that also serves
            interactive requests (default: what --slo leaves).
        off_peak: When background requests run: 22:00-06:00, optionally @18:30 for the start
            time.
        completion_window: Background requests come from a batch store, which gives each of them
            this time (default: they are routed, without a deadline).
        slo: Latency limits in milliseconds: 'ttft:200 tpot:50 e2e:5000 error:1%'.
        accelerator: Accelerator of the catalogue, or a mixed fleet: h100-sxm=2,l40s=4
            (default: the calibrated one).
        replicas: Replicas; with --autoscale, the minimum.
        decode_replicas: Disaggregation: how many of --replicas decode, while the others
            prefill.
        router: How requests are routed to replicas.
        further_models: TOML file of [[model]] rows of further models on the same devices.
        tensor_parallel_size: Devices that every layer is split over.
        pipeline_parallel_size: Stages that the layers are divided into.
        expert_parallel_size: Devices that whole experts are spread over.
        attention_dp_size: Data-parallel attention groups: separate sequences, shared experts.
        context_parallel_size: Devices, for each one that a layer is split over, that divide the KV
            cache of every sequence.
        sequence_parallel: With tensor parallelism, each process or device normalises a part of a
            step's rows.
        interconnect: Link between the devices of a node: nvlink3 to nvlink5, pcie3 to pcie5
            (default: the device's own).
        network: Link between nodes, one per device: ethernet-10, -25, -100, infiniband-hdr,
            -ndr, -xdr (default: 400 Gbit/s).
        quantization: Weight format: float32, bfloat16, float16, fp8, fp8-block, int8, int8-wo,
            llm-int8, int4, int4-g64, mxfp4, nvfp4, nf4, sparse-24, sparse-24-int8, or mixed-B of B
            bits on average (default: as stored).
        kv_cache_dtype: KV cache format: float32, bfloat16, float16, fp8, int8 or int4 (default:
            as stored).
        kv_eviction_config: Policy by which Ridgeline's engine evicts keys and values (lossy), as
            JSON: '{"method": "streaming", "budget": 1024}' (default: all are kept).
        max_loras: LoRA adapters that are loaded, and used in every step (default: none).
        max_lora_rank: Rank of those adapters.
        max_num_seqs: Maximum sequences running at once on a replica (default: 256; with
            --calibration 64).
        max_num_batched_tokens: Token budget of one step (default: 8192; with --calibration
            512).
        enable_chunked_prefill: Compute long prompts in chunks over several steps.
        block_size: Tokens of a block of the KV cache.
        enforce_eager: Launch every kernel from the host, without captured graphs.
        async_scheduling: Schedule a step while the last one runs.
        structured_share: Share of the requests whose output follows a schema or a grammar.
        token_rules_share: Share of the requests with bad_words or a thinking budget.
        enable_prefix_caching: Share the prefixes of recorded and of pinned prompts.
        pinned_len: Tokens at the start of every prompt that are a pinned prefix, as by
            cache_control.
        pinned_prefixes: With --pinned-len: how many different prefixes there are.
        prefix_pin_share: Share of the KV cache that pinned prefixes may take; one API key gets half
            of it (default: 0.5).
        response_cache_share: Share of requests that the response cache answers without a step.
        response_cache_size: Memory of each replica's response cache, which answers recorded prompts
            that repeat (default: off).
        response_cache_ttl: Time for which such an answer is kept (default: 1 h).
        semantic_cache_share: Share of requests that get the stored answer to a similar question.
        question_len: With --semantic-cache-share: tokens of a question, which are embedded for
            every request without an exact answer (default: 64).
        kv_tier_memory: Host memory for evicted KV blocks (default: none).
        kv_tier_size: Maximum size of the files for evicted KV blocks (default: none).
        kv_tier_memory_bandwidth: Bytes per second between the KV cache and its memory tier
            (default: 4 GB).
        kv_tier_file_bandwidth: Bytes per second from its files (default: 0.5 GB).
        batching: How requests are combined into batches.
        batch_wait_ms: Dynamic batching: maximum wait for a fuller batch (default: what the TTFT of
            --slo leaves at the p95, or 10).
        slo_throttle: Admit fewer requests while the p95 TTFT or TPOT violates --slo.
        num_speculative_tokens: Speculative decoding: draft tokens per sequence and step.
        acceptance: Speculative decoding: probability that a draft token is accepted.
        speculative_config: Speculative decoding, as of `serve`: '{"method": "eagle",
            "num_speculative_tokens": 3}'; without a number, as many as pay (default: off).
        draft_share: Share of the sequences that have a draft in a step, such as requests with a
            prediction; of method auto, that have one by lookup.
        autoscale: Scale up to this many replicas: by requests in flight, the age of the queue
            against the TTFT of --slo, and the deadlines of batch requests (default: off).
        target_in_flight: Autoscaling: target requests in flight per replica.
        startup_s: Autoscaling: time until a new replica serves.
        mtbf_s: Mean time between failures of a replica (default: never fails).
        repair_s: Time to repair a replica.
        resume_requests: Requests of a failed replica continue elsewhere behind the tokens that they
            have.
        seed: Seed of everything random.
        step_by_step: Plan every step; slower, with the same result.
        catalogue: TOML catalogue of accelerators to use instead of the built-in.
        calibration: Calibration written by `ridgeline calibrate`; adds its device,
            this-machine.

    Returns:
        The simulated run: its figures, and a page like that of a measured run.

    Raises:
        UserError: An option is wrong, or what it describes cannot run.
    """
    return simulate_workflow.simulate(command_options("simulate", SimulateOptions, locals()))
