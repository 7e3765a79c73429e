"""Names of commands and options that people bring from other tools, and what ours are called.

Earlier and foreign names of a single option stand next to it (`About.old_names`), and are answered
first.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

COMMANDS = {
    "run": "chat",
    "ask": "chat",
    "complete": "generate",
    "launch": "serve",
    "start": "serve",
    "list": "models",
    "ls": "models",
    "download": "pull",
    "convert": "quantize",
    "quantise": "quantize",
    "benchmark": "bench",
    "perf": "bench",
    "tune": "optimize",
    "optimise": "optimize",
    "evaluate": "eval",
    "show": "inspect",
    "info": "inspect",
    "price": "cost",
    "size": "plan",
}
"""Names that other tools (ollama, vLLM, llama.cpp) and British English give to our commands."""

MODEL_OPTIONS = frozenset(("-m", "--model", "--model-path", "--model-id", "-hf", "--hf-repo"))
"""Options that name the model in vLLM, SGLang, TGI and llama.cpp; here it is an argument."""

OPTIONS = {
    "--base-url": "--url",
    "--target": "--url",
    "--concurrency": "--max-concurrency",
    "--rps": "--request-rate",
    "--qps": "--request-rate",
    "--max-requests": "--num-prompts",
    "--num-requests": "--num-prompts",
    "--request-count": "--num-prompts",
    "--gpu": "--accelerator",
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--temp": "--temperature",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--max-total-tokens": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--max-concurrent-requests": "--max-num-seqs",
    "--max-batch-size": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-num-tokens": "--max-num-batched-tokens",
    "-b": "--max-num-batched-tokens",
    "--threads": "--num-threads",
    "-t": "--num-threads",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "-ctk": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--model-draft": "--speculative-config",
    "-md": "--speculative-config",
    "--tp": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--num-shard": "--tensor-parallel-size",
    "--pp": "--pipeline-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "--pp-size": "--pipeline-parallel-size",
    "--ep-size": "--expert-parallel-size",
}
"""Options of vLLM, SGLang, TGI, TensorRT-LLM, llama.cpp and GuideLLM, and what ours are called."""

WITHOUT = {
    "--trust-remote-code": "leave it out: code that comes with a model is never run",
    "--disable-log-requests": "leave it out: requests are logged only with --log-requests",
    "--enforce-eager": "leave it out: CUDA graphs cannot be switched off",
}
"""Options of other tools that have no counterpart, and why."""

_MEMORY_SHARES = ("--gpu-memory-utilization", "--mem-fraction-static", "--cuda-memory-fraction")
_MEMORY = "--kv-cache-memory-bytes"


def option_fix(error: click.UsageError, args: Sequence[str]) -> str | None:
    """What to write instead of an option of another tool; None if it is no such option.

    Args:
        error: What click refused.
        args: The command line, for options of several letters behind one dash, of which click
            names only the first letter.
    """
    name = getattr(error, "option_name", None)
    if name is None or error.ctx is None:
        return None
    if not name.startswith("--"):
        name = next((arg.partition("=")[0] for arg in args if arg.startswith(name)), name)
    if name in WITHOUT:
        return WITHOUT[name]
    parameters = error.ctx.command.params
    if name in _MEMORY_SHARES and any(_MEMORY in p.opts for p in parameters):
        return f"the KV cache takes its share of the free memory unless {_MEMORY} sets its size"
    if name in MODEL_OPTIONS and any(p.name == "model" for p in parameters):
        return f"the model is written without an option: {error.ctx.command_path} MODEL"
    ours = OPTIONS.get(name)
    if ours is not None and any(ours in p.opts for p in parameters):
        return f"it is {ours} here"
    return None
