"""Terms of single techniques in predictions, plans and simulations, each against a slow count."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

import ridgeline
from ridgeline.config.planning import PlanOptions, SimulateOptions
from ridgeline.config.settings import Speculative
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost import num_params
from ridgeline.modelspec.cost.serving_formats import parse_weight_dtype, serving_format
from ridgeline.modelspec.what_if import edited_spec
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.packed_table import with_packed_table
from ridgeline.plan.step_time.predict import Prediction, predict, replica_of
from ridgeline.plan.step_time.quantization_cost import WINDOWS, QuantizationCost, quantization_cost
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.simulated import HostedStepTimes, HostTime, ModelledStepTimes
from ridgeline.plan.step_time.waterfall import waterfall
from ridgeline.workflows.planning.plan_demand import demand_of_options, with_options

POINT = OperatingPoint(model="llama-3.1-8b", device="h100-sxm", isl=512, osl=64, batch=8)


def at(**changes: Any) -> Prediction:
    return predict(msgspec.structs.replace(POINT, **changes))


def machine(model: str, weights: str | None = None, device: str = "h100-sxm") -> Replica:
    spec = load_planning_spec(model)
    return build_replica(spec, find_accelerator(device), weight_dtype=weights)


def test_beams_decode_as_that_many_requests_and_share_their_prompt() -> None:
    beams, requests = at(batch=2, beam_width=4), at(batch=8)
    assert beams.decode_ms == requests.decode_ms
    assert beams.ttft_ms < requests.ttft_ms, "two prompts and not eight"
    assert beams.kv_tokens_each == 512 + 4 * 64
    with pytest.raises(BadInput, match="beam search cannot be combined with drafts"):
        at(beam_width=2, num_speculative_tokens=2, acceptance=0.5)


def test_a_packed_table_takes_its_bytes_less() -> None:
    tied, apart = machine("llama-3.2-1b"), machine("llama-3.1-8b")
    for here in (tied, apart):
        packed = with_packed_table(here, 8)
        rows, size = here.spec.vocab_size, here.spec.hidden_size
        saved = 2 * rows * size - (rows * size + 2 * rows)
        assert here.resident_bytes - packed.resident_bytes == saved
    assert with_packed_table(tied, 8).head_bytes < tied.head_bytes
    assert with_packed_table(apart, 8).head_bytes == apart.head_bytes


@pytest.mark.parametrize(
    ("form", "other", "ratio"),
    [
        ("sparse-24", "bfloat16", 9 / 16),
        ("sparse-24-int8", "int8", 5 / 8),
        ("llm-int8", "int8", 9 / 8),
        ("mixed-5.5", "mixed-2.75", 2),
        ("int8-wo", "bfloat16", 1 / 2),
    ],
)
def test_formats_take_their_share_of_the_bytes(form: str, other: str, ratio: float) -> None:
    """Without scales, of which a matrix this wide has few."""
    first, second = (serving_format(parse_weight_dtype(name)) for name in (form, other))
    assert first.nbytes(1e9, 1) / second.nbytes(1e9, 1) == pytest.approx(ratio, rel=1e-6)


def test_unknown_mean_bits_are_refused() -> None:
    for name in ("mixed-9", "mixed-", "mixed-1"):
        with pytest.raises(BadInput, match="unknown weight dtype"):
            parse_weight_dtype(name)


def test_an_edited_shape_has_the_parameters_of_one() -> None:
    spec = load_planning_spec("llama-3.1-8b")
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert num_params(spec) - num_params(edited_spec(spec, "layers=20")) == 12 * layer
    fewer = 32 * 3 * 4096 * (14336 - 7168)
    assert num_params(spec) - num_params(edited_spec(spec, "channels=7168")) == fewer
    tied = load_planning_spec("llama-3.2-1b")
    more = num_params(edited_spec(tied, "own_head=1")) - num_params(tied)
    assert more == tied.vocab_size * tied.hidden_size


def test_layers_that_are_kept_have_the_shares_of_their_kinds() -> None:
    spec = load_planning_spec("gemma-3-12b")  # 48 layers, one in six sees everything
    half = edited_spec(spec, "layers=24")
    assert len(half.layers) == 24
    assert sum(layer.attention.window is None for layer in half.layers) == 4
    uneven = edited_spec(spec, "layers=7")
    assert len(uneven.layers) == 7
    assert sum(layer.attention.window is None for layer in uneven.layers) == 1


def test_states_and_attention_change_places() -> None:
    spec = load_planning_spec("qwen3.5-4b")
    every = edited_spec(spec, "attention_every=4")
    assert [x.attention.delta is None for x in every.layers] == [
        x.attention.delta is None for x in spec.layers
    ]
    assert not any(x.attention.delta for x in edited_spec(spec, "attention_every=1").layers)


@pytest.mark.parametrize(
    ("edits", "error"),
    [
        ("layers=33", "layers is more"),
        ("experts_per_token=2", "experts_per_token is more"),
        ("attention_every=4", "attention_every needs"),
        ("own_head=1", "separate table already"),
        ("layers=20 context=100", "--input-len"),
        ("layers=20 kv_dtype=int8", "--kv-cache-dtype"),
    ],
)
def test_edits_without_a_meaning_are_refused(edits: str, error: str) -> None:
    with pytest.raises(BadInput, match=error):
        edited_spec(load_planning_spec("llama-3.1-8b"), edits)


def test_all_experts_of_a_token_are_read() -> None:
    model = {"model": "qwen3-30b-a3b", "batch": 1}
    few, all_of_them = at(**model), at(**model, what_if="experts_per_token=128")
    assert all_of_them.decode_ms > 3 * few.decode_ms


def slow_flops(model: str, method: str) -> float:
    """What GPTQ or rounding computes, linear by linear."""
    spec, tokens, total = load_planning_spec(model), WINDOWS * 256, 0.0
    for layer in spec.layers:
        a, m = layer.attention, layer.mlp
        for linears in ((a.q, a.k, a.v), (a.o,), (m.gate, m.up), (m.down,)):
            size = linears[0].num_in
            outputs = sum(linear.num_out for linear in linears)
            total += 60 * size * outputs
            if method == "rtn":
                continue
            total += 2 * (2 * size * outputs * tokens)  # both passes
            total += 2 * (2 * size**2 * tokens)  # correlations of inputs and of differences
            total += 4 / 3 * size**3 + outputs * size**2  # factor and updates
            total += size**3 / 3 + 2 * outputs * size**2  # compensation
    return total


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_quantising_costs_what_its_linears_do(method: str) -> None:
    for model in ("smollm2-135m", "llama-3.2-1b"):
        cost = quantization_cost(machine(model, "int4"), method, 1e-3)
        assert cost.flops == pytest.approx(slow_flops(model, method))
        assert cost.least_s == cost.flops / find_accelerator("h100-sxm").peak_flops["bfloat16"]
        assert cost.pays_after == math.ceil(cost.least_s / 1e-3)


def test_methods_cost_more_the_more_they_read() -> None:
    costs = [
        quantization_cost(machine("llama-1b-32k", "int4"), method, 0.0)
        for method in ("rtn", "hqq", "awq", "gptq", "qat")
    ]
    assert [c.flops for c in costs] == sorted(c.flops for c in costs)
    assert all(cost.pays_after is None for cost in costs)
    assert [cost.passes for cost in costs] == [0, 0, 2, 2, 2]
    assert costs[-1].memory_bytes == 24 * num_linear_weights("llama-1b-32k")


def num_linear_weights(model: str) -> int:
    spec = load_planning_spec(model)
    tables = (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size
    norms = spec.hidden_size * (2 * len(spec.layers) + 1)
    return num_params(spec) - tables - norms


def test_what_quantising_saves_is_a_request_of_the_point() -> None:
    making = at(weight_dtype="int4", quantization_method="gptq").making
    assert isinstance(making, QuantizationCost) and making.saved_s > 0
    assert making.pays_after == math.ceil(making.least_s / making.saved_s)
    assert at(weight_dtype="int4").making is None
    with pytest.raises(BadInput, match="does not make this weight format"):
        at(weight_dtype="int4", quantization_method="smoothquant")
    with pytest.raises(BadInput, match="unknown quantisation method"):
        at(weight_dtype="int4", quantization_method="magic")


def test_thinking_beyond_its_budget_is_no_output() -> None:
    given: dict[str, Any] = {"accelerator": "h100-sxm", "input_len": 512, "output_len": 600}
    cut = ridgeline.predict("llama-3.1-8b", **given, thinking_len=500, thinking_token_budget=100)
    assert cut.point.osl == 200
    within = ridgeline.predict("llama-3.1-8b", **given, thinking_len=90, thinking_token_budget=100)
    assert within.point.osl == 600
    with pytest.raises(BadInput, match="thinking-len is a part of the output"):
        ridgeline.predict("llama-3.1-8b", **given, thinking_len=601, thinking_token_budget=100)


def test_the_host_adds_what_it_says() -> None:
    here = machine("llama-3.1-8b")
    plain = ModelledStepTimes(here)
    shapes, decodes = [(512, 0), (1, 900), (1, 40)], [(1, 900), (1, 40)]
    masks = HostedStepTimes(here, None, HostTime(token_s=1e-3))
    for each in (shapes, decodes):
        assert masks.step_s(each, 2) == pytest.approx(plain.step_s(each, 2) + 2e-3)
    waits = HostedStepTimes(here, None, HostTime(step_s=1e-3, sequence_s=1e-4))
    assert waits.step_s(shapes, 3) == pytest.approx(plain.step_s(shapes, 3) + 1.3e-3)
    eager = HostedStepTimes(here, None, HostTime(layer_s=1e-2))
    assert eager.step_s(decodes, 2) == pytest.approx(0.32)


def simulated(**changes: Any) -> Any:
    given: dict[str, Any] = {"accelerator": "l4", "num_prompts": 60, "request_rate": 2.0}
    return ridgeline.simulate("llama-3.1-8b", **{**given, **changes}).summary


@pytest.mark.slow
def test_whole_prompts_make_the_longest_pauses() -> None:
    load = {"input_len": 3000, "output_len": 100, "request_rate": 0.5}
    chunks = simulated(**load, max_num_batched_tokens=512)
    whole = simulated(**load, max_num_batched_tokens=512, enable_chunked_prefill=False)
    assert chunks.num_steps > whole.num_steps
    assert whole.num_served == chunks.num_served == 60


@pytest.mark.slow
def test_larger_blocks_hold_fewer_requests() -> None:
    load = {"input_len": 1100, "output_len": 100, "request_rate": 20.0}
    small, large = simulated(**load), simulated(**load, block_size=1024)
    assert large.queue.mean > 1.5 * small.queue.mean
    assert large.num_steps > small.num_steps, "fewer sequences in each"


@pytest.mark.slow
def test_a_full_cache_computes_tokens_again() -> None:
    load = {"input_len": 3000, "output_len": 1000, "num_prompts": 40, "request_rate": 3.0}
    full, few = simulated(**load), simulated(**load, max_num_seqs=6)
    assert full.num_preempted > 0 and few.num_preempted == 0


@pytest.mark.slow
def test_masks_and_launches_slow_decoding_down() -> None:
    plain = simulated()
    for change in (
        {"structured_share": 1.0},
        {"token_rules_share": 1.0},
        {"async_scheduling": False},
    ):
        assert simulated(**change).tpot.mean > plain.tpot.mean, change
    fast = {"accelerator": "h100-sxm"}
    assert simulated(**fast, enforce_eager=True).tpot.mean > simulated(**fast).tpot.mean


def test_a_calibration_has_its_host_already() -> None:
    from ridgeline.workflows.planning.simulated_fleet import step_times_of
    from tests.plan.test_calibration import made_up

    here = build_replica(load_planning_spec("qwen2.5-0.5b"), made_up().accelerator())
    for change in ({"enforce_eager": True}, {"async_scheduling": False}):
        options = SimulateOptions(model="qwen2.5-0.5b", **change)
        with pytest.raises(CannotRun, match="a calibration times steps as the engine runs them"):
            step_times_of(options, here)


def demand(**changes: Any) -> Any:
    options = PlanOptions(model="llama-3.1-8b", request_rate=20.0, **changes)
    return with_options(demand_of_options(options), options, load_planning_spec(options.model))


def test_reduced_contexts_are_shorter_prompts() -> None:
    assert demand(dropped_context_share=0.25).isl == 768
    half = demand(document_len=800, keep_ratio=0.5)
    assert (half.isl, half.scored, half.computed_isl) == (624, 800, 1424)
    known = demand(document_len=800, keep_ratio=0.5, new_document_share=0.1)
    assert known.computed_isl == 624 + 80
    both = demand(document_len=800, keep_ratio=0.5, dropped_context_share=0.5)
    assert both.isl == 256, "of 512 tokens that are left, all are documents"


def test_a_canary_needs_replicas_for_its_copies() -> None:
    plain, copied = demand(), demand(canary_shadow_share=0.1)
    for rate in (0.5, 3.0, 40.0):
        extra = copied.replicas_at(rate, 0.05) - plain.replicas_at(rate, 0.05)
        assert extra == math.ceil(0.1 * 20 / rate) == copied.canary_replicas(rate)


def test_a_managed_api_takes_its_share_of_the_rate() -> None:
    left = demand(fallback_share=0.25)
    assert left.computed_rate == 15.0 and left.rate == 20.0
    assert left.replicas_at(5.0, 0.05) == 3
    with pytest.raises(BadInput, match="leave nothing to plan for"):
        demand(fallback_share=1.0)


@pytest.mark.slow
def test_a_bill_has_the_price_of_the_api_and_of_the_canary() -> None:
    given: dict[str, Any] = {"accelerator": "l4", "request_rate": 20.0, "slo": "ttft:2000 tpot:100"}
    plain = ridgeline.plan("llama-3.1-8b", **given)
    part = ridgeline.plan("llama-3.1-8b", **given, fallback_share=0.25)
    assert plain.bill is not None and part.bill is not None
    assert plain.bill.api_per_month is not None
    assert part.bill.fallback_per_month == pytest.approx(0.25 * plain.bill.api_per_month)
    assert part.bill.per_month < plain.bill.per_month
    assert "left to the API cost" in part.bill.sentence
    hourly = part.bill.per_hour + part.bill.fallback_per_month / 730
    assert part.requests.per_request == pytest.approx(hourly / 3600 / 20)
    canary = ridgeline.plan("llama-3.1-8b", **given, canary_shadow_share=0.2)
    assert canary.fleets[0].num_replicas > plain.fleets[0].num_replicas
    assert canary.fleets[0].ttft_s == plain.fleets[0].ttft_s
    assert any("run a new version" in note for note in canary.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"beam_width": 4},
        {"beam_width": 2, "batch": 1},
        {"speculative": Speculative(method="eagle", num_speculative_tokens=3), "acceptance": 0.6},
        {"speculative": Speculative(method="medusa", speculative_token_tree="[(0,), (1,)]")}
        | {"acceptance": 0.4},
        {"speculative": Speculative(method="ngram"), "acceptance": 0.3, "draft_share": 0.35},
        {"speculative": Speculative(method="ngram"), "acceptance": 0.0},
        {"num_speculative_tokens": 3, "acceptance": 0.5, "draft_share": 0.2},
        {"what_if": "layers=16 window=128", "embedding_bits": 8},
    ],
)
def test_terms_add_up_to_the_prediction(changes: dict[str, Any]) -> None:
    point = msgspec.structs.replace(POINT, **changes)
    terms = waterfall(point, predict(point))
    assert terms.tpot_ms == pytest.approx(predict(point).tpot_ms)


def test_replicas_of_a_point_have_its_edits_and_its_table() -> None:
    edited = replica_of(
        msgspec.structs.replace(POINT, what_if="layers=16", embedding_bits=8),
        {"h100-sxm": find_accelerator("h100-sxm")},
    )
    assert len(edited.spec.layers) == 16
    whole = machine("llama-3.1-8b")
    assert edited.resident_bytes < 0.6 * whole.resident_bytes
