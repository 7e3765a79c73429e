"""Packing of several models: limits hold, every replica is placed, small cases are optimal."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cli.main import main
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.plan.calibration.published_efficiency import efficiency_of
from ridgeline.plan.fleet.packing import MAX_BUSY, Tenant, pack, replicas_of, usable_bytes

ROWS = load_catalogue()
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "qwen2.5-7b", "llama-3.1-8b", "phi-4")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(MODELS), st.sampled_from((0.1, 1.0, 4.0))),
        min_size=1,
        max_size=6,
    )
)
def test_packing_respects_limits_and_places_every_replica(asked: list[tuple[str, float]]) -> None:
    tenants = [Tenant(model=m, rate=rate + i / 1000) for i, (m, rate) in enumerate(asked)]
    found = pack(tenants, {"h100-sxm": 8, "l40s": 8, "l4": 8}, ROWS)
    for device in found.devices:
        assert device.memory_bytes <= device.usable_bytes == usable_bytes(ROWS[device.name])
        assert device.busy <= MAX_BUSY + 1e-6 and device.replicas
    placed = Counter(replica.model for device in found.devices for replica in device.replicas)
    assert set(placed) == {tenant.model for tenant in tenants}
    assert found.min_devices <= len(found.devices)


def test_small_models_share_a_device_and_large_ones_get_the_large_device() -> None:
    tenants = [Tenant(model=m, rate=0.2) for m in ("llama-3.2-1b", "llama-3.2-3b", "qwen2.5-32b")]
    found = pack(tenants, {"l4": 2, "h100-sxm": 1}, ROWS)
    where = {replica.model: device.name for device in found.devices for replica in device.replicas}
    assert where["qwen2.5-32b"] == "h100-sxm"
    assert len(found.devices) <= 2


def test_requests_beyond_the_context_are_refused() -> None:
    tenants = [Tenant(model="llama-3.1-8b", rate=0.1, isl=131_000, osl=100)]
    with pytest.raises(BadInput, match=r"longer than the context.*131,000 \+ 100.*131,072"):
        pack(tenants, {"h100-sxm": 1}, ROWS)


def test_linear_scaling_extends_the_context_to_the_longest_request(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 1001,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    tenant = Tenant(model=str(file), rate=0.1, isl=3000, osl=100, longest=4004)
    assert len(pack([tenant], {"l4": 1}, ROWS).devices) == 1
    for longest in (0, 4005):
        with pytest.raises(BadInput, match=r"longer than the context.*3,000 \+ 100.*1,001"):
            pack([msgspec.structs.replace(tenant, longest=longest)], {"l4": 1}, ROWS)


def test_load_beyond_one_device_is_split_into_replicas() -> None:
    one, many = (
        replicas_of(Tenant(model="llama-3.1-8b", rate=rate), ROWS["h100-sxm"])
        for rate in (1.0, 90.0)
    )
    assert len(one) == 1 and len(many) > 1
    assert all(replica.busy <= MAX_BUSY for replica in many)


def test_one_token_answers_are_charged_for_their_prompts() -> None:
    """Classifying 36 prompts of 1,024 tokens a second takes most of an H100, not a part of one."""
    tenant = Tenant(model="llama-3.1-8b", rate=36.0, isl=1024, osl=1)
    flops = 36 * 1024 * 2 * 7e9
    replicas = replicas_of(tenant, ROWS["h100-sxm"])
    assert sum(replica.busy for replica in replicas) > flops / (
        efficiency_of(ROWS["h100-sxm"]).compute * ROWS["h100-sxm"].peak_flops["bfloat16"]
    )


def test_model_without_room_is_named() -> None:
    with pytest.raises(DoesNotFit, match=r"llama-3.1-70b fits none"):
        pack([Tenant(model="llama-3.1-70b", rate=1.0)], {"a10g": 8}, ROWS)
    crowd = [Tenant(model="llama-3.1-8b", rate=1.0 + i) for i in range(3)]
    with pytest.raises(DoesNotFit, match="no room left"):
        pack(crowd, {"l40s": 1}, ROWS)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "models.toml"
    rows.write_text('[[model]]\nmodel = "llama-3.2-1b"\nrate = 1.0\n')
    assert main(["pack", str(rows), "--accelerator", "l4=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [replica["model"] for replica in found["devices"][0]["replicas"]] == ["llama-3.2-1b"]
    assert main(["pack", str(rows), "--accelerator", "l4"]) == 0
    assert "llama-3.2-1b (" in capsys.readouterr().out
    for bad in ("l4=0", "l4=x", "nothing", "l4=99999999999"):
        assert main(["pack", str(rows), "--accelerator", bad]) == 2
    rows.write_text("[[model]]\nrate = 1.0\n")
    assert main(["pack", str(rows), "--accelerator", "l4"]) == 2
    assert "models" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row", ["rate = 0.0", "rate = nan", "rate = inf", "rate = 1.0\nosl = 0", "rate = 1.0\nisl = -3"]
)
def test_invalid_loads_are_rejected(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f'[[model]]\nmodel = "dummy:llama-1b-32k"\n{row}\n')
    assert main(["pack", str(file), "--accelerator", "h100-sxm=1"]) == 2
    assert "cannot read the models" in capsys.readouterr().err


def test_model_larger_than_a_device_is_split_over_devices_of_one_node() -> None:
    large, small = Tenant(model="llama-3.1-70b", rate=0.5), Tenant(model="llama-3.1-8b", rate=0.5)
    found = pack([small, large], {"h100-sxm": 12}, ROWS)
    parts = [
        (device, part)
        for device in found.devices
        for part in device.replicas
        if part.model == large.model
    ]
    assert [part.tp for _, part in parts] == [4] * 4 and {part.number for _, part in parts} == {0}
    assert len({device.node for device, _ in parts}) == 1
    weights = sum(part.memory_bytes for _, part in parts)
    assert weights > 2 * 69e9
    for device in found.devices:
        assert device.memory_bytes <= device.usable_bytes and device.busy <= MAX_BUSY
    assert len(found.devices) == 4  # the small model shares the devices of the large one


def test_split_replica_does_not_span_nodes() -> None:
    (part,) = replicas_of(Tenant(model="llama-3.1-70b", rate=1.0), ROWS["h100-sxm"], 8)
    half = 0.5 / part.busy  # requests/s that take half of the time of eight devices
    crowd = [Tenant(model="llama-3.1-70b", rate=half + i / 1000, tp=8) for i in range(2)]
    with pytest.raises(DoesNotFit, match="no room left"):
        pack(crowd, {"h100-sxm": 15}, ROWS)
    assert len(pack(crowd, {"h100-sxm": 16}, ROWS).devices) == 16


def test_chosen_tp_is_kept_and_needs_a_link() -> None:
    found = pack([Tenant(model="llama-3.1-8b", rate=0.5, tp=2)], {"h100-sxm": 4}, ROWS)
    assert len(found.devices) == 2
    with pytest.raises(DoesNotFit, match="link rate"):
        pack([Tenant(model="llama-3.1-8b", rate=0.5, tp=2)], {"a10g": 4}, ROWS)
