"""Embeddings are computed in pieces: other requests are not delayed by more than a step."""

from __future__ import annotations

import threading
from collections.abc import Generator

import msgspec
import pytest
import torch

from ridgeline.engine.engine import CPU_PIECE_TOKENS, Engine
from ridgeline.engine.engine_loop import EngineLoop
from ridgeline.records import Sampling

TEXT = [(7 * i) % 500 + 1 for i in range(150)]


@pytest.fixture(scope="module")
def engine() -> Generator[Engine, None, None]:
    settings = {"max_model_len": 256, "max_num_batched_tokens": 64, "num_threads": 1}
    with Engine.open("demo", **settings) as engine:  # type: ignore[arg-type]
        yield engine


def test_pieces_have_the_states_of_the_whole_text(engine: Engine) -> None:
    whole = engine._loop.call(lambda: engine._runner.states(TEXT).clone()).result(10)
    pieces = engine._loop.call(
        lambda: [piece.clone() for piece in engine._runner.state_pieces(TEXT, 64)]
    ).result(10)
    assert [len(piece) for piece in pieces] == [64, 64, 22]
    assert torch.equal(torch.cat(pieces), whole)
    expected = {"last": whole[-1], "mean": whole.mean(0)}
    for pooling in ("last", "mean"):
        vector = torch.tensor(engine.embed(TEXT, pooling).result(10))
        assert torch.allclose(vector, expected[pooling].float(), atol=1e-6)


def test_pieces_on_a_cpu_are_short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They delay streams by their length, and larger ones are no faster."""
    sizes: list[int] = []
    real = engine._runner.state_pieces

    def state_pieces(tokens, size):  # type: ignore[no-untyped-def]
        sizes.append(size)
        return real(tokens, size)

    monkeypatch.setattr(engine._runner, "state_pieces", state_pieces)
    for budget in (64, 2048):
        resolved = msgspec.structs.replace(engine.resolved, max_num_batched_tokens=budget)
        monkeypatch.setattr(engine, "resolved", resolved)
        engine.embed(TEXT, "mean").result(10)
    assert sizes == [32, CPU_PIECE_TOKENS]


def test_steps_run_between_the_pieces_of_a_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five pieces of one text, and a request that came after it: its steps are in between."""
    order: list[str] = []
    real_run, real_pieces = engine._runner.run, engine._runner.state_pieces

    def run(plan):  # type: ignore[no-untyped-def]
        if plan.runs:
            order.append("step")
        return real_run(plan)

    def state_pieces(tokens, size):  # type: ignore[no-untyped-def]
        for piece in real_pieces(tokens, size):
            order.append("piece")
            yield piece

    monkeypatch.setattr(engine._loop.runner, "run", run)
    monkeypatch.setattr(engine._runner, "state_pieces", state_pieces)
    gate = threading.Event()
    engine._loop.call(lambda: gate.wait(10))
    embedding = engine.embed(TEXT, "mean")
    thread = threading.Thread(
        target=engine.generate, args=([[5, 6]], Sampling(max_tokens=4, temperature=0))
    )
    thread.start()
    while not engine._loop._ids:
        gate.wait(0.001)
    gate.set()
    embedding.result(10)
    thread.join()
    at = [place for place, what in enumerate(order) if what == "piece"]
    assert len(at) == 5 and "step" in order[at[0] : at[1]] and "step" in order[at[1] : at[2]], order


def run_in_order(loop: EngineLoop, accounts: list[str]) -> list[str]:
    """The accounts of two-piece calls in the order in which their pieces ran."""
    order: list[str] = []
    gate = threading.Event()

    def pieces(account: str) -> Generator[None, None, None]:
        order.append(account)
        yield
        order.append(account)

    first = loop.call(lambda: gate.wait(10))
    futures = [loop.call_in_pieces(pieces(account), account=account) for account in accounts]
    gate.set()
    first.result(10)
    for future in futures:
        future.result(10)
    return order


def test_accounts_take_turns_and_a_text_that_began_is_finished_first(engine: Engine) -> None:
    order = run_in_order(engine._loop, ["a", "a", "a", "b", "b", "c"])
    assert order[0::2] == order[1::2]
    assert order[0::2] == ["a", "b", "c", "a", "b", "a"]


def test_cancelled_text_is_not_computed_further(engine: Engine) -> None:
    order: list[str] = []
    reached, gate = threading.Event(), threading.Event()

    def pieces() -> Generator[None, None, None]:
        order.append("first")
        reached.set()
        gate.wait(10)
        yield
        order.append("second")

    future = engine._loop.call_in_pieces(pieces(), 7)
    reached.wait(10)
    assert future.cancel()
    gate.set()
    engine._loop.call(lambda: None).result(10)
    assert order == ["first"]
    assert engine.counters()["num_queued"] == engine.counters()["num_queued_tokens"] == 0
