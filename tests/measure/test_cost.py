"""Dollars per token and per request, against sums by hand."""

from __future__ import annotations

import math

import msgspec
import pytest

from ridgeline.errors import BadInput
from ridgeline.measure.metrics.run_cost import cost_line, cost_of, cost_of_run
from ridgeline.measure.metrics.summary import summarise
from ridgeline.records import EngineInfo
from tests.diagnose.faults import LOADS, Engine, run


def test_by_hand():
    """3.60 $/h is a tenth of a cent per second; 100 tok/s out, 400 in, 2 requests/s, 1.5 good."""
    found = cost_of(
        3.6,
        input_tok_s=400,
        output_tok_s=100,
        request_rate=2.0,
        goodput_req_s=1.5,
        prefill_share=0.25,
    )
    assert found.per_million_output == pytest.approx(10.0)
    assert found.per_million_input_split == pytest.approx(0.625)
    assert found.per_million_output_split == pytest.approx(7.5)
    assert found.per_request == pytest.approx(0.0005)
    assert found.per_good_request == pytest.approx(0.001 / 1.5)
    spent = 400 * found.per_million_input_split + 100 * found.per_million_output_split
    assert spent / 1e6 == pytest.approx(0.001)  # the split charges the second once


def test_nothing_came_out_and_nothing_is_known():
    found = cost_of(
        1.0, input_tok_s=0, output_tok_s=0, request_rate=0, goodput_req_s=None, prefill_share=None
    )
    assert (found.per_million_output, found.per_request, found.per_good_request) == (None,) * 3
    assert found.per_million_output_split is None
    for price in (-1.0, math.nan, math.inf):
        with pytest.raises(BadInput):
            cost_of(
                price,
                input_tok_s=1,
                output_tok_s=1,
                request_rate=1,
                goodput_req_s=None,
                prefill_share=None,
            )


def test_costs_on_the_line_add_up_to_the_bill():
    """The split is printed as a pair: whole output next to split input would exceed the bill."""
    cost = cost_of(
        3.6, input_tok_s=400, output_tok_s=100, request_rate=2.0, goodput_req_s=None,
        prefill_share=0.25,
    )  # fmt: skip
    line = cost_line(cost)
    assert "$10 for 1M output tokens, or" in line
    assert "$0.625 for 1M input and $7.5 for 1M output tokens" in line


def test_an_hour_of_a_twin_is_as_many_hours_of_its_devices_as_its_speed_says():
    record, _ = run(Engine(), LOADS[0])
    info = EngineInfo(
        model="m",
        settings={"twin": "1 x h100-sxm, modelled, 10 times as fast"},
        derivations={},
        max_model_len=64,
        num_blocks=4,
        block_size=16,
        weight_bytes=1,
        kv_bytes_per_token=1,
        device="elsewhere",
        compute_dtype="",
    )
    sped_up = msgspec.structs.replace(record, info=info)
    summary = summarise(record)
    real, twin = (cost_of_run(given, summary, 3.6) for given in (record, sped_up))
    assert real is not None and twin is not None
    assert twin.per_million_output == pytest.approx(10 * real.per_million_output)
