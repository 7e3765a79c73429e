"""What a server's flags do: to the steps, to the memory, and to the time of a start.

Formats, parallelism and limits act through the step-time and memory models. Constants that those
models do not have are assumptions of the usual order, and stand here together.
"""

from __future__ import annotations

import re

import msgspec

from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.plan.step_time.simulated import (
    LAUNCH_ATTENTION_S,
    LAUNCH_LAYER_S,
    SCHEDULE_SEQUENCE_S,
    SCHEDULE_STEP_S,
    HostTime,
)
from ridgeline.twin.build import TwinModel
from ridgeline.twin.config import TwinConfig, TwinDrafter
from ridgeline.twin.servers.command_line import ServerLine

GRAPH_BYTES_SHARE = 0.02  # of the device, for captured graphs
GIB = 1 << 30
MAX_SHARE = 0.97  # beyond it, allocations outside of the budget fail while serving

IMPORT_S = 9.0
LOAD_BYTES_S = 2.5e9  # per device, from local NVMe
COMPILE_S, READ_KERNELS_S, CAPTURE_S, PROFILE_S = 28.0, 6.0, 12.0, 4.0

_FORMATS = {
    "fp8": "fp8",
    "w8a8_fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "int8": "int8",
    "w8a8_int8": "int8",
    "eetq": "int8",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    "bitsandbytes": "int4",
    "bitsandbytes-nf4": "int4",
    "mxfp4": "mxfp4",
}
_KV_FORMATS = {
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e4m3fn": "fp8",
    "fp8_e5m2": "fp8",
    "q8_0": "int8",
}


_NAMED_FORMATS = (
    (r"fp8|w8a8-fp8", "fp8"),
    (r"int8|w8a8|w8a16|q8_0|gptq-int8", "int8"),
    (r"mxfp4|nvfp4", "mxfp4"),
    (r"int4|w4a16|awq|gptq|4bit|nf4|bnb|q4_|q4f16", "int4"),
)


def format_of_checkpoint(name: str) -> str | None:
    """The weight format that a checkpoint's name tells, as in `…-Instruct-AWQ`; None if none."""
    text = name.rsplit("/", 1)[-1].lower()
    return next((form for pattern, form in _NAMED_FORMATS if re.search(pattern, text)), None)


class TwinRun(msgspec.Struct, frozen=True, kw_only=True):
    """How the twin is run: the devices there are, its speed, and what drafts are worth.

    `acceptance`: the probability that a draft by lookup is accepted; `drafter_acceptance`: that one
    of a head or a draft model is.
    """

    device: str
    num_devices: int
    speed: float = 1.0
    acceptance: float = 0.6
    drafter_acceptance: float = 0.75

    def acceptance_of(self, drafter: TwinDrafter) -> float:
        """The share for lookups, or the one for heads and draft models."""
        return self.acceptance if drafter.kind == "lookup" else self.drafter_acceptance


def twin_of(line: ServerLine, run: TwinRun) -> TwinConfig:
    """The twin that a command line describes. Raises BadInput, with the server's own words where
    it would refuse to start."""
    needed = line.tp * line.dp
    if needed > run.num_devices:
        raise BadInput(
            f"{line.server}: the world size is larger than the number of available GPUs",
            value=f"tensor parallel {line.tp} x data parallel {line.dp} = {needed}",
            limit=f"{run.num_devices} x {run.device}",
        )
    if line.memory_share > MAX_SHARE:
        raise DoesNotFit(
            f"{line.server}: torch.OutOfMemoryError: CUDA out of memory while capturing",
            value=f"memory share {line.memory_share:g}",
            limit=f"{MAX_SHARE:g}",
        )
    tokens, chunked = line.max_num_batched_tokens, line.chunked_prefill
    if not chunked and line.max_model_len is not None and tokens < line.max_model_len:
        raise BadInput(
            f"{line.server}: max_num_batched_tokens is smaller than max_model_len without chunked "
            "prefill",
            value=tokens,
            limit=line.max_model_len,
        )
    host = HostTime(
        layer_s=_launch_s(line),
        step_s=0.0 if line.overlapped else SCHEDULE_STEP_S,
        sequence_s=0.0 if line.overlapped else SCHEDULE_SEQUENCE_S,
    )
    return TwinConfig(
        model=line.model,
        device=run.device,
        tp=line.tp,
        dp=line.dp,
        ep=line.tp if line.expert_parallel else line.ep,
        weight_dtype=_format(line.quantization, _FORMATS, "quantisation", line.server)
        or format_of_checkpoint(line.model),
        kv_dtype=_format(line.kv_cache_dtype, _KV_FORMATS, "KV cache dtype", line.server),
        max_num_seqs=line.max_num_seqs,
        max_num_batched_tokens=tokens,
        max_model_len=line.max_model_len,
        caps_context=line.server == "llama-server",
        utilization=line.memory_share - (GRAPH_BYTES_SHARE if line.graphs else 0.0),
        block_size=line.block_size,
        enable_prefix_caching=line.prefix_caching,
        enable_chunked_prefill=chunked,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        num_speculative_tokens=line.num_draft_tokens,
        acceptance=run.acceptance_of(line.drafter),
        drafter=line.drafter,
        offload_bytes=int(line.offload_gib * GIB),
        offload_ratio=line.offload_ratio if line.offloaded else 0.0,
        host=host,
        speed=run.speed,
        seed=line.seed,
    )


def _launch_s(line: ServerLine) -> float:
    """Time in which the host launches the kernels of a layer, while the device waits."""
    if not line.graphs:
        return LAUNCH_LAYER_S
    return 0.0 if line.graphs_of_attention else LAUNCH_ATTENTION_S


def _format(name: str | None, known: dict[str, str], what: str, server: str) -> str | None:
    if name is None or name in ("auto", "bfloat16", "float16", "bf16", "f16", "none"):
        return None
    if name not in known:
        raise BadInput(
            f"the twin of {server} has no such {what}", value=name, limit=", ".join(known)
        )
    return known[name]


def compiles(line: ServerLine) -> bool:
    """Whether a start compiles kernels, or reads them from a cache."""
    return line.compiled and line.graphs


def startup_s(line: ServerLine, model: TwinModel, *, finds_kernels: bool = False) -> float:
    """Modelled seconds from the start of the process to its first answer. `finds_kernels`: an
    earlier start has compiled them."""
    load_s = model.memory.weight_bytes / LOAD_BYTES_S
    compile_s = (READ_KERNELS_S if finds_kernels else COMPILE_S) if compiles(line) else 0.0
    capture_s = CAPTURE_S if line.graphs else 0.0
    return IMPORT_S + load_s + compile_s + capture_s + PROFILE_S
