"""Each check on machines that pass it and machines that do not; and the two renderings."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.main import main
from ridgeline.cli.render.doctor import print_readiness
from ridgeline.cli.render.inspect import inspection_tables
from ridgeline.hardware.doctor import Check, CheckedSystem, run_checks
from ridgeline.hardware.machine import Gpu, Machine
from ridgeline.hardware.system import Cores
from ridgeline.workflows import check_machine
from ridgeline.workflows.inspect_model import inspect_model

MACHINE = Machine(
    cpu_model="Some CPU",
    architecture="x86_64",
    isa=("avx2", "fma"),
    physical_cores=4,
    logical_cores=4,
    usable_cores=4.0,
    memory_bytes=32_000_000_000,
    memory_available_bytes=16_000_000_000,
    caches=(),
    read_bandwidth_bytes_s={1: 10e9, 4: 20e9},
    cache_bandwidth_bytes_s={},
    multiply_flops={"float32": 4e11},
    gemm_flops={"float32": 3e11},
    native_dtypes=("float32",),
    gpus=(),
    cpu_share=0.99,
    probed_unix_s=0.0,
    took_s=5.0,
    fingerprint="x",
)
GOOD = CheckedSystem(
    python=(3, 11, 7),
    torch_version="2.13.0+cpu",
    torch_error="",
    machine=MACHINE,
    native_error="",
    native_isas="avx2,portable",
    cores=Cores(logical=4, physical=4, affinity=4, quota=None),
    free_disk_bytes=50_000_000_000,
    disk_path="/cache",
    environment={},
    load_average=0.1,
)


def changed_system(**change: Any) -> CheckedSystem:
    return msgspec.structs.replace(GOOD, **change)


def machine(**change: Any) -> CheckedSystem:
    return changed_system(machine=msgspec.structs.replace(MACHINE, **change))


def wrong(system_state: CheckedSystem) -> list[Check]:
    return [check for check in run_checks(system_state) if not check.ok]


def test_good_machine_passes_every_check(monkeypatch: Any) -> None:
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter(()))
    assert wrong(GOOD) == []
    gpu = Gpu(name="G", memory_bytes=1, capability="9.0", read_bandwidth_bytes_s=1.0, gemm_flops={})
    assert wrong(machine(gpus=(gpu,))) == []


@pytest.mark.parametrize(
    ("system_state", "title", "detail", "required"),
    [
        (changed_system(python=(3, 10, 1)), "Python", "3.10.1", True),
        (changed_system(torch_version=None, machine=None), "PyTorch", "missing", True),
        (changed_system(torch_error="no libgomp", machine=None), "PyTorch", "no libgomp", True),
        (changed_system(torch_version="2.4.0"), "PyTorch", "2.4.0", True),
        (
            changed_system(native_error="no such file", machine=None),
            "native module",
            "no such file",
            True,
        ),
        (
            changed_system(environment={"RIDGELINE_NATIVE_ISA": "avx512"}),
            "native module",
            "avx512, which this CPU",
            True,
        ),
        (
            changed_system(cores=Cores(logical=4, physical=4, affinity=4, quota=1.5)),
            "cores",
            "1.5",
            False,
        ),
        (
            changed_system(cores=Cores(logical=4, physical=2, affinity=2, quota=None)),
            "cores",
            "affinity",
            False,
        ),
        (changed_system(environment={"OMP_NUM_THREADS": "1"}), "OpenMP threads", "idle", False),
        (changed_system(environment={"OMP_NUM_THREADS": "8"}), "OpenMP threads", "compete", False),
        (changed_system(free_disk_bytes=10), "disk", "/cache", False),
        (machine(isa=()), "instructions", "no vector", False),
        (machine(memory_available_bytes=10), "memory", "0.0 GB", False),
        (machine(cpu_share=0.4), "other load", "40%", False),
        (machine(read_bandwidth_bytes_s={1: 1e9}), "memory bandwidth", "1.0 GB/s", False),
    ],
)
def test_each_check_finds_its_fault_and_has_a_remedy(
    system_state: CheckedSystem, title: str, detail: str, required: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter(()))
    (found,) = wrong(system_state)
    assert (found.title, found.required) == (title, required)
    assert detail in found.detail
    assert found.remedy


def test_a_hidden_gpu_is_reported(monkeypatch: Any) -> None:
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter(["nvidia0"]))
    (found,) = wrong(GOOD)
    assert found.title == "GPU"
    assert "CUDA build" in found.remedy


def test_the_command_prints_lines_or_json(monkeypatch: Any, capsys: Any) -> None:
    checks = run_checks(changed_system(python=(3, 9, 0), free_disk_bytes=5))
    monkeypatch.setattr(check_machine, "diagnose", lambda **_: checks)
    console = Console(width=60, record=True)
    print_readiness(check_machine.check_machine(), console)
    text = console.export_text()
    assert "! Python" in text
    assert "✓ PyTorch" in text
    assert "→ install Python 3.11" in text
    assert "cannot run here" in text
    capsys.readouterr()
    assert main(["doctor"]) == 1
    capsys.readouterr()
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ready"] is False
    assert len(document["checks"]) == len(checks)
    monkeypatch.setattr(
        check_machine, "diagnose", lambda **_: run_checks(changed_system(free_disk_bytes=5))
    )
    assert main(["doctor"]) == 0


def test_inspect_prints_the_arithmetic_or_json(capsys: Any) -> None:
    console = Console(width=120, record=True)
    console.print(inspection_tables(inspect_model("dummy:llama-3.1-8b")))
    text = console.export_text()
    assert "8.03 B" in text
    assert "131,072 B" in text
    capsys.readouterr()
    assert main(["inspect", "dummy:mixtral-8x7b", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {(row["section"], row["name"]): row for row in document["rows"]}
    assert rows["KV cache", "per token"]["value"] == 131_072
    assert document["layers"][0]["num_layers"] == 32
