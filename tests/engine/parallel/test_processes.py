"""Two processes compute one model: the same answers, and an end that hangs nowhere."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from ridgeline.config.settings import settings_from
from ridgeline.engine.engine import Engine
from ridgeline.engine.parallel.exchange.connect import make_collectives
from ridgeline.engine.parallel.group import RankGroup
from ridgeline.engine.parallel.nodes import run_node
from ridgeline.engine.parallel.rank import load_model
from ridgeline.engine.parallel.runner import make_runner
from ridgeline.errors import BadModel, EngineUnavailable, RankFailed
from ridgeline.modelspec.shard import ParallelSizes
from ridgeline.records import Failed, Sampling
from ridgeline.records.request import OutputGrammar
from tests.engine.parallel.emulated import EmulatedRanks, config_of

pytestmark = pytest.mark.slow

PROMPTS = ["def add(a, b):", "import os\nimport sys\n", "class Point:\n    def __init__(self"]
GREEDY = Sampling(temperature=0.0, max_tokens=24)
SETTINGS: dict[str, Any] = {
    "kv_cache_memory_bytes": 3 << 20,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "num_threads": 1,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    with Engine.open("demo", tensor_parallel_size=2, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with Engine.open("demo", layer_backend="torch", **SETTINGS) as engine:
        yield engine


def tokens_of(engine: Engine, sampling: Sampling, prompts: list[str] = PROMPTS) -> list[Any]:
    return [[a.tokens for a in own.answers] for own in engine.generate(prompts, sampling)]


def test_two_processes_answer_as_one_does(two: Engine, one: Engine) -> None:
    assert tokens_of(two, GREEDY) == tokens_of(one, GREEDY)
    seeded = Sampling(temperature=0.8, top_p=0.9, seed=5, max_tokens=16, n=2)
    assert tokens_of(two, seeded) == tokens_of(one, seeded)
    penalised = Sampling(temperature=0.0, frequency_penalty=0.7, max_tokens=16, logprobs=2)
    assert tokens_of(two, penalised) == tokens_of(one, penalised)


def test_structured_output_prefix_hits_and_preemption_work_over_ranks(
    two: Engine, one: Engine
) -> None:
    grammar = OutputGrammar(kind="regex", text=r"[a-z]{3}-[0-9]{2}")
    bound = Sampling(temperature=0.0, structured=grammar, max_tokens=12)
    assert tokens_of(two, bound) == tokens_of(one, bound)
    hits = two.counters()["prefix_cache_hits"]
    long = ["x = [" + "1, " * 60, "y = {" + "2, " * 60]
    for _ in range(2):
        assert tokens_of(two, GREEDY, long) == tokens_of(one, GREEDY, long)
    assert two.counters()["prefix_cache_hits"] > hits
    crowd = [f"# {i} " + "a b c d " * 30 for i in range(5)]
    deep = Sampling(temperature=0.0, max_tokens=64, ignore_eos=True)
    assert tokens_of(two, deep, crowd) == tokens_of(one, deep, crowd)
    assert two.counters()["num_preemptions"] > 0


def test_two_processes_have_the_bits_of_two_emulated_ranks(two: Engine) -> None:
    text = two.tokenizer.encode("def add(a, b):\n    return a + b\n")
    resolved = two.resolved
    config = config_of(
        "demo", ParallelSizes(tensor=2), attention_backend=resolved.attention_backend
    )
    with EmulatedRanks(config) as ranks, torch.inference_mode():
        expected_TV = torch.log_softmax(ranks.runner.logits(text).float(), 1).numpy()
    assert np.array_equal(two.logprobs_of(text), expected_TV)


@pytest.mark.parametrize(
    ("layout", "one_process"),
    [
        ({"pipeline_parallel_size": 2}, {"num_threads": 2}),  # native layers: any thread count
        (
            {"tensor_parallel_size": 2, "quantization": "int8"},
            {"quantization": "int8", "layer_backend": "torch"},
        ),
        (
            {
                "tensor_parallel_size": 2,
                "sequence_parallel": True,
                "collectives": "gloo",
                "quantization": "int8",
            },
            {"quantization": "int8", "layer_backend": "torch"},
        ),
    ],
)
def test_exact_layouts_have_the_bits_of_one_process(
    layout: dict[str, Any], one_process: dict[str, Any]
) -> None:
    with (
        Engine.open("demo", **(SETTINGS | layout)) as several,
        Engine.open("demo", **(SETTINGS | one_process)) as single,
    ):
        text = single.tokenizer.encode("def add(a, b):\n    return a + b\n")
        assert np.array_equal(several.logprobs_of(text), single.logprobs_of(text))
        assert tokens_of(several, GREEDY) == tokens_of(single, GREEDY)


@pytest.mark.parametrize(
    ("collectives", "sequence_parallel"), [("shm", False), ("gloo", False), ("gloo", True)]
)
def test_context_ranks_have_the_bits_of_one_process(
    collectives: str, sequence_parallel: bool
) -> None:
    """Four processes, on a text that reaches into the second rank's chunk of keys."""
    long = SETTINGS | {"max_model_len": 640, "max_num_seqs": 2, "kv_cache_memory_bytes": 6 << 20}
    plain: dict[str, Any] = {"quantization": "int8", **long}
    layout: dict[str, Any] = {"collectives": collectives, "sequence_parallel": sequence_parallel}
    layout |= {"tensor_parallel_size": 2, "context_parallel_size": 2}
    with (
        Engine.open("demo", **(plain | layout)) as several,
        Engine.open("demo", layer_backend="torch", **plain) as single,
    ):
        tokens = single.tokenizer.encode("def add(a, b):\n    return a + b\n" * 60)[:600]
        prompts = [single.tokenizer.decode(tokens)]
        with_logprobs = Sampling(temperature=0.0, max_tokens=12, logprobs=2)
        assert answers_of(several, prompts, with_logprobs) == answers_of(
            single, prompts, with_logprobs
        )


def answers_of(engine: Engine, prompts: list[str], sampling: Sampling) -> list[Any]:
    """Tokens and their log-probabilities."""
    return [
        [(answer.tokens, answer.logprobs) for answer in own.answers]
        for own in engine.generate(prompts, sampling)
    ]


def test_worker_that_cannot_load_reports_its_error() -> None:
    config = config_of("demo", ParallelSizes(pipeline=2), model="no-such-folder")
    group = RankGroup(config)
    try:
        with pytest.raises(BadModel, match=r"rank 1: .*no-such-folder"):
            group.wait_until_loaded()
    finally:
        group.close()


@pytest.mark.parametrize("shares_memory", [False, True])
def test_rank_that_does_not_answer_is_named(shares_memory: bool) -> None:
    group = RankGroup(config_of("demo", ParallelSizes(tensor=2), timeout_s=2.0), shares_memory)
    try:
        config = group.config
        collectives = make_collectives(config.shard, config.timeout_s, config.segment)
        model = load_model(config, collectives)
        group.wait_until_loaded()
        collectives.connect(config.store)
        runner = make_runner(model, group, None, None, None)
        assert runner.logits([1, 2, 3]).isfinite().all()
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.raises(RankFailed, match="rank 1 did not answer within 2 s"):
            runner.logits([1, 2, 3])
    finally:
        group.close()
    with pytest.raises(ProcessLookupError):
        os.kill(group.pids[0], 0)


def test_ranks_on_two_nodes_have_the_bits_of_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options: dict[str, Any] = {"nnodes": 2, "master_addr": f"127.0.0.1:{port}"}
    settings = settings_from(
        {"model": "demo", "tensor_parallel_size": 2, "node_rank": 1, **options}
    )
    node = threading.Thread(target=run_node, args=(settings,))
    node.start()
    group = RankGroup(config_of("demo", ParallelSizes(tensor=2), **options))
    try:
        config = group.config
        assert group.pids == []
        collectives = make_collectives(config.shard, config.timeout_s, None, "127.0.0.1")
        model = load_model(config, collectives)
        group.wait_until_loaded()
        collectives.connect(config.store)
        logits_TV = make_runner(model, group, None, None, None).logits([1, 2, 3])
    finally:
        group.close()
    node.join(10)
    assert not node.is_alive()
    with EmulatedRanks(config_of("demo", ParallelSizes(tensor=2))) as ranks:
        assert torch.equal(ranks.runner.logits([1, 2, 3]), logits_TV)


def test_a_killed_worker_ends_every_request_and_the_engine(two: Engine) -> None:
    group = cast(RankGroup, two._processes)
    (worker,) = group.pids
    events = two.iterate(PROMPTS[0], Sampling(temperature=0.0, max_tokens=200, ignore_eos=True))
    next(events)
    os.kill(worker, signal.SIGKILL)
    began_s = time.monotonic()
    last = list(events)[-1]
    assert time.monotonic() - began_s < 8
    assert isinstance(last, Failed) and last.cause == "engine"
    assert "rank 1" in last.error and "signal 9" in last.error
    assert not two.is_healthy() and "rank 1" in str(two.death)
    with pytest.raises(EngineUnavailable, match="rank 1"):
        two.generate(PROMPTS[:1], GREEDY)
    two.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
