"""Kernels and their tiles for cards that are not here: what the interpreter cannot show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.engine.execution.layers.fused import reads_rounded
from ridgeline.engine.kernels import scaled_products
from ridgeline.engine.quant.scaled import ScaledLinear

ROOT = Path(__file__).resolve().parents[4]
KERNELS = ROOT / "ridgeline" / "engine" / "kernels" / "triton"
SHARED_KIB = {"A100": 163, "L40S, RTX 4090 and 5090": 99, "H100, B200": 227}
LARGEST = ("decode-256", "prefill-256", "latent-128", "experts-prefill")
OTHERS: tuple[str, ...] = (
    "prefill-float32-256",
    "experts-float32",
    "w4a16-64-rows",
    "nvfp4-64-rows",
    "w8",
    "rope",
)
OTHERS += ("norms", "norms-fp8", "sampling", "widen")
BF16, FLOAT32 = torch.bfloat16, torch.float32


def compile_for(capability: int, path: Path, *names: str) -> list[dict[str, Any]]:
    """What kernels take of a card of this capability; fails if it does not have it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "scripts/compile_triton.py", f"--capability={capability}"]
    done = subprocess.run(
        [*command, "--json", str(path), *names],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_every_kernel_compiles_for_the_smallest_card(tmp_path: Path) -> None:
    """Compute capability 8.9: a block has 99 KiB of shared memory, and FP8 exists."""
    found = compile_for(89, tmp_path / "found.json", *LARGEST, *OTHERS)
    sources = [path.read_text(encoding="utf-8") for path in KERNELS.glob("*.py")]
    jitted = set(re.findall(r"@triton.jit\ndef (\w+)", "\n".join(sources)))
    launched = jitted & set(re.findall(r"^ +(\w+)\[.+\]\(", "\n".join(sources), re.M))
    assert "_attend" in launched and {line["kernel"] for line in found} == launched


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_largest_tiles_fit(capability: int, tmp_path: Path) -> None:
    found = compile_for(capability, tmp_path / "found.json", *LARGEST)
    assert {line["case"] for line in found} == set(LARGEST)


@pytest.mark.parametrize("kib", SHARED_KIB.values(), ids=SHARED_KIB)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
def test_attention_tiles_fit_every_card(head_dim: int, kib: int) -> None:
    from ridgeline.engine.kernels.triton import tiles

    card = tiles.Card(100, 1024 * kib)
    for dtype in (BF16, FLOAT32):
        for kv_itemsize in (1, dtype.itemsize):
            for group in (1, 4, 8, 16):
                numbers = (dtype, kv_itemsize, card)
                decode = tiles.tile_for_decode(group, head_dim, *numbers)
                prefill = tiles.tile_for_prefill(group, head_dim, 2048, *numbers)
                for tile in (decode, prefill):
                    needed = tiles.attention_bytes(tile, head_dim, dtype.itemsize, kv_itemsize)
                    assert needed <= card.shared_bytes, (group, dtype, kv_itemsize, tile)
                    assert tile.rows >= group and tile.keys >= 16


def test_tiles_of_a_hopper_card_are_those_that_were_measured() -> None:
    from ridgeline.engine.kernels.triton import experts, latent, tiles

    assert tiles.tile_for_decode(4, 128, BF16, 2) == (16, 128, 4, 2)
    assert tiles.tile_for_decode(4, 128, BF16, 1) == (16, 128, 4, 3)
    assert tiles.tile_for_prefill(4, 128, 2048, BF16, 2) == (128, 64, 8, 3)
    assert tiles.tile_for_prefill(4, 256, 2048, BF16, 2) == (64, 32, 8, 2)
    assert latent.tile_of_heads(128, 576, BF16, tiles.H100) == (64, 32)
    assert experts.stages_of(64, BF16, tiles.H100) == 4


@pytest.mark.parametrize(
    ("capability", "kind", "rounds"),
    [((8, 0), "fp8", False), ((8, 0), "int8", True), ((8, 9), "fp8", True)],
)
def test_fp8_takes_no_kernel_on_a_card_without_its_conversions(
    capability: tuple[int, int], kind: Any, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An A100 widens FP8 with PyTorch's operators, as `describe` says."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    linear = ScaledLinear(torch.ones(16, 16), None, FLOAT32, kind)
    linear.q_OI = SimpleNamespace(device=torch.device("cuda"), is_cuda=True)  # type: ignore[assignment]
    monkeypatch.setattr(scaled_products, "why_not", lambda _: ())
    assert scaled_products._has_triton(linear.q_OI, kind) is rounds
    assert reads_rounded(linear) is rounds
