"""Batches of a server that is killed and started again over the same store.

A life ends by itself, at a random instant, between any two awaits, or in a random transaction,
before or after it is durable. In between the disk is full for a while, the time of day jumps, and
the batch worker dies.
In the end every request of every batch has exactly one line, and a successful line the right text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from ridgeline.serve.batch import store as store_module
from tests.simulation.clients import CLIENTS, Generation, check_whole, random_generation, read_texts
from tests.simulation.network import Connection, Reply
from tests.simulation.server import Setup, SimulatedServer
from tests.simulation.simulation import seeded
from tests.simulation.step_checks import StepWatch
from tests.simulation.virtual_time import VirtualLoop

CHAT = "/v1/chat/completions"
_END_STATES = ("completed", "failed", "expired", "cancelled")
_BOUNDARY = "simulated"
_JSON = {"content-type": "application/json"}
_REFUSALS = {503, 507}
_MEMORY = Path("/dev/shm")
"""Stores are made there if it exists: a disk's `fsync` took longer than the rest of a life."""


class Killed(BaseException):
    """The process is gone."""


class BatchLives:
    """One store, the batch that a client wants, and the lives of the server."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.path = folder / "batches.sqlite"
        self.trace: list[str] = []
        self.wall_s = 1_700_000_000.0
        names = [f"line{index}" for index in range(self.rng.choice((1, 8, 30)))]
        self.generations = {name: random_generation(self.rng, 200, in_batch=True) for name in names}
        self.num_created = 0
        self.fault: str | None = "the batch worker has ended"  # as /health names it
        self.is_cancelling = self.rng.random() < 0.15
        self.has_lost_worker = False

    def run(self) -> None:
        num_lives = self.rng.choice((1, 2, 3, 4))
        for number in range(num_lives):
            Life(self, number, is_last=number == num_lives - 1).run()
        assert not self.has_lost_worker, "the batch worker has ended by itself"
        assert self.fault == "the batch worker has ended", "a dead batch worker goes unnoticed"

    def input_file(self) -> bytes:
        lines = [
            {"custom_id": name, "method": "POST", "url": CHAT, "body": generation.body}
            for name, generation in self.generations.items()
        ]
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Life:
    """One process."""

    def __init__(self, lives: BatchLives, number: int, *, is_last: bool) -> None:
        self.lives, self.number, self.is_last, self.rng = lives, number, is_last, lives.rng
        self.loop = VirtualLoop(self.rng)
        self.killed = asyncio.Event()
        self.is_draining = self.is_broken = self.has_ended_worker = False
        setup = Setup(store=lives.path, num_blocks=40, max_num_seqs=self.rng.choice((1, 3)))
        self.sim = SimulatedServer(self.loop, self.rng, setup)
        self.sim.wall_s = lives.wall_s
        self.watch = StepWatch(self.loop.stop)
        for model in self.sim.models:
            self.watch.watch(model)
        worker = self.sim.worker
        assert worker is not None
        self.store: Any = worker._store
        self.store._owner = f"life {number}"
        self.end = "drain" if is_last else self.rng.choice(("instant", "callback", "transaction"))
        if self.end == "transaction":
            self._die_in_transaction(self.rng.randint(1, 40))
        elif self.end == "callback":
            self._die_before_callback(self.rng.randint(1, 300))

    def note(self, text: str) -> None:
        self.lives.trace.append(f"life {self.number} {self.loop.now_s - 1000:8.4f} {text}")

    def run(self) -> None:
        is_gone = mock.patch.object(store_module, "is_gone", lambda name: name != self.store._owner)
        try:
            with is_gone:
                self.loop.run_until_complete(self._live())
            assert not self.watch.broken_rules, "the last step breaks a rule"
        except RuntimeError:  # the loop was stopped
            assert not self.watch.broken_rules, self.watch.broken_rules[0]
            raise
        finally:
            self.lives.wall_s = self.sim.wall_clock() - 1000
            self.store._db._connection.close()
            self._end_tasks()
            self.sim.close()
            self.loop.close()

    async def _live(self) -> None:
        serving = asyncio.ensure_future(self.sim.serve())
        while not self.loop.listeners and not self.killed.is_set():
            await asyncio.sleep(0.01)
        if self.end == "instant":
            within_s = self.rng.choice((0.1, 0.5, 3.0))
            self.loop.call_later(self.rng.uniform(0, within_s), self.kill, "at an instant")
        self._plan_faults()
        working = asyncio.ensure_future(self._work())
        killed = asyncio.ensure_future(self.killed.wait())
        await asyncio.wait({working, killed}, return_when=asyncio.FIRST_COMPLETED)
        if self.killed.is_set():
            return
        await working
        self._check_worker()
        self.is_draining = True
        self.sim.drain()
        await serving
        killed.cancel()

    def kill(self, how: str) -> None:
        """Nothing that happens from here on reaches the disk."""
        if not self.killed.is_set():
            self._check_worker()
            self.note(f"killed {how}")
            self.killed.set()
            self.store._db._connection.close()

    def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(BaseException):
            ended = asyncio.gather(*tasks, return_exceptions=True)
            self.loop.run_until_complete(asyncio.wait_for(ended, 60))

    # faults

    def _die_before_callback(self, number: int) -> None:
        """Die before the n-th callback of the loop, and thereby between any two awaits."""
        count = 0

        def before_callback() -> None:
            nonlocal count
            count += 1
            if count == number:
                self.kill(f"before callback {number}")

        self.loop.before_callback = before_callback

    def _die_in_transaction(self, number: int) -> None:
        """Die in the n-th transaction, before or after its commit."""
        database, original, count = self.store._db, self.store._db.transaction, 0

        @contextlib.contextmanager
        def transaction() -> Iterator[sqlite3.Connection]:
            nonlocal count
            count += 1
            is_deadly = count == number
            is_durable = is_deadly and self.rng.random() < 0.5
            with original() as connection:
                yield connection
                if is_deadly and not is_durable:
                    connection.execute("ROLLBACK")
                    self.kill("before a commit")
                    raise Killed
            if is_durable:
                self.kill("after a commit")
                raise Killed

        database.transaction = transaction

    def _plan_faults(self) -> None:
        rng, loop = self.rng, self.loop
        within_s = rng.choice((0.1, 0.5, 2.0))
        if rng.random() < 0.4:
            loop.call_later(rng.uniform(0, within_s), self._fill_disk, rng.uniform(0.1, 3))
        if rng.random() < 0.4:
            jump_s = rng.choice((-3600, -10, 60, 90_000))
            loop.call_later(rng.uniform(0, within_s), self._jump, jump_s)
        if rng.random() < 0.2 and not self.is_last:
            loop.call_later(rng.uniform(0, within_s), self._end_worker)

    def _fill_disk(self, for_s: float) -> None:
        if self.killed.is_set():
            return
        self.note("the disk is full")
        database = self.store._db._connection
        database.execute("PRAGMA max_page_count = 1")  # SQLite raises it to the present size

        def free() -> None:
            if not self.killed.is_set():
                self.note("the disk has room")
                database.execute("PRAGMA max_page_count = 1000000")

        self.loop.call_later(for_s, free)

    def _jump(self, by_s: float) -> None:
        self.note(f"the time of day jumps by {by_s} s")
        self.sim.wall_s += by_s

    def _check_worker(self) -> None:
        if self.sim.worker is not None and self.sim.worker.has_died and not self.has_ended_worker:
            self.lives.has_lost_worker = True

    def _end_worker(self) -> None:
        self.has_ended_worker = True
        self.note("the batch worker is cancelled")
        for task in asyncio.all_tasks(self.loop):
            if "BatchWorker.run" in repr(task.get_coro()):
                task.cancel()
        self.loop.call_later(0.5, self._check_health)

    def _check_health(self) -> None:
        if not self.killed.is_set() and not self.is_draining:
            self.lives.fault = self.sim.service.fault()

    # the client

    async def _work(self) -> None:
        """Create the batch, if no life has done so, and wait for the end of every batch."""
        online = [asyncio.ensure_future(self._online(index)) for index in range(3)]
        if not self.lives.num_created:
            await self._create()
        if self.lives.is_cancelling and self.is_last:
            await self._cancel()
        for _ in range(600 if self.is_last else 5):
            batches = (await self._get("/v1/batches")) or {"data": []}
            if batches["data"] and all(b["status"] in _END_STATES for b in batches["data"]):
                break
            await asyncio.sleep(1)
        if self.is_last:
            await self._check_batches()
        await asyncio.gather(*online)

    async def _online(self, index: int) -> None:
        rng = random.Random(f"{self.lives.seed}/{self.number}/{index}")
        await asyncio.sleep(rng.uniform(0, 2))
        with contextlib.suppress(asyncio.CancelledError):
            await CLIENTS[0][0](self, rng, f"client {index}")

    async def _create(self) -> None:
        data = self.lives.input_file()
        form = (
            f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="in"\r\n\r\n'
        ).encode()
        form += data + f"\r\n--{_BOUNDARY}--\r\n".encode()
        kind = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}
        file = await self._send("/v1/files", form, kind)
        if file is None:
            return
        wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = await self._send("/v1/batches", json.dumps(wanted).encode(), _JSON)
        if batch is not None:
            self.lives.num_created += 1
            self.note(f"created {batch['id'][:12]}")

    async def _cancel(self) -> None:
        for batch in ((await self._get("/v1/batches")) or {"data": []})["data"]:
            if batch["status"] not in _END_STATES:
                await Connection(self.loop, self.rng).request(
                    "POST", f"/v1/batches/{batch['id']}/cancel"
                )

    async def _send(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        """The object that was made, after some tries; None if there was none."""
        for _ in range(50 if self.is_last else 3):
            reply = await Connection(self.loop, self.rng).request("POST", path, body, headers)
            if reply.status == 200:
                return reply.json()
            assert reply.status in _REFUSALS or self.killed.is_set(), reply
            self.note(f"{path} {reply.status}")
            await asyncio.sleep(0.5)
        return None

    async def _get(self, path: str) -> Any:
        reply = await Connection(self.loop, self.rng).request("GET", path)
        if reply.status == 200:
            return reply.json() if path.startswith("/v1/batches") else reply.body
        assert not self.is_last, reply
        return None

    # the invariants

    async def _check_batches(self) -> None:
        batches = (await self._get("/v1/batches"))["data"]
        assert len(batches) >= self.lives.num_created >= 1, "a batch that was created is gone"
        for batch in batches:
            self.note(f"{batch['id'][:12]} {batch['status']} {batch['request_counts']}")
            assert batch["status"] in _END_STATES, batch
            await self._check_batch(batch)

    async def _check_batch(self, batch: dict[str, Any]) -> None:
        lines: list[dict[str, Any]] = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                content = await self._get(f"/v1/files/{batch[name]}/content")
                lines += [json.loads(line) for line in content.splitlines()]
        names = [line["custom_id"] for line in lines]
        assert len(names) == len(set(names)), f"requests with two lines: {names}"
        wanted, counts = set(self.lives.generations), batch["request_counts"]
        if batch["status"] == "completed":
            assert set(names) == wanted, f"requests without a line: {wanted - set(names)}"
            assert counts["completed"] + counts["failed"] == counts["total"] == len(wanted)
        num_whole = 0
        for line in lines:
            response = line["response"]
            if response is not None and response["status_code"] == 200:
                num_whole += 1
                check_line(self.lives.generations[line["custom_id"]], response["body"])
        assert counts["completed"] == num_whole, f"{counts} but {num_whole} successful lines"


def check_line(generation: Generation, body: dict[str, Any]) -> None:
    reply = Reply(200, {}, json.dumps(body).encode(), is_complete=True)
    texts, _, _ = read_texts(generation, reply)
    check_whole(generation, reply, texts)


def simulate_batches(seed: int) -> list[str]:
    """Run a seed; its trace."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with seeded(seed), tempfile.TemporaryDirectory(dir=parent) as folder:
        lives = BatchLives(seed, Path(folder))
        try:
            lives.run()
        except BaseException as error:
            trace = "\n".join(lives.trace[-60:])
            raise AssertionError(f"seed {seed} of the batches\n{trace}\n{error!r}") from error
        return lives.trace
