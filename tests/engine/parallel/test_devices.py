"""Which device a rank computes on, and how ranks on such devices exchange tensors."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridgeline.config.settings import PlainSettings, settings_from
from ridgeline.engine.parallel.devices import choose_exchange, device_of_rank
from ridgeline.engine.parallel.exchange.connect import make_collectives
from ridgeline.engine.parallel.exchange.process_groups import ProcessGroupCollectives
from ridgeline.engine.parallel.resolve import check_parallelism, choose_rank_layers
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.rewrite import apply_quantization
from ridgeline.modelspec.shard import ParallelSizes, Shard

TWO = ParallelSizes(tensor=2, pipeline=1, expert=1, context=1)
FOUR = ParallelSizes(tensor=2, pipeline=2, expert=1, context=1)
CUDA = torch.device("cuda")


def settings(**changes: Any) -> PlainSettings:
    return settings_from({"model": "demo", "tensor_parallel_size": 2, **changes})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.parametrize(
    ("nnodes", "devices"),
    [(1, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]), (2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"])],
)
def test_rank_takes_the_device_of_its_number_within_the_node(
    nnodes: int, devices: list[str]
) -> None:
    assert [device_of_rank("cuda", FOUR, nnodes, rank) for rank in range(4)] == devices
    assert device_of_rank("cpu", FOUR, nnodes, 3) == "cpu"


@pytest.mark.usefixtures("two_gpus")
def test_ranks_with_a_device_each_exchange_by_nccl() -> None:
    assert choose_exchange(settings(), TWO, CUDA)[0] == "nccl"
    assert choose_exchange(settings(collectives="nccl"), TWO, CUDA)[0] == "nccl"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("changes", "sizes", "device", "words"),
    [
        ({}, FOUR, "cuda", "4 ranks .* limit: 2 CUDA devices"),
        ({"collectives": "gloo"}, TWO, "cuda", "--collectives gloo"),
        ({"collectives": "shm"}, TWO, "cuda", "--collectives shm"),
        ({}, TWO, "cuda:1", "CUDA_VISIBLE_DEVICES"),
        ({"collectives": "nccl"}, TWO, "cpu", "compute on the CPU"),
    ],
)
def test_impossible_exchange_is_refused(
    changes: dict[str, Any], sizes: ParallelSizes, device: str, words: str
) -> None:
    with pytest.raises(CannotRun) as refusal:
        choose_exchange(settings(**changes), sizes, torch.device(device))
    assert refusal.match(words) and refusal.match("fix: ")


def test_build_without_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(CannotRun, match="without NCCL"):
        choose_exchange(settings(), TWO, CUDA)


@pytest.mark.usefixtures("two_gpus")
def test_cuda_ranks_refuse_integer_sums_and_run_torch_layers() -> None:
    spec = load_spec("demo")
    with pytest.raises(CannotRun, match="int8 weights by CPU kernels"):
        check_parallelism(settings(), apply_quantization(spec, "int8"), CUDA, {})
    why: dict[str, str] = {}
    check_parallelism(settings(), spec, CUDA, why)
    assert why["collectives"].startswith("nccl: ")
    assert choose_rank_layers("auto", spec, TWO, CUDA, torch.bfloat16)[0] == "torch"


def test_nccl_group_is_made_on_the_device_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    made: list[Any] = []

    class FakeNccl:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((rank, size, options._timeout))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    shard = Shard(sizes=TWO, rank=1)
    collectives = make_collectives(shard, 7.0, None, device="cuda:1")
    assert isinstance(collectives, ProcessGroupCollectives)
    collectives.connect(str(tmp_path / "store"))
    assert made == [torch.device("cuda:1"), (1, 2, timedelta(seconds=7))]
