"""Bad input raises an error with value, limit and fix before anything runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest

from ridgeline import Engine, Sampling
from ridgeline.errors import BadInput, BadModel, CannotRun, DoesNotFit, UserError
from ridgeline.records import OutputGrammar

GREEDY = Sampling(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    small = {"kv_cache_memory_bytes": 2 << 20, "max_model_len": 128, "num_threads": 1}
    with Engine.open("demo", **small) as opened:
        yield opened


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt_is_rejected(engine: Engine, prompt: object) -> None:
    with pytest.raises(BadInput, match=r"the prompt is empty.*fix"):
        engine.generate([prompt], GREEDY)


def test_prompt_longer_than_the_context_is_rejected(engine: Engine) -> None:
    with pytest.raises(BadInput, match=r"got '128 tokens'; limit: 127 tokens; fix"):
        engine.generate([[5] * 128], GREEDY)
    assert len(engine.generate([[5] * 127], GREEDY)[0].tokens) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"n": 0},
        {"min_tokens": 9, "max_tokens": 3},
    ],
)
def test_sampling_out_of_range_is_rejected(fields: dict) -> None:
    with pytest.raises(BadInput):
        Sampling(**fields)


def test_sampling_without_an_allowed_token_is_rejected(engine: Engine) -> None:
    end = engine.resolved.spec.eos_token_ids[0]
    wanted = {"temperature": 0.0, "max_tokens": 4, "min_tokens": 2}
    for refused in (
        Sampling(**wanted, allowed_token_ids=(end,)),
        Sampling(**wanted, allowed_token_ids=(end, 9, 5), stop_token_ids=(5, 9)),
        Sampling(**wanted, stop_token_ids=tuple(range(4096))),
    ):
        with pytest.raises(BadInput, match=r"before min_tokens; got 2; fix"):
            engine.generate([[5]], refused)
    free = Sampling(**wanted, allowed_token_ids=(end, 9), ignore_eos=True, stop_token_ids=(9,))
    assert engine.generate([[5]], [free])[0].tokens[:2] == (end, end)
    with pytest.raises(BadInput, match="either"):
        Sampling(structured=OutputGrammar("regex", "a+"), allowed_token_ids=(5,))


@pytest.mark.parametrize("token", [-1, 4096, 1.5, "a", None, True])
def test_invalid_token_ids_are_rejected(engine: Engine, token: object) -> None:
    with pytest.raises(BadInput, match=r"index 1.*0\.\.4095"):
        engine.generate([[5, token]], GREEDY)


@pytest.mark.parametrize(
    "sampling", [Sampling(logit_bias={4096: 1.0}), Sampling(stop_token_ids=(-3,))]
)
def test_token_ids_in_sampling_are_checked(engine: Engine, sampling: Sampling) -> None:
    with pytest.raises(BadInput, match=r"0\.\.4095"):
        engine.generate([[5]], sampling)


def test_one_bad_prompt_rejects_the_batch_before_it_runs(engine: Engine) -> None:
    before = engine.counters()["num_steps"]
    with pytest.raises(BadInput):
        engine.generate(["fine", ""], GREEDY)
    assert engine.counters()["num_steps"] == before


async def test_streams_raise_before_the_first_event(engine: Engine) -> None:
    for prompt in ("", [5] * 500):
        with pytest.raises(BadInput):
            await anext(engine.stream(prompt, GREEDY))


@pytest.mark.slow
async def test_id_in_use_is_rejected(engine: Engine) -> None:
    first = engine.stream("a", Sampling(max_tokens=100, ignore_eos=True), request_id="same")
    await anext(first)
    with pytest.raises(BadInput, match="being served"):
        await anext(engine.stream("b", GREEDY, request_id="same"))
    assert len([event async for event in first]) > 10  # the first request is not affected
    await asyncio.sleep(0)
    assert [event async for event in engine.stream("b", GREEDY, request_id="same")]


@pytest.mark.slow
async def test_generated_ids_never_collide_with_given_ones(engine: Engine) -> None:
    """Whatever ids callers choose, before or after the engine generated its own."""
    endless = Sampling(max_tokens=100, ignore_eos=True)
    made = engine.stream("a", endless)
    chosen = [engine.stream("a", endless, request_id=f"req-{i}") for i in range(40)]
    more = [engine.stream("b", GREEDY) for _ in range(45)]
    ids = [(await anext(stream)).request_id for stream in (made, *chosen, *more)]
    assert len(set(ids)) == len(ids) == 86
    for stream in (made, *chosen, *more):
        await stream.aclose()


def test_priority_out_of_range_is_rejected(engine: Engine) -> None:
    with pytest.raises(BadInput, match="priority"):
        asyncio.run(anext(engine.stream("a", GREEDY, priority=10**9)))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"model": "/nowhere"}, BadModel, "no such model directory"),
        ({"max_model_len": 4096}, BadInput, "2048"),
        ({"max_num_seqs": 0}, BadInput, "--max-num-seqs"),
        ({"dtype": "int3"}, BadInput, "dtype"),
        ({"no_such": 1}, BadInput, "no_such"),
        ({"device": "tpu9"}, UserError, "device"),
        ({"attention_backend": "magic"}, BadInput, "attention backend"),
        ({"batching": "none"}, BadInput, "batching"),
        ({"prefix_cache_ttl_s": -1.0}, BadInput, "prefix-cache-ttl-s is out of range"),
    ],
)
def test_bad_settings_are_rejected(settings: dict, error: type[UserError], words: str) -> None:
    with pytest.raises(error, match=words):
        Engine.open(**{"model": "demo", **settings})


@pytest.mark.slow
def test_kv_budget_too_small_for_one_sequence_names_a_working_fix() -> None:
    """The error shows the budget table and one change that fixes it."""
    with pytest.raises(DoesNotFit) as caught:
        Engine.open("demo", kv_cache_memory_bytes=1 << 20)
    text = str(caught.value)
    for words in ("weights", "KV per token", "KV of one sequence", "holds 160 tokens"):
        assert words in text
    flag, value = str(caught.value.fix).removeprefix("use --").split()
    assert text.count("use --") == 1
    with Engine.open("demo", **{flag.replace("-", "_"): int(value)}) as engine:
        assert engine.generate([[5] * 2047], GREEDY)[0].usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("build", "visible", "count", "asked", "fix"),
    [
        (None, None, 0, "cuda", "built without CUDA"),
        ("13.0", "", 0, "cuda", "CUDA_VISIBLE_DEVICES=''"),
        ("13.0", None, 0, "cuda", "nvidia-smi"),
        ("13.0", None, 2, "cuda:7", "from 0"),
    ],
)
def test_refused_cuda_device_says_why_it_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
    build: str | None,
    visible: str | None,
    count: int,
    asked: str,
    fix: str,
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(CannotRun) as caught:
        Engine.open("demo", device=asked)
    assert fix in str(caught.value.fix) and "--device cpu" in str(caught.value.fix)


def test_cuda_without_a_gpu_is_rejected() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(CannotRun, match="--device cpu"):
        Engine.open("demo", device="cuda")
