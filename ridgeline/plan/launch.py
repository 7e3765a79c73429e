"""From a candidate to commands that start it: Ridgeline, vLLM, TensorRT-LLM, SGLang; and manifests.

Flags are those of `vllm serve`, `trtllm-serve` and SGLang's `launch_server` of 2026; what an engine
cannot do, or is not known here to do, is said in place of its command.
"""

from __future__ import annotations

from ridgeline.plan.layout import NODE_DEVICES
from ridgeline.plan.search import Candidate

IMAGE = "vllm/vllm-openai:latest"
_VLLM_DTYPES = {"float8_e4m3": "fp8"}


def commands(each: Candidate, model: str, max_model_len: int) -> dict[str, str]:
    """Engine name → the command of one replica, or a comment that says why there is none."""
    return {
        "ridgeline": _ridgeline(each, model, max_model_len),
        "vllm": " ".join(vllm_words(each, model, max_model_len)),
        "tensorrt-llm": _trtllm(each, model, max_model_len),
        "sglang": _sglang(each, model, max_model_len),
    }


def _ridgeline(each: Candidate, model: str, max_model_len: int) -> str:
    if each.layout.num_devices > 1:
        return f"# Ridgeline runs on one device; this replica takes {each.layout.num_devices}"
    if each.weight_dtype not in ("float32", "bfloat16", "float16", "int8", "int4"):
        return f"# Ridgeline has no kernels for {each.weight_dtype} weights"
    words = ["ridgeline serve", model, "--device cuda"]
    if each.weight_dtype in ("int8", "int4"):
        words.append(f"--quantization {each.weight_dtype}")
    words += [
        f"--max-model-len {max_model_len}",
        f"--max-num-seqs {each.seats}",
        f"--max-num-batched-tokens {each.max_num_batched_tokens}",
    ]
    if each.kv_dtype == "float8_e4m3":
        return "# Ridgeline has no fp8 KV cache; int8 takes as little: --kv-cache-dtype int8"
    return " ".join(words)


def vllm_words(each: Candidate, model: str, max_model_len: int) -> list[str]:
    """The command of one replica, word by word."""
    layout = each.layout
    words = ["vllm", "serve", model, "--max-model-len", str(max_model_len)]
    words += ["--max-num-seqs", str(each.seats)]
    words += ["--max-num-batched-tokens", str(each.max_num_batched_tokens)]
    words += ["--gpu-memory-utilization", "0.9"]
    if layout.tp > 1:
        words += ["--tensor-parallel-size", str(layout.tp)]
    if layout.pp > 1:
        words += ["--pipeline-parallel-size", str(layout.pp)]
    if layout.ep > 1:
        words.append("--enable-expert-parallel")
    if layout.num_attention > 1:
        words += ["--data-parallel-size", str(layout.num_attention)]
    if each.weight_dtype == "float8_e4m3":
        words += ["--quantization", "fp8"]
    if each.kv_dtype == "float8_e4m3":
        words += ["--kv-cache-dtype", "fp8"]
    return words


def _trtllm(each: Candidate, model: str, max_model_len: int) -> str:
    layout = each.layout
    if layout.num_attention > 1:
        return "# trtllm-serve: attention data parallelism is set in its YAML options"
    words = ["trtllm-serve", model, f"--max_seq_len {max_model_len}"]
    words += [f"--max_batch_size {each.seats}", f"--max_num_tokens {each.max_num_batched_tokens}"]
    words += [f"--tp_size {layout.tp}"] * (layout.tp > 1)
    words += [f"--pp_size {layout.pp}"] * (layout.pp > 1)
    words += [f"--ep_size {layout.ep}"] * (layout.ep > 1)
    words.append("--kv_cache_free_gpu_memory_fraction 0.9")
    return " ".join(words)


def _sglang(each: Candidate, model: str, max_model_len: int) -> str:
    layout = each.layout
    tp = layout.tp * layout.num_attention  # SGLang counts all devices of a stage as tp
    words = ["python -m sglang.launch_server", f"--model-path {model}"]
    words += [f"--context-length {max_model_len}", f"--max-running-requests {each.seats}"]
    words.append(f"--chunked-prefill-size {each.max_num_batched_tokens}")
    words += [f"--tp-size {tp}"] * (tp > 1)
    words += [f"--pp-size {layout.pp}"] * (layout.pp > 1)
    words += [f"--ep-size {layout.ep}"] * (layout.ep > 1)
    if layout.num_attention > 1:
        words.append(f"--enable-dp-attention --dp-size {layout.num_attention}")
    words += ["--quantization fp8"] * (each.weight_dtype == "float8_e4m3")
    words += ["--kv-cache-dtype fp8_e4m3"] * (each.kv_dtype == "float8_e4m3")
    words.append("--mem-fraction-static 0.9")
    return " ".join(words)


def kubernetes(each: Candidate, model: str, max_model_len: int) -> str:
    """A Deployment of the fleet and a Service before it, serving with vLLM."""
    args = "\n".join(
        f'            - "{word}"' for word in vllm_words(each, model, max_model_len)[2:]
    )
    if each.layout.num_devices > NODE_DEVICES:
        return (
            f"# One replica takes {each.layout.num_devices} devices on several nodes, and a\n"
            "# Deployment's pod lies on one: use a LeaderWorkerSet, or the Ray Serve manifest.\n"
        )
    return f"""apiVersion: apps/v1
kind: Deployment
metadata:
  name: llm
  labels: {{app: llm}}
spec:
  replicas: {each.num_replicas}
  selector:
    matchLabels: {{app: llm}}
  template:
    metadata:
      labels: {{app: llm}}
    spec:
      terminationGracePeriodSeconds: 120
      containers:
        - name: engine  # one replica on {each.layout.num_devices} x {each.device}
          image: {IMAGE}
          args:
{args}
          ports:
            - {{name: http, containerPort: 8000}}
          readinessProbe:
            httpGet: {{path: /health, port: http}}
            periodSeconds: 5
          startupProbe:
            httpGet: {{path: /health, port: http}}
            periodSeconds: 10
            failureThreshold: 180
          resources:
            limits:
              nvidia.com/gpu: {each.layout.num_devices}
---
apiVersion: v1
kind: Service
metadata:
  name: llm
spec:
  selector: {{app: llm}}
  ports:
    - {{name: http, port: 80, targetPort: http}}
"""


def ray_serve(each: Candidate, model: str, max_model_len: int) -> str:
    """A Ray Serve LLM configuration for `serve run`."""
    layout = each.layout
    kv = "\n            kv_cache_dtype: fp8" if each.kv_dtype == "float8_e4m3" else ""
    weights = "\n            quantization: fp8" if each.weight_dtype == "float8_e4m3" else ""
    return f"""applications:
  - name: llm
    route_prefix: /
    import_path: ray.serve.llm:build_openai_app
    args:
      llm_configs:
        - model_loading_config:
            model_id: llm
            model_source: {model}
          deployment_config:
            num_replicas: {each.num_replicas}
          engine_kwargs:
            tensor_parallel_size: {layout.tp}
            pipeline_parallel_size: {layout.pp}
            max_model_len: {max_model_len}
            max_num_seqs: {each.seats}
            max_num_batched_tokens: {each.max_num_batched_tokens}{weights}{kv}
"""
