"""Tensors in large pages are their own, begin at lines, and give their memory back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ridgeline.engine.checkpoints.packed import PackedWeights
from ridgeline.engine.checkpoints.write_packed import pack_model
from ridgeline.engine.kernels import large_pages
from ridgeline.engine.kernels.large_pages import LARGE_PAGE, Slabs, own_pages
from ridgeline.engine.kernels.native_linear import PANEL, empty_lines
from ridgeline.engine.quant.packed import random_packed
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.format import INT4, INT8, int4
from ridgeline.modelspec.model import LinearSpec
from ridgeline.modelspec.rewrite import apply_formats

SLAB = 4 * LARGE_PAGE


def mapping_of(tensor: torch.Tensor) -> str:
    """What Linux says about the mapping that a tensor lies in."""
    address, found = tensor.data_ptr(), list[str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            if found:
                break
            if not begin <= address < end:
                continue
        elif not found:
            continue
        found.append(line)
    return "\n".join(found)


@pytest.mark.slow
def test_tensors_of_a_slab_do_not_overlap_and_are_aligned() -> None:
    slabs, generator = Slabs(SLAB), torch.Generator().manual_seed(torch.seed() % 2**31)
    sizes = torch.randint(0, LARGE_PAGE, (60,), generator=generator).tolist()
    sizes += [0, 1, SLAB, SLAB + 1, LARGE_PAGE, 3 * SLAB]
    taken = [slabs.take(size) for size in sizes]
    for size, tensor in zip(sizes, taken, strict=True):
        assert tensor.nbytes == size
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()  # and no other memory was written to
        tensor.fill_(255)
    for number, tensor in enumerate(taken):
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(taken))


def test_slab_is_freed_with_its_last_tensor() -> None:
    slabs = Slabs(SLAB)
    first, second = slabs.take(100), slabs.take(200)
    assert second.data_ptr() == first.data_ptr() + 128
    del first
    assert slabs.slab() is not None
    del second
    assert slabs.slab() is None
    assert slabs.take(100).data_ptr() % LARGE_PAGE == 0


def test_shapes_dtypes_and_copies() -> None:
    made = large_pages.empty((3, 5), torch.float16)
    assert made.shape == (3, 5) and made.dtype == torch.float16 and made.is_contiguous()
    values = torch.randn(7, 11).T
    copy = large_pages.moved(values)
    assert torch.equal(copy, values) and copy.is_contiguous()


@pytest.mark.parametrize("num_bytes", [0, 1, LARGE_PAGE - 1, LARGE_PAGE, 5 * LARGE_PAGE + 3])
def test_separate_pages_are_zeroed_and_aligned(num_bytes: int) -> None:
    pages = own_pages(num_bytes)
    assert pages.nbytes == num_bytes and not pages.any()
    assert num_bytes < LARGE_PAGE or pages.data_ptr() % LARGE_PAGE == 0


@pytest.mark.parametrize("num_out", [64, 4096, 4104])
def test_rows_are_padded_to_whole_panels(num_out: int) -> None:
    lines = empty_lines("int4", num_out, 2048, 128)
    assert lines.nbytes == -(-num_out // PANEL) * PANEL * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux where memory lies")
def test_weights_and_kv_cache_lie_in_large_pages(tmp_path: Path) -> None:
    for format in (int4(128), int4(32, zeros=True), INT8):
        spec = LinearSpec(num_out=2048, num_in=2048, format=format)
        packed = random_packed(spec, torch.Generator())
        assert packed is not None
        tables = (packed.lines, packed.scales, packed.zeros, packed.factors)
        assert all("hg" in mapping_of(table).split() for table in tables if table is not None)
    spec = apply_formats(load_spec("demo"), {"layers.*": INT4}, "test")
    pack_model("demo", spec, tmp_path / "packed")
    layer = spec.layers[0].mlp
    with PackedWeights(tmp_path / "packed") as weights:
        opened = weights.packed(layer.down, ["down"], 0, None)
    assert opened is not None
    assert "hg" in mapping_of(opened.lines).split()
    assert "hg" in mapping_of(opened.scales).split()
