"""The device of each rank, and how ranks on such devices exchange tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ridgeline.config.settings import PlainSettings
from ridgeline.engine.parallel.exchange.shared_memory import why_no_segment
from ridgeline.errors import CannotRun
from ridgeline.modelspec.shard import ParallelSizes, ranks_of_node


def device_of_rank(device: str, sizes: ParallelSizes, nnodes: int, rank: int) -> str:
    """The device of a rank, where the engine's is `device`: on CUDA the one whose number is that of
    the rank within its node.
    """
    if torch.device(device).type == "cpu":
        return device
    nodes = (ranks_of_node(sizes, nnodes, node) for node in range(nnodes))
    (local_rank,) = (ranks.index(rank) for ranks in nodes if rank in ranks)
    return f"cuda:{local_rank}"


def choose_exchange(
    settings: PlainSettings, sizes: ParallelSizes, device: torch.device
) -> tuple[str, str]:
    """(nccl, shm or gloo, the reason). Raises CannotRun for one that is requested and impossible,
    and for CUDA ranks without a device each.
    """
    requested = settings.collectives
    if device.type == "cuda":
        _check_cuda(settings, sizes, device)
        return "nccl", "every rank has a CUDA device"
    if requested == "nccl":
        raise CannotRun(
            "NCCL exchanges tensors of CUDA devices, and the ranks compute on the CPU",
            value="--collectives nccl",
            fix="use --collectives auto, or --device cuda",
        )
    why_not = "the processes are on several nodes" if settings.nnodes > 1 else why_no_segment()
    if requested == "shm" and why_not is not None:
        raise CannotRun(
            f"processes cannot share memory here: {why_not}",
            value="--collectives shm",
            fix="use --collectives gloo",
        )
    if requested == "gloo" or why_not is not None:
        return "gloo", why_not or "as requested"
    return "shm", "the processes are on one host"


def _check_cuda(settings: PlainSettings, sizes: ParallelSizes, device: torch.device) -> None:
    if settings.collectives not in ("auto", "nccl"):
        raise CannotRun(
            "ranks on CUDA devices exchange tensors by NCCL",
            value=f"--collectives {settings.collectives}",
            fix="leave out --collectives, or use --device cpu",
        )
    if device.index:
        raise CannotRun(
            "ranks take the CUDA devices from number 0 on",
            value=f"--device {device}",
            fix="use --device cuda, with CUDA_VISIBLE_DEVICES set to the devices",
        )
    nodes = range(settings.nnodes)
    needed = max(len(ranks_of_node(sizes, settings.nnodes, node)) for node in nodes)
    available = torch.cuda.device_count()
    if needed > available:
        raise CannotRun(
            "every rank needs a separate CUDA device",
            value=f"{needed} ranks of {sizes} on this machine",
            limit=f"{available} CUDA devices",
            fix="lower the parallel sizes, raise --nnodes, or use --device cpu",
        )
    if not dist.is_nccl_available():
        raise CannotRun(
            "this PyTorch was built without NCCL",
            value=str(sizes),
            fix="install a CUDA build of PyTorch, or use one process",
        )
