"""MFU and MBU from tokens alone, compared with the step records of the same run."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.render.measure.bench import observed_table
from ridgeline.errors import UserError
from ridgeline.measure.metrics.remote_utilisation import remote_utilisation
from ridgeline.measure.metrics.step_metrics import utilisation
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.records import EngineInfo
from ridgeline.roofline import Peaks
from ridgeline.workflows.bench.observed_tables import observed_tables
from ridgeline.workflows.load.server_monitor import Observed
from ridgeline.workflows.load.server_utilisation import server_utilisation
from ridgeline.workflows.targets import RemoteServer, model_on_device
from tests.diagnose.faults import LOADS, Engine, run

PEAKS = Peaks(flops_s=1e12, bytes_s=1e10)


def server_info(settings: dict[str, object], device: str = "cpu") -> EngineInfo:
    return EngineInfo(
        model="demo",
        settings=settings,
        derivations={},
        max_model_len=64,
        num_blocks=4,
        block_size=16,
        weight_bytes=1,
        kv_bytes_per_token=1,
        device=device,
        compute_dtype="bfloat16",
    )


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_utilisation_from_tokens_matches_the_step_records(load) -> None:
    record, _ = run(Engine(), load)
    work = model_on_device("dummy:tinyllama-1.1b", "h100-sxm").price
    truth = utilisation(record, work, PEAKS)["overall"]
    blind = msgspec.structs.replace(record, steps=())
    found = remote_utilisation(
        blind, work, PEAKS, num_steps=len([s for s in record.steps if s.shapes])
    )
    assert found.mfu == pytest.approx(truth.mfu_wall, rel=0.05)
    assert found.mbu == pytest.approx(truth.mbu_wall, rel=0.15)


def test_mbu_needs_the_number_of_steps() -> None:
    record, _ = run(Engine(), LOADS[0])
    device = model_on_device("dummy:tinyllama-1.1b", "2xh100-sxm")
    found = server_utilisation(record, None, device)
    assert found.mbu is None and found.nbytes is None and found.mfu > 0
    one = server_utilisation(record, None, model_on_device("dummy:tinyllama-1.1b", "h100-sxm"))
    assert one.mfu == pytest.approx(2 * found.mfu)


def test_steps_of_the_warm_up_are_excluded() -> None:
    record, _ = run(Engine(), LOADS[0])
    made = sum(request.output_tokens for request in record.requests)
    counts = {"num_steps": 2000.0, "output_tokens": 2.0 * made, "queried_tokens": 10.0}
    report = ServerReport(
        server="vllm",
        num_readings=3,
        means={"running": 2.0, "kv_used_share": 0.5},
        p95={},
        counts=counts | {"hit_tokens": 5.0},
        mean_s={"queue_s": 0.1},
    )
    device = model_on_device("dummy:tinyllama-1.1b", "h100-sxm")
    found = server_utilisation(record, report, device)
    assert found.num_steps == 1000
    assert (
        found.flops < server_utilisation(record, None, device).flops
    )  # half of the prompts came from the cache
    console = Console(record=True, width=120)
    for table in observed_tables(Observed(server=report), found, device.name, in_process=False):
        console.print(observed_table(table))
    text = console.export_text()
    for words in ("vllm", "50%", "100.0  ms per request", "MFU, MBU", "1 x h100-sxm"):
        assert words in text


def test_own_server_reports_its_number_of_steps() -> None:
    """Activations in two digits are two products (Format.digits); the head's stay one."""

    def flops(**settings: str) -> float:
        info = server_info({"quantization": "int8", **settings})
        return model_on_device("demo", "t4", info).price([(1, 0)], 0).flops

    assert 1.9 < flops(activations="int16") / flops() < 2.0  # attention is not twice


@pytest.mark.parametrize(
    "info",
    [
        server_info({}, device="a twin of 1 x h100-sxm, modelled, 10 times as fast"),
        server_info({"twin": "1 x h100-sxm, modelled, 10 times as fast"}, device="elsewhere"),
    ],
    ids=["own", "of another server"],
)
def test_peaks_of_a_twin_are_in_its_time(info: EngineInfo) -> None:
    real, twin = (
        model_on_device("dummy:tinyllama-1.1b", "h100-sxm", given).peaks for given in (None, info)
    )
    assert twin.flops_s == pytest.approx(10 * real.flops_s)
    assert twin.bytes_s == pytest.approx(10 * real.bytes_s)
    assert "times 10, the speed of its twin" in twin.source


def test_a_published_shape_needs_no_prefix() -> None:
    shape, dummy = (
        model_on_device(name, "h100-sxm").price([(1, 0)], 1)
        for name in ("llama-3.1-8b", "dummy:llama-3.1-8b")
    )
    assert shape.flops == pytest.approx(dummy.flops)


def test_unknown_device_is_rejected() -> None:
    with pytest.raises(UserError, match="h1000"):
        model_on_device("dummy:tinyllama-1.1b", "h1000")
    assert RemoteServer(url="http://h").shape is None
