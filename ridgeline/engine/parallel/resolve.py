"""Checks the layout over processes that settings ask for."""

from __future__ import annotations

import torch

from ridgeline.config.settings import PlainSettings, Settings
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.native import NativeAttention
from ridgeline.engine.execution.layers import choose
from ridgeline.engine.parallel.devices import choose_exchange
from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost.kv_layout import KvLayout
from ridgeline.modelspec.layer_inputs import refuse_special_layers
from ridgeline.modelspec.model import LayerSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears
from ridgeline.modelspec.shard import CHUNK_TOKENS, NodeAddress, ParallelSizes, check_sizes
from ridgeline.records import KvEviction


def parallel_sizes(settings: PlainSettings) -> ParallelSizes:
    """The degrees of parallelism that the settings name."""
    return ParallelSizes(
        tensor=settings.tensor_parallel_size,
        pipeline=settings.pipeline_parallel_size,
        expert=settings.expert_parallel_size,
        context=settings.context_parallel_size,
        sequence=settings.sequence_parallel,
    )


def check_parallelism(
    settings: Settings, spec: ModelSpec, device: torch.device, why: dict[str, str]
) -> None:
    """Check the layout, and state it in `why`. Raises CannotRun."""
    sizes = parallel_sizes(settings)
    _check_nodes(settings, sizes)
    if sizes.sequence and sizes.tensor == 1:
        raise CannotRun(
            "--sequence-parallel divides rows between the ranks of --tensor-parallel-size",
            value="--tensor-parallel-size 1",
            limit=">= 2",
            fix="leave it out",
        )
    if sizes.num_ranks == 1:
        return
    _check_formats(spec, sizes, device)
    if settings.enable_lora:
        raise CannotRun(
            "--enable-lora works with one process, which holds whole layers",
            value=str(sizes),
            fix="leave one of them out",
        )
    check_eviction(settings.kv_eviction_config, sizes)
    refuse_special_layers(spec, "a layout over several processes", "use one process")
    check_sizes(spec, sizes)
    why["collectives"] = ": ".join(choose_exchange(settings, sizes, device))
    for name in ("tensor", "pipeline", "expert", "context"):
        if getattr(sizes, name) > 1:
            why[f"{name}_parallel_size"] = f"as requested: {sizes.num_ranks} processes"


def _check_formats(spec: ModelSpec, sizes: ParallelSizes, device: torch.device) -> None:
    """Raise CannotRun for weights that ranks cannot divide."""
    if sizes.tensor == 1:
        return
    if any(linear.format.kind == "int8_sparse24" for linear in linears(spec).values()):
        raise CannotRun(
            "weights that are stored 2:4 in INT8 are not divided between processes",
            value=str(sizes),
            fix="use --quantization int8, which gives the same results, or other sizes",
        )
    if device.type == "cpu":
        return
    if any(_sums_integers(layer) for layer in spec.layers):
        raise CannotRun(
            "tensor parallelism sums the products of int8 weights by CPU kernels",
            value=f"{sizes} on {device}",
            fix="use --pipeline-parallel-size, another format, or --device cpu",
        )


def _sums_integers(layer: LayerSpec) -> bool:
    return "int8" in (layer.attention.o.format.kind, layer.mlp.down.format.kind)


def block_tokens(settings: Settings, layout: KvLayout) -> int:
    """The tokens of a block where none are configured.

    Raises CannotRun if the ones configured do not suit context parallelism.
    """
    context = settings.context_parallel_size
    if context == 1:
        return layout.block_tokens
    size = CHUNK_TOKENS * context
    if settings.block_size not in (None, size):
        raise CannotRun(
            f"with --context-parallel-size {context} a block holds a chunk of every rank",
            value=f"--block-size {settings.block_size}",
            limit=size,
            fix="leave out --block-size",
        )
    return size


def check_context(settings: Settings, site: AttentionSite, max_model_len: int) -> None:
    """Raise CannotRun if ranks cannot divide the positions of the KV cache."""
    context = settings.context_parallel_size
    if context == 1:
        return
    reasons = list(NativeAttention.why_not(site))
    if settings.attention_backend not in ("auto", "native"):
        reasons.append(f"--attention-backend {settings.attention_backend} is not native")
    if site.kv_dtype == "int4":
        reasons.append("groups of keys in INT4 are not divided among ranks")
    if max_model_len <= CHUNK_TOKENS:
        reasons.append(f"{max_model_len} tokens are no more than one chunk of {CHUNK_TOKENS}")
    if reasons:
        raise CannotRun(
            f"context parallelism needs native attention over long sequences: {'; '.join(reasons)}",
            value=f"--context-parallel-size {context}",
            fix="use --pipeline-parallel-size or --tensor-parallel-size",
        )


def _check_nodes(settings: Settings, sizes: ParallelSizes) -> None:
    """Check the nodes that the processes are spread over. Raises BadInput, CannotRun."""
    if settings.node_rank:
        raise CannotRun(
            "a node other than 0 computes for node 0 and serves nothing",
            value=f"--node-rank {settings.node_rank}",
            fix="start it with `ridgeline serve`",
        )
    if settings.nnodes == 1:
        return
    NodeAddress.parse(settings.master_addr)
    if sizes.num_ranks < settings.nnodes:
        raise CannotRun(
            "every node computes at least one rank",
            value=f"--nnodes {settings.nnodes}",
            limit=f"{sizes.num_ranks} (the ranks of {sizes})",
            fix="raise --tensor-parallel-size or --pipeline-parallel-size",
        )


def check_eviction(policy: KvEviction | None, sizes: ParallelSizes) -> None:
    """Raise CannotRun if `policy` evicts keys and values that several ranks hold."""
    if sizes.num_ranks > 1 and policy is not None and policy.evicts:
        raise CannotRun(
            "KV eviction works with one process, which holds the whole KV cache",
            value=f"{policy.method} on {sizes}",
            fix="leave KV eviction out, or use one process",
        )


def choose_rank_layers(
    requested: str, spec: ModelSpec, sizes: ParallelSizes, device: torch.device, dtype: torch.dtype
) -> tuple[str, tuple[str, ...]]:
    """The layer backend of every rank, and the reasons. Raises CannotRun."""
    if requested not in ("auto", "native", "torch"):
        raise CannotRun(
            "ranks run the layers as native segments or torch operators",
            value=f"--layer-backend {requested}",
            fix="use --layer-backend auto",
        )
    why_not = why_not_native(spec, sizes, device)
    if requested == "native" and why_not:
        raise CannotRun(
            f"ranks cannot run native layers here: {'; '.join(why_not)}",
            value=str(sizes),
            fix="use --layer-backend auto",
        )
    if requested == "auto" and why_not:
        return "torch", (f"not native: {'; '.join(why_not)}", "torch: runs on every rank")
    return choose(requested, spec, device, dtype)


def why_not_native(spec: ModelSpec, sizes: ParallelSizes, device: torch.device) -> tuple[str, ...]:
    """Reasons why ranks cannot run native segments, beyond those of one process."""
    reasons = []
    if device.type != "cpu":
        reasons.append(f"native segments run on the CPU, not on {device}")
    if any(layer.mlp.num_experts for layer in spec.layers):
        reasons.append("experts are exchanged within a layer")
    if sizes.tensor > 1 and any(_sums_integers(layer) for layer in spec.layers):
        reasons.append("int8 rows are rounded with a scale that the ranks agree on")
    return tuple(reasons)
