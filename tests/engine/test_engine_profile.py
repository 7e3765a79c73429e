"""Operator times of a running engine: nothing is counted twice, left out or changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.config.settings import settings_from
from ridgeline.engine.build import EngineParts, assemble
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.profiling.operator_timer import Stopwatch, operators_timed
from ridgeline.engine.profiling.profile import ProfileOptions, StepDriver, check_options, profile
from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.errors import BadInput, CannotRun, DoesNotFit
from ridgeline.modelspec.cost.operators import operator_work, work_of
from ridgeline.records import OperatorTime
from tests.conformance.tiny_models import GREEDY, VOCAB, load_ours, make_model

SMALL: dict[str, Any] = {"model": "demo", "max_model_len": 128, "max_num_seqs": 4}
OPTIONS = ProfileOptions(prompt=40, batch=3, context=20, passes=3)
LAYERS = ("native", "torch")


def opened(**more: Any) -> tuple[ResolvedSettings, EngineParts]:
    settings = settings_from({"model": "demo", **SMALL, **more})
    resolved = resolve(settings)
    return resolved, assemble(resolved)


@pytest.fixture(scope="module", params=LAYERS)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[ResolvedSettings, EngineParts]]:
    quantization = "int4" if request.param == "native" else None
    yield opened(layer_backend=request.param, quantization=quantization, num_threads=1)


def test_nested_calls_are_counted_once() -> None:
    at = iter([0.0, 1.0, 3.0, 6.0, 10.0, 11.0])
    watch = Stopwatch(lambda: next(at))
    inner = watch.timed("inner", lambda: "x")
    assert watch.timed("outer", inner)() == "x"  # 0 to 6, of which 1 to 3 in the inner call
    inner()
    assert watch.read() == {"inner": OperatorTime(2, 3.0), "outer": OperatorTime(1, 4.0)}
    assert watch.read() == {}


@pytest.mark.slow
def test_operators_and_host_add_up_to_the_step(
    engine: tuple[ResolvedSettings, EngineParts],
) -> None:
    resolved, parts = engine
    for phase in profile(parts, resolved, OPTIONS):
        assert len(phase.passes) == len(phase.plain_s) == OPTIONS.passes
        for step in (step for steps in phase.passes for step in steps):
            spent = sum(operator.time_s for operator in step.operators.values())
            assert spent + step.host_s == pytest.approx(step.time_s)
            assert all(operator.time_s >= 0 for operator in step.operators.values())
            assert 0 < step.host_s < step.time_s  # the kernels' clock agrees with ours


@pytest.mark.slow
def test_all_work_of_the_spec_has_an_operator(
    engine: tuple[ResolvedSettings, EngineParts],
) -> None:
    resolved, parts = engine
    layers = len(resolved.spec.layers)
    for phase in profile(parts, resolved, OPTIONS):
        step = phase.passes[0][0]
        work = operator_work(resolved.spec, step.shapes, step.num_sampled)
        named = {part for name in step.operators for part in name.split("+")}
        extra = {"quantise", "residual"}  # not needed if rows stay as they are
        assert set(work) - extra <= named <= set(work) | extra
        for name in ("qkv", "o", "gate_up", "down"):
            assert step.operators[name].calls == layers
        assert step.operators["lm_head"].calls == 1


def test_pass_longer_than_the_limit_is_timed_once(
    engine: tuple[ResolvedSettings, EngineParts],
) -> None:
    resolved, parts = engine
    at = iter(range(1_000_000))  # the clock advances by one second per reading
    options = msgspec.structs.replace(OPTIONS, limit_s=0.5, seed=2)
    for phase in profile(parts, resolved, options, lambda: float(next(at))):
        assert len(phase.passes) == len(phase.plain_s) == 1
        assert phase.plain_s[0] >= 1.0


def test_shapes_are_those_of_the_steps(engine: tuple[ResolvedSettings, EngineParts]) -> None:
    resolved, parts = engine
    unseen = msgspec.structs.replace(OPTIONS, seed=1)  # not in the prefix cache
    prefill, decode = profile(parts, resolved, unseen)
    assert [step.shapes for step in prefill.passes[0]] == [((40, 0),)]
    shapes = decode.passes[0][0].shapes
    assert len(shapes) == 3 and all(new == 1 and done >= 20 for new, done in shapes)
    assert decode.passes[0][0].num_sampled == 3
    assert not parts.scheduler.has_work


def test_bytes_are_those_of_the_weights_in_memory() -> None:
    resolved, parts = opened(layer_backend="native", quantization="int8", num_threads=1)
    work = operator_work(resolved.spec, [(1, 5)], 1)
    blocks = parts.runner.decoder.blocks
    kept: dict[str, float] = {
        "qkv": sum(block.attention.qkv.nbytes for block in blocks),
        "down": sum(block.mlp.down.nbytes for block in blocks),  # type: ignore[attr-defined]
    }
    for name, nbytes in kept.items():
        assert work_of(name, work).memory_bytes == pytest.approx(nbytes, rel=0.01)


def test_timing_changes_no_token_and_restores_everything(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    runner = load_ours(tmp_path).runner
    prompt = tuple((7 * i + 3) % VOCAB for i in range(23))
    plan = StepPlan(
        0, (Run(0, 0, prompt, (0, 1, 2, 3, 4, 5), SamplePoint(GREEDY, 0, 0, len(prompt))),)
    )
    before, plain = dict(vars(runner)), runner.run(plan)
    decoder = dict(vars(runner.decoder))
    with operators_timed(runner, Stopwatch()) as read:
        assert runner.run(plan) == plain
        assert {"qkv", "attention+kv_write", "lm_head", "sampling"} <= set(read())
    assert vars(runner) == before and vars(runner.decoder) == decoder


def test_first_sequence_still_decodes_when_the_last_prompt_is_computed() -> None:
    """The other prompts take 20 steps, twice the number of warm-up and timed steps."""
    options = ProfileOptions(prompt=4, batch=4, context=80, passes=1)
    longest = options.decode_tokens(16)
    assert longest >= 80 + 20 + 2
    resolved, parts = opened(max_num_batched_tokens=16, max_model_len=longest, num_threads=1)
    _, decode = profile(parts, resolved, options)
    assert len(decode.passes[0][0].shapes) == options.batch


def test_too_few_blocks_to_grow_into_are_reported() -> None:
    """There are blocks for all sequences at their longest, but the last one is never admitted."""
    options = ProfileOptions(prompt=4, batch=4, context=32, passes=1)
    longest = options.decode_tokens(512)
    resolved, parts = opened(max_num_batched_tokens=40, max_model_len=48, num_threads=1)
    assert resolved.num_blocks == 4 * 3 and longest <= 48
    with pytest.raises(CannotRun, match=r"never ran all sequences at once.*one to grow into"):
        StepDriver(parts, resolved.spec.vocab_size).start_decoding(4, 32)


def test_what_does_not_fit_is_rejected_before_the_first_step() -> None:
    resolved = resolve(settings_from(SMALL))
    longer = msgspec.structs.replace(OPTIONS, prompt=200)
    with pytest.raises(BadInput, match="longer than the model's context"):
        check_options(resolved, longer)
    with pytest.raises(BadInput, match="more sequences than --max-num-seqs"):
        check_options(resolved, msgspec.structs.replace(OPTIONS, batch=5))
    with pytest.raises(DoesNotFit, match="cannot hold"):
        few = settings_from(
            {"model": "demo", **SMALL, "kv_cache_memory_bytes": 1 << 20, "block_size": 64}
        )
        check_options(resolve(few), msgspec.structs.replace(OPTIONS, batch=4, context=80))
    drafting = settings_from({"model": "demo", **SMALL, "speculative_config": {"method": "ngram"}})
    with pytest.raises(CannotRun, match="drafter"):
        check_options(resolve(drafting), OPTIONS)
