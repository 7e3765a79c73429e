"""An engine in the process as a target: its events, its clock, its steps, and cancellation."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from ridgeline.measure.client.engine_target import EngineTarget
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.metrics.latency import outcome
from ridgeline.measure.workload import ChatPrompt, LoadRequest, PromptMessage
from ridgeline.measure.workload.arrivals import burst
from ridgeline.records import (
    EngineInfo,
    Failed,
    Finished,
    Preempted,
    Started,
    Token,
    Usage,
)

approx = partial(pytest.approx, abs=1e-6)  # the virtual clock moves a little with every step

INFO = EngineInfo(
    model="tiny",
    settings={},
    derivations={},
    max_model_len=64,
    num_blocks=4,
    block_size=16,
    weight_bytes=1,
    kv_bytes_per_token=1,
    device="cpu",
    compute_dtype="float32",
)
ENGINE_ORIGIN_S = 500.0  # the engine's clock started earlier than the loop's


class ScriptedEngine:
    """Plays (delay, event kind) lists; its clock is the loop's, shifted."""

    info = INFO

    def __init__(self, script, steps=()):
        self.script, self.steps, self.calls, self.closed = script, list(steps), [], []

    def clock(self):
        return asyncio.get_running_loop().time() + ENGINE_ORIGIN_S

    async def stream(self, prompt, sampling, *, request_id=None, priority=0, tenant=""):
        self.calls.append((prompt, sampling, request_id, tenant))
        try:
            at_s = self.clock()
            for delay_s, make in self.script:
                await asyncio.sleep(delay_s)
                at_s = self.clock() if delay_s else at_s
                yield make(request_id, at_s)
        finally:
            self.closed.append(request_id)

    def drain_steps(self):
        steps, self.steps = self.steps, []
        return steps


def token(text="x"):
    return lambda request_id, at_s: Token(
        request_id=request_id, index=0, token=1, text=text, at_s=at_s
    )


def started(cached):
    return lambda request_id, at_s: Started(request_id=request_id, at_s=at_s, cached_tokens=cached)


def finished(reason="length", text="", output=3):
    usage = Usage(prompt_tokens=7, cached_tokens=5, completion_tokens=output)
    return lambda request_id, at_s: Finished(
        request_id=request_id, index=0, reason=reason, at_s=at_s, usage=usage, text=text
    )


def preempted(request_id, at_s):
    return Preempted(request_id=request_id, index=0, at_s=at_s)


class One:
    name = "one"

    def __init__(self, prompt="hi"):
        self.prompt = prompt

    def sample(self, n, seed):
        for i in range(n):
            yield LoadRequest(
                id=f"{seed}-{i}", kind="text", prompt=self.prompt, max_tokens=3, tenant="t"
            )


def measure(in_virtual_time, engine, *, prompt="hi", render_chat=None, **options):
    async def main():
        await asyncio.sleep(3.0)  # the run does not begin at the loop's zero
        rest = {} if render_chat is None else {"render_chat": render_chat}
        target = EngineTarget(engine, engine_clock=engine.clock, **rest)
        run = await run_load(target, One(prompt), burst(), LoadOptions(num_requests=1, **options))
        await target.close()
        return run

    return in_virtual_time(main())


def test_events_become_one_record_on_the_clients_clock(in_virtual_time):
    engine = ScriptedEngine(
        [
            (0.2, started(5)),
            (0.3, token("a")),
            (0.1, preempted),
            (0.1, started(0)),  # again after the preemption: not a new start
            (0.1, token("")),
            (0.0, token("b")),  # the same step: one chunk of two tokens
            (0.1, finished(text="!")),
        ]
    )
    run = measure(in_virtual_time, engine)
    (r,) = run.requests
    assert outcome(r) == "ok"
    assert r.started_s == approx(0.2)
    assert r.token_s == approx((0.5, 0.8))
    assert r.token_counts == (1, 2)
    assert r.finished_s == approx(0.9)
    assert (r.prompt_tokens, r.cached_tokens, r.output_tokens) == (7, 5, 3)
    assert (r.finish_reason, r.text) == ("length", "ab!")
    assert (run.target, run.info) == ("engine:tiny", INFO)
    prompt, sampling, request_id, tenant = engine.calls[0]
    assert (prompt, request_id, tenant) == ("hi", "0-0#0", "t")
    assert (sampling.temperature, sampling.max_tokens, sampling.ignore_eos) == (0.0, 3, True)


def test_steps_come_on_the_runs_clock_and_without_those_of_the_warm_up(in_virtual_time, step_stat):
    class Stepping(ScriptedEngine):
        async def stream(self, prompt, sampling, **rest):
            self.steps.append(step_stat([(1, 1)], at_s=self.clock()))
            async for event in super().stream(prompt, sampling, **rest):
                yield event

    engine = Stepping([(0.5, token()), (0.0, finished(output=1))])
    run = measure(in_virtual_time, engine, num_warmups=2)
    assert [step.at_s for step in run.steps] == approx([0.0])
    assert len(engine.calls) == 3


def test_engine_failures_and_aborts_are_recorded(in_virtual_time):
    def failed(request_id, at_s):
        return Failed(request_id=request_id, at_s=at_s, error="out of blocks")

    run = measure(in_virtual_time, ScriptedEngine([(0.1, token()), (0.1, failed)]))
    assert (outcome(run.requests[0]), run.requests[0].error) == ("failed", "out of blocks")
    run = measure(in_virtual_time, ScriptedEngine([(0.1, finished("abort"))]))
    assert outcome(run.requests[0]) == "cancelled"


def test_a_request_refused_before_its_first_event(in_virtual_time):
    class Refusing(ScriptedEngine):
        async def stream(self, prompt, sampling, **rest):
            raise ValueError("prompt too long")
            yield

    run = measure(in_virtual_time, Refusing([]))
    assert run.requests[0].error == "ValueError: prompt too long"


def test_a_timeout_closes_the_engines_stream(in_virtual_time):
    engine = ScriptedEngine([(0.1, token()), (99.0, token())])
    run = measure(in_virtual_time, engine, timeout_s=1.0)
    assert outcome(run.requests[0]) == "timeout"
    assert engine.closed == ["0-0#0"]
    assert run.duration_s == approx(1.0)


def test_conversations_go_through_the_chat_template(in_virtual_time):
    chat = ChatPrompt((PromptMessage("user", "hello"),))
    engine = ScriptedEngine([(0.1, token()), (0.0, finished(output=1))])
    measure(in_virtual_time, engine, prompt=chat)
    measure(in_virtual_time, engine, prompt=chat, render_chat=lambda chat: [1, 2])
    assert [call[0] for call in engine.calls] == ["User: hello\n\nAssistant:", [1, 2]]


def test_an_event_that_is_delivered_late_keeps_the_engines_instant(in_virtual_time):
    def begun(request_id, at_s):
        return Started(request_id=request_id, at_s=at_s - 0.15, cached_tokens=0)

    engine = ScriptedEngine([(0.2, begun), (0.1, token()), (0.0, finished(output=1))])
    run = measure(in_virtual_time, engine)
    assert run.requests[0].started_s == approx(0.05)
