"""`ridgeline explain`'s advice: arithmetic that can be checked by hand, without an engine."""

from __future__ import annotations

import msgspec
import pytest

from ridgeline.config.settings import Settings, Speculative
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import decode_work
from ridgeline.modelspec.rewrite import apply_quantization
from ridgeline.roofline import Peaks
from ridgeline.workflows.explain.recommendations import PricedConfiguration, recommendations

PEAKS = Peaks(flops_s=1e15, bytes_s=1e10, dtype="float32")


def price(settings: Settings) -> PricedConfiguration:
    """A machine of endless arithmetic: every bound is bytes."""
    spec = load_spec("dummy:llama-3.2-1b")
    if settings.quantization:
        spec = apply_quantization(spec, settings.quantization)
    values = msgspec.structs.asdict(settings)
    values["max_num_seqs"] = settings.max_num_seqs or 4
    values["max_num_batched_tokens"] = settings.max_num_batched_tokens or 512
    return PricedConfiguration(values=values, spec=spec, peaks=PEAKS)


def test_recommendations_are_in_use_impossible_or_useful() -> None:
    by_rung = {
        recommendation.rung: recommendation for recommendation in recommendations(Settings(), price)
    }
    assert by_rung["continuous-batching"].verdict == "in use"
    assert by_rung["static-batching"].verdict == "not now"
    assert "found continuous" in by_rung["static-batching"].reason
    assert by_rung["int8"].verdict == "moves the bound"
    assert by_rung["batch-limit"].verdict == "moves the bound"
    assert all(each.hurts_when for each in by_rung.values())


def test_speculation_in_use_is_recognised_and_blocks_other_speculation() -> None:
    speculating = Settings(speculative_config=Speculative(method="suffix"))
    by_rung = {row.rung: row for row in recommendations(speculating, price)}
    assert by_rung["suffix-speculation"].verdict == "in use"
    assert by_rung["ngram-speculation"].verdict == "not now"
    assert "found suffix" in by_rung["ngram-speculation"].reason


def test_int8_weights_do_not_say_which_method_made_them() -> None:
    by_rung = {row.rung: row for row in recommendations(Settings(quantization="int8"), price)}
    assert by_rung["int8"].verdict == "in use"
    assert by_rung["int8-made"].verdict == "not now"
    assert "found int8" in by_rung["int8-made"].reason


def test_the_bound_is_the_specs_bytes_over_the_bandwidth() -> None:
    here = price(Settings())
    expected = decode_work(here.spec, 4, 512).bytes / 1e10 / 4
    assert here.bounds.decode_token_s == pytest.approx(expected)
