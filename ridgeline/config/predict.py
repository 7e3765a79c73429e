"""Options of `ridgeline predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ridgeline.config import shared
from ridgeline.config.option import About, Section
from ridgeline.config.units import COUNT, NON_NEGATIVE_COUNT, TOKENS
from ridgeline.records import KvEviction

OperatorTimes = Literal["analytic", "measured"]


class PredictOptions(Section, frozen=True, kw_only=True):
    """One operating point, or a file of them."""

    title: ClassVar[str] = "Operating point"
    table: ClassVar[str] = "predict"
    prefix: ClassVar[str] = "predict_"

    model: Annotated[str | None, shared.SHAPE.but(required=False)] = None
    accelerator: Annotated[str | None, shared.ACCELERATOR.but(unset="the calibrated one")] = None
    input_len: Annotated[int, shared.INPUT_LEN] = 1024
    output_len: Annotated[int, shared.OUTPUT_LEN] = 256
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
