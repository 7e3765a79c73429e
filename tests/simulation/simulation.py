"""One seed: a server, its faults, its clients and the invariants.

python -m tests.simulation.simulation --seed 7        replay a seed, with its trace
python -m tests.simulation.simulation --seeds 10000   from --seed on
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from prometheus_client import CollectorRegistry

from ridgeline.config.server import ServerOptions
from ridgeline.engine.tokenization.template_process import client
from tests.simulation.clients import CLIENTS
from tests.simulation.model import Faults
from tests.simulation.models import SimulatedModel
from tests.simulation.server import LogWatcher, Setup, SimulatedServer, keys_file, watched_logs
from tests.simulation.step_checks import StepWatch
from tests.simulation.virtual_time import VirtualLoop

MAX_UNSENT_BYTES = 8 << 20
MAX_TRACE = 60


class Violation(AssertionError):
    """An invariant that does not hold, with the seed that shows it."""


class Simulation:
    """A server and its clients; `run` raises AssertionError if an invariant does not hold."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.loop = VirtualLoop(self.rng)
        self.trace: list[str] = []
        self.watch = StepWatch(self.loop.stop)
        self._has_begun_to_drain = self.is_broken = False
        self.sim = SimulatedServer(self.loop, self.rng, random_setup(self.rng))
        self.sim.renderers.note = self.note
        for model in self.sim.models:
            self.watch.watch(model)

    @property
    def is_draining(self) -> bool:
        """Whether the server stops: by a signal, or because its engine has died."""
        return self._has_begun_to_drain or self.sim.server.loss is not None

    def note(self, text: str) -> None:
        self.trace.append(f"{self.loop.now_s - 1000:8.4f} {text}")

    async def run(self) -> None:
        serving = asyncio.ensure_future(self.sim.serve())
        serving.add_done_callback(lambda _: self._cut_connections())
        while not self.loop.listeners:
            await asyncio.sleep(0.001)
        horizon_s = self.rng.choice((0.05, 1.0, 10.0))
        self._plan_faults(horizon_s)
        clients = [
            asyncio.ensure_future(self._client(index, horizon_s))
            for index in range(self.rng.randint(4, 24))
        ]
        await asyncio.gather(*clients)
        if not self.is_draining:
            await self._settle()
            if self.sim.engine.death is not None:
                await asyncio.sleep(0.2)  # the server looks ten times a second
                assert self.is_draining, "the server outlives its engine"
        if not self.is_draining:
            self.check_idle()
            self.drain()
        await serving
        await asyncio.sleep(max(30, self._settling_s()))  # for a slow step
        self.check_idle()
        self.sim.renderers.check()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        assert not rest, f"tasks that nobody awaits: {rest}"

    async def _settle(self) -> None:
        """Wait until nothing is held, for as long as that may take."""
        until_s = self.loop.now_s + self._settling_s()
        while self.loop.now_s < until_s and any(map(self._held, self.sim.models)):
            await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)

    def _settling_s(self) -> float:
        """How long what a client left behind may go on: a slow step, or a renderer that hangs."""
        if self.sim.setup.renderer_faults:
            return 10 + client._START_TIMEOUT_S
        return 4 if self.sim.setup.faults.slow else 0.5

    def _cut_connections(self) -> None:
        """The process ends, and its connections with it."""
        for transport in self.loop.transports:
            transport.cut()

    def drain(self) -> None:
        self._has_begun_to_drain = True
        self.note("drain")
        self.sim.drain()

    async def _client(self, index: int, horizon_s: float) -> None:
        rng = random.Random(f"{self.seed}/{index}")
        kinds, weights = zip(*CLIENTS, strict=True)
        kind = rng.choices(kinds, weights)[0]
        await asyncio.sleep(rng.choice((0.0, rng.uniform(0, horizon_s))))
        self.note(f"client {index} begins: {kind.__name__}")
        await kind(self, rng, f"client {index}")

    def _plan_faults(self, horizon_s: float) -> None:
        rng, loop = self.rng, self.loop
        if rng.random() < 0.2:
            loop.call_later(rng.uniform(0, horizon_s), self.drain)
        if rng.random() < 0.05:
            loop.call_later(rng.uniform(0, horizon_s), self._break_scheduler)

    def _break_scheduler(self) -> None:
        """A bug in the scheduler: the engine dies in its next step."""
        self.note("the scheduler breaks")
        self.is_broken = True
        self.sim.models[0].scheduler.plan = mock.Mock(side_effect=KeyError("a bug"))

    def explains(self, logged: str) -> bool:
        """Whether an error in the log follows from a fault that was injected."""
        faults = self.sim.setup.faults
        has_failed = faults.num_injected or faults.num_nan or self.is_broken
        if self.is_broken and "the server stops: the engine stopped" in logged:
            return True
        if logged.startswith("uvicorn.error") and self.is_draining:  # about slow readers
            return "shutdown exceeded" in logged or "without completing response" in logged
        return "a stream failed" in logged and bool(has_failed)

    # invariants

    def check_idle(self) -> None:
        """With no client left, nothing is held any more."""
        for model in self.sim.models:
            self._check_idle_model(model)
        unsent = max((transport.max_unsent for transport in self.loop.transports), default=0)
        assert unsent <= MAX_UNSENT_BYTES, f"{unsent} bytes waited for one client"

    def _check_idle_model(self, model: SimulatedModel) -> None:
        left = self._held(model)
        assert not left, f"held although every client is gone: {left}"
        self._check_metrics(model, is_broken=self._is_broken(model))

    def _is_broken(self, model: SimulatedModel) -> bool:
        return self.is_broken and model is self.sim.models[0]

    def _held(self, model: SimulatedModel) -> dict[str, int]:
        """What the server holds for requests, by name, without what is 0."""
        engine_loop, scheduler = model.engine._loop, model.scheduler
        held = {
            "owned blocks": scheduler.pool.num_owned,
            "requests of the scheduler": len(scheduler._registry.groups),
            "subscriptions": len(engine_loop._subscriptions),
            "ids": len(engine_loop._ids),
            "calls": len(engine_loop._calls),
            "commands": len(engine_loop._inbox),
            "queued": engine_loop.queue_limiter.num_queued,
            "queued tokens": engine_loop.queue_limiter.num_queued_tokens,
            "tracked": len(engine_loop.queue_limiter._requests),
            "texts": len(engine_loop._texts._outputs),
            "inboxes": sum(len(inboxes._inboxes) for inboxes in model.engine._inboxes.values()),
            "requests in progress": model.service.drain.num_in_progress,
            "bytes of bodies": self.sim.app.state.body_memory.num_bytes,
        }
        if self._is_broken(model):  # a dead engine's scheduler is not touched any more
            for name in ("owned blocks", "requests of the scheduler", "texts", "commands"):
                held.pop(name)
        return {name: count for name, count in held.items() if count}

    def _check_metrics(self, model: SimulatedModel, *, is_broken: bool) -> None:
        """Every choice that was submitted is counted once as ended, every token once."""
        metrics = read_metrics(model.service.metrics.registry)
        tokens = metrics["vllm:generation_tokens_total"]
        assert tokens == model.counting.num_tokens, "tokens published and tokens counted differ"
        choices = metrics.get("vllm:request_params_n_sum", 0)
        ends = metrics.get("vllm:request_success_total", 0)
        assert ends == choices, f"{choices} choices were submitted, {ends} are counted as ended"
        counters = model.engine.counters()
        assert counters["generation_tokens"] >= tokens
        assert counters["num_requests_running"] == counters["num_requests_waiting"] == 0 or (
            is_broken
        )
        assert metrics.get("ridgeline_time_to_publish_seconds_count", 0) == tokens


def read_metrics(registry: CollectorRegistry) -> dict[str, float]:
    """Each metric's sum over its labels."""
    sums: dict[str, float] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def random_setup(rng: random.Random) -> Setup:
    """Small limits, so that every one of them is reached."""
    faults = Faults(poisoned=-1)
    if rng.random() < 0.3:
        kind = rng.choice(("step", "nan", "memory", "panic", "slow"))
        setattr(faults, kind, rng.choice((0.02, 0.2)))
    if rng.random() < 0.2:
        faults.late = rng.choice((0.1, 0.5))
    block_size = rng.choice((4, 8, 16))
    return Setup(
        num_blocks=rng.choice((6, 12, 24, 40)) * 16 // block_size,
        block_size=block_size,
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_num_batched_tokens=rng.choice((8, 16, 64)),
        chunked=rng.random() < 0.8,
        prefix=rng.random() < 0.7,
        max_num_queued_reqs=rng.choice((2, 8, 64)),
        max_num_queued_tokens=rng.choice((64, 1000)),
        options=ServerOptions(
            shutdown_timeout_s=rng.choice((0.0, 0.5, 30.0)),
            stream_interval=rng.choice((1, 1, 3)),
            requests_per_minute=rng.choice((None, None, None, 6)),
            api_keys_file=rng.choice((None, None, keys_file())),
            allow_runtime_lora_updating=True,
        ),
        faults=faults,
        switches=rng.choice((0.0, 0.2, 0.6)),
        renderer_faults=rng.choice((0.0, 0.05, 0.2)),
        max_adapters=rng.choice((0, 2, 3)),
        has_other_model=rng.random() < 0.3,
    )


@contextmanager
def seeded(seed: int) -> Iterator[LogWatcher]:
    """Ids are drawn from the seed, and what servers log is watched."""
    state, rng = random.getstate(), random.Random(seed)
    random.seed(seed)

    def token_hex(num_bytes: int = 32) -> str:
        return rng.randbytes(num_bytes).hex()

    try:
        with (
            watched_logs() as watcher,
            mock.patch.object(secrets, "token_hex", token_hex),
            mock.patch.object(secrets, "token_bytes", rng.randbytes),
        ):
            yield watcher
    finally:
        random.setstate(state)


def simulate(seed: int) -> Simulation:
    """Run a seed; Violation, with its trace, if an invariant does not hold."""
    with seeded(seed) as watcher:
        simulation = Simulation(seed)
        loop = simulation.loop
        try:
            with simulation.sim.renderers.patched():
                loop.run_until_complete(simulation.run())
            assert not simulation.watch.broken_rules, "a step that nobody waited for breaks a rule"
            assert not loop.faults, loop.faults
            logged = [line for line in watcher.lines if not simulation.explains(line)]
            assert not logged, logged
        except BaseException as error:
            _abandon(loop)
            if not isinstance(error, Exception):
                raise
            rules = "\n".join(simulation.watch.broken_rules[:1])
            trace = "\n".join(simulation.trace[-MAX_TRACE:])
            cause = "".join(traceback.format_exception(error)[-3:])
            raise Violation(
                f"seed {seed}: replay with `python -m tests.simulation.simulation --seed {seed}`\n"
                f"{trace}\n{rules}\n{cause}"
            ) from None
        finally:
            simulation.sim.close()
            loop.close()
        return simulation


def _abandon(loop: VirtualLoop) -> None:
    """End the tasks of a simulation that failed."""
    tasks = asyncio.all_tasks(loop)
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    ended = asyncio.gather(*tasks, return_exceptions=True)
    with contextlib.suppress(Exception):
        loop.run_until_complete(asyncio.wait_for(ended, 60))
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    arguments = parser.parse_args()
    began_s, num_failed, num_steps = time.perf_counter(), 0, 0
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            simulation = simulate(seed)
            num_steps += simulation.watch.num_steps
            if arguments.seeds == 1:
                print("\n".join(simulation.trace))
        except Violation as error:
            num_failed += 1
            print(error, flush=True)
    elapsed_s = time.perf_counter() - began_s
    print(f"{arguments.seeds} seeds, {num_steps} steps, {num_failed} failed, {elapsed_s:.1f} s")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
