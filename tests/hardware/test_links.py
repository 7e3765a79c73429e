"""Links by name: their rates reach predictions, plans and pools."""

from __future__ import annotations

import pytest

import ridgeline
from ridgeline.cli.main import main
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.hardware.links import load_links, with_links

BASE = {"accelerator": "h100-sxm", "tensor_parallel_size": 4, "max_concurrency": 64}


def test_slower_link_makes_tensor_parallelism_slower() -> None:
    own, nvlink, pcie = (
        ridgeline.predict("llama-3.1-70b", quantization="fp8", interconnect=name, **BASE)
        for name in (None, "nvlink4", "pcie4")
    )
    assert own.prediction.tpot_ms == pytest.approx(nvlink.prediction.tpot_ms)
    assert pcie.prediction.tpot_ms > 1.1 * nvlink.prediction.tpot_ms


def test_network_counts_beyond_a_node_only() -> None:
    wide = {"quantization": "fp8", "tensor_parallel_size": 8, "attention_dp_size": 2}
    wide |= {"accelerator": "h200-sxm", "max_concurrency": 64, "expert_parallel_size": 16}
    fast, slow = (
        ridgeline.predict("deepseek-v3", network=name, **wide) for name in (None, "ethernet-25")
    )
    assert slow.prediction.tpot_ms > 1.2 * fast.prediction.tpot_ms
    node = [
        ridgeline.predict("llama-3.1-70b", quantization="fp8", network=name, **BASE)
        for name in (None, "ethernet-10")
    ]
    assert node[0].prediction == node[1].prediction


def test_device_without_a_link_gets_one_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "llama-3.1-8b", "--accelerator", "a10g", "--tensor-parallel-size", "2"]
    assert main(words) == 2
    assert "link rate" in capsys.readouterr().err
    assert main([*words, "--interconnect", "pcie4"]) == 0


def test_slower_network_makes_the_transfer_of_pools_longer() -> None:
    base = {"accelerator": "h100-sxm", "max_devices": 1, "price_per_hour": 2.0}
    fast, slow = (
        ridgeline.plan("llama-3.1-8b", quantization="fp8", network=name, **base)
        for name in ("infiniband-ndr", "ethernet-10")
    )
    assert slow.disaggregation.transfer_s == pytest.approx(40 * fast.disaggregation.transfer_s)


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    rows = load_catalogue()
    with pytest.raises(BadInput, match="nvlink4"):
        with_links(rows, "carrier-pigeon", None)
    with pytest.raises(BadInput, match="ethernet-25"):
        with_links(rows, None, "nvlink4")
    assert with_links(rows, None, None) == rows


def test_every_link_has_a_rate_a_source_and_a_date() -> None:
    for link in load_links().values():
        assert link.gb_s > 0 and link.source and len(link.as_of) == 7
