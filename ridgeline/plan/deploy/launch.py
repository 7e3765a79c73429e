"""Commands that start a planned replica with Ridgeline, vLLM, TensorRT-LLM or SGLang.

Flags are those of `vllm serve`, `trtllm-serve` (`--kv_cache_dtype`: NVIDIA/TensorRT-LLM, pull
request 11487, 2026-03) and SGLang's `launch_server` of 2026. A command starts exactly what was
planned, including formats. Commands that create the weights precede it; for an engine that cannot
run the plan, or whose support is unknown, the reason replaces the command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from ridgeline.hardware.catalogue import Accelerator
from ridgeline.plan.fleet.search import Candidate

_WIDE = ("float32", "bfloat16", "float16")
_BITS = MappingProxyType({"int8": 8, "int4": 4})
_FP8 = "float8_e4m3"
_OWN_FORMATS = MappingProxyType({"int8": "int8", "int4": "int4", _FP8: "fp8", "nvfp4": "nvfp4"})
"""Ridgeline's names of the formats that it quantises to when loading."""


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate to start on a device.

    `model`: a folder, or a name on the Hugging Face hub (`on_hub`); `stored`: the format of its
    weights in the checkpoint.
    """

    candidate: Candidate
    device: Accelerator
    model: str
    stored: str
    max_model_len: int
    on_hub: bool = False

    @property
    def folder(self) -> str:
        """The local folder of the model, or the folder to which it is downloaded."""
        return self.model.rpartition("/")[2] if self.on_hub else self.model

    @property
    def download(self) -> list[str]:
        return [f"hf download {self.model} --local-dir {self.folder}"] if self.on_hub else []


class LaunchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command line. `first`: commands or comments that precede it."""

    words: list[str]
    first: list[str] = []


class CannotLaunch(Exception):
    """An engine cannot run the plan; the message says why."""


def launch_commands(start: LaunchPlan) -> dict[str, str]:
    """Engine name → the commands that start one replica, one per line; or a comment with the reason
    if the engine cannot run it."""
    return {name: _text(command_of, start) for name, command_of in _ENGINES.items()}


def _text(command_of: Callable[[LaunchPlan], LaunchCommand], start: LaunchPlan) -> str:
    try:
        command = command_of(start)
    except CannotLaunch as reason:
        return f"# {reason}"
    return "\n".join([*command.first, " ".join(command.words)])


def _check_context(engine: str, start: LaunchPlan) -> None:
    """Raise CannotLaunch for a layout that divides the KV cache by positions, where `engine` is not
    known to."""
    layout = start.candidate.layout
    if layout.cp > 1 or (layout.dcp > 1 and engine != "vLLM"):
        raise CannotLaunch(f"no {engine} command is known for {layout}")
    if layout.dcp > 1 and start.candidate.kv_dtype not in _WIDE:
        raise CannotLaunch(
            f"vLLM is not known to divide a KV cache of {start.candidate.kv_dtype} by positions"
        )


# ---- engines -----------------------------------------------------------------------------------


def _ridgeline(start: LaunchPlan) -> LaunchCommand:
    candidate, weights, kv = start.candidate, start.candidate.weight_dtype, start.candidate.kv_dtype
    if candidate.layout.num_devices > 1:
        number = candidate.layout.num_devices
        raise CannotLaunch(f"Ridgeline never ran on several devices; this replica needs {number}")
    if weights not in (*_WIDE, *_OWN_FORMATS):
        raise CannotLaunch(f"Ridgeline has no kernels for {weights} weights")
    if start.device.vendor != "NVIDIA" and start.device.kind != "cpu":
        raise CannotLaunch(f"Ridgeline runs on CPUs and CUDA devices, not on {start.device.name}")
    words = ["ridgeline", "serve", start.folder]
    words += ["--device", "cpu" if start.device.kind == "cpu" else "cuda"]
    if weights != start.stored:
        own = _OWN_FORMATS.get(weights)
        words += ["--dtype", weights] if own is None else ["--quantization", own]
    if kv != weights or weights not in _WIDE:
        words += ["--kv-cache-dtype", _OWN_FORMATS.get(kv, kv)]
    words += [
        "--max-model-len",
        str(start.max_model_len),
        "--max-num-seqs",
        str(candidate.max_num_seqs),
    ]
    words += ["--max-num-batched-tokens", str(candidate.max_num_batched_tokens)]
    return LaunchCommand(first=start.download, words=words)


def vllm_command(start: LaunchPlan) -> LaunchCommand:
    """The `vllm serve` command of one replica. Raises CannotLaunch."""
    candidate, layout = start.candidate, start.candidate.layout
    _check_context("vLLM", start)
    first, model, words = _weights("vLLM", start)
    if candidate.kv_dtype == "int8":
        raise CannotLaunch("vLLM has no int8 KV cache; fp8 is as small: use --kv-cache-dtype fp8")
    all_devices = layout.num_expert_devices
    if layout.ep not in (1, all_devices):
        raise CannotLaunch(
            f"vLLM spreads experts over all {all_devices} devices or over none, not {layout.ep}"
        )
    words += ["--kv-cache-dtype", "fp8"] if candidate.kv_dtype == _FP8 else []
    words += _split("--tensor-parallel-size", layout.tp)
    words += _split("--decode-context-parallel-size", layout.dcp)
    words += _split("--pipeline-parallel-size", layout.pp)
    words += ["--enable-expert-parallel"] if layout.ep > 1 else []
    words += _split("--data-parallel-size", layout.num_attention)
    sizes = [
        "--max-model-len",
        str(start.max_model_len),
        "--max-num-seqs",
        str(candidate.max_num_seqs),
    ]
    sizes += ["--max-num-batched-tokens", str(candidate.max_num_batched_tokens)]
    sizes += ["--gpu-memory-utilization", "0.9"]
    return LaunchCommand(first=first, words=["vllm", "serve", model, *sizes, *words])


def sglang_command(start: LaunchPlan) -> LaunchCommand:
    """The SGLang command of one replica. Raises CannotLaunch."""
    candidate, layout = start.candidate, start.candidate.layout
    _check_context("SGLang", start)
    first, model, words = _weights("SGLang", start)
    if candidate.kv_dtype == "int8":
        raise CannotLaunch("SGLang has no int8 KV cache; fp8 is as small: use --kv-cache-dtype fp8")
    words += ["--kv-cache-dtype", "fp8_e4m3"] if candidate.kv_dtype == _FP8 else []
    tp = layout.tp * layout.num_attention  # SGLang counts all devices of a stage as tp
    words += _split("--tp-size", tp) + _split("--pp-size", layout.pp)
    words += _split("--ep-size", layout.ep)
    words += ["--enable-dp-attention"] if layout.num_attention > 1 else []
    words += _split("--dp-size", layout.num_attention)
    head = ["python", "-m", "sglang.launch_server", "--model-path", model]
    sizes = ["--context-length", str(start.max_model_len)]
    sizes += ["--max-running-requests", str(candidate.max_num_seqs)]
    sizes += ["--chunked-prefill-size", str(candidate.max_num_batched_tokens)]
    return LaunchCommand(first=first, words=[*head, *sizes, *words, "--mem-fraction-static", "0.9"])


def _weights(engine: str, start: LaunchPlan) -> tuple[list[str], str, list[str]]:
    """(commands to run first, model to serve, flags for its format), for vLLM and SGLang."""
    weights = start.candidate.weight_dtype
    if start.device.kind not in ("gpu", "tpu", "npu"):
        raise CannotLaunch(f"no {engine} command is known for {start.device.name}")
    if weights == start.stored:
        return [], start.model, []
    if weights in _WIDE:
        return [], start.model, ["--dtype", weights]
    if weights == _FP8:
        return [], start.model, ["--quantization", "fp8"]
    if weights not in _BITS:
        raise CannotLaunch(f"{engine} needs a checkpoint that is stored in {weights}")
    output = f"{start.folder}-{weights}"
    quantize = f"ridgeline quantize {start.folder} --method gptq --bits {_BITS[weights]}"
    return [*start.download, f"{quantize} --format compressed-tensors -o {output}"], output, []


def _split(flag: str, number: int) -> list[str]:
    """A parallelism flag; empty for one device."""
    return [flag, str(number)] if number > 1 else []


def trtllm_command(start: LaunchPlan) -> LaunchCommand:
    """The `trtllm-serve` command of one replica. Raises CannotLaunch."""
    candidate, layout, weights = (
        start.candidate,
        start.candidate.layout,
        start.candidate.weight_dtype,
    )
    if start.device.vendor != "NVIDIA":
        raise CannotLaunch(f"TensorRT-LLM does not run on {start.device.name}")
    _check_context("TensorRT-LLM", start)
    if layout.num_attention > 1:
        raise CannotLaunch("trtllm-serve configures attention data parallelism in its YAML file")
    if candidate.kv_dtype == "int8":
        raise CannotLaunch(
            "trtllm-serve has no known flag for an int8 KV cache; use --kv-cache-dtype fp8"
        )
    first, model = [], start.model
    if weights != start.stored and weights == _FP8:
        model = f"{start.folder}-fp8"
        first = [f"# {model}: create it from {start.model} with TensorRT Model Optimizer"]
    elif weights != start.stored and weights not in _WIDE:
        raise CannotLaunch(f"TensorRT-LLM needs a checkpoint that is stored in {weights}")
    words = ["trtllm-serve", model, "--max_seq_len", str(start.max_model_len)]
    words += ["--max_batch_size", str(candidate.max_num_seqs)]
    words += ["--max_num_tokens", str(candidate.max_num_batched_tokens)]
    words += _split("--tp_size", layout.tp) + _split("--pp_size", layout.pp)
    words += _split("--ep_size", layout.ep)
    words += ["--kv_cache_dtype", "fp8"] if candidate.kv_dtype == _FP8 else []
    words += ["--kv_cache_free_gpu_memory_fraction", "0.9"]
    return LaunchCommand(first=first, words=words)


_ENGINES: Mapping[str, Callable[[LaunchPlan], LaunchCommand]] = MappingProxyType(
    {
        "ridgeline": _ridgeline,
        "vllm": vllm_command,
        "tensorrt-llm": trtllm_command,
        "sglang": sglang_command,
    }
)
