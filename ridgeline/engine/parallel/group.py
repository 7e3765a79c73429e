"""The processes of a parallel engine, as rank 0 sees them: started, watched, ended together.

A worker ends when its socket does, so none survives rank 0, whatever ends it. When a worker ends
or reports a fault, the others are killed: an exchange that waits for it then fails at once, instead
of after its timeout.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

import ridgeline.errors
from ridgeline.engine.parallel.devices import device_of_rank
from ridgeline.engine.parallel.exchange.process_groups import TCP
from ridgeline.engine.parallel.exchange.shared_memory import SharedSegment, create_segment
from ridgeline.engine.parallel.messages import (
    Channel,
    Command,
    Fault,
    Loaded,
    RankConfig,
    Report,
)
from ridgeline.engine.parallel.nodes import WORKER_MODULE, accept_ranks
from ridgeline.errors import RankFailed, RidgelineError, UserError
from ridgeline.modelspec.shard import ranks_of_node

END_S = 5.0
"""Seconds that a worker gets to end by itself."""

SETTLE_S = 2.0
"""Seconds in which all ranks but the one that is the cause report that they lost it."""

OnFailure = Callable[[RankFailed], None]


class Processes(Protocol):
    """The other processes of an engine."""

    def watch(self, on_failure: OnFailure) -> None:
        """Call `on_failure` once, from another thread, when a process ends unexpectedly."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class NoProcesses:
    """An engine of one process."""

    def watch(self, on_failure: OnFailure) -> None:
        pass

    def close(self) -> None:
        pass


NO_PROCESSES = NoProcesses()


class RankGroup:
    """Ranks 1, 2, … as child processes. Close it; `config` is that of rank 0.

    With `shares_memory`, ranks exchange tensors in memory instead of by gloo or NCCL. Raises
    OSError where there is none.
    """

    def __init__(self, config: RankConfig, shares_memory: bool = False) -> None:
        self._folder = tempfile.mkdtemp(prefix="ridgeline-ranks-")
        num_ranks = config.sizes.num_ranks
        descriptor = create_segment(num_ranks) if shares_memory else None
        self._segment = None if descriptor is None else SharedSegment(descriptor, num_ranks)
        self._descriptor = descriptor
        address = config.address
        store = str(Path(self._folder) / "store")
        if address is not None:
            store = f"{TCP}{address.host}:{address.port + 1}"
        device = device_of_rank(config.device, config.sizes, config.nnodes, config.rank)
        self.config = msgspec.structs.replace(
            config, store=store, segment=descriptor, device=device
        )
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._failure: RankFailed | None = None
        self._on_failure: OnFailure | None = None
        self._closing = False
        self._unheard: dict[socket.socket, _Worker] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._watcher = threading.Thread(
            target=self._watch_workers, name="ridgeline-ranks", daemon=True
        )
        try:
            here = ranks_of_node(config.sizes, config.nnodes, 0)
            for rank in here[1:]:
                self._workers.append(_Worker(self._config_of(rank)))
            elsewhere = range(here.stop, num_ranks)
            remote = {} if address is None else accept_ranks(address, elsewhere)
            for rank in elsewhere:
                self._workers.append(_Worker(self._config_of(rank), remote[rank]))
        except BaseException:
            self.close()
            raise

    def _config_of(self, rank: int) -> RankConfig:
        config = self.config
        device = device_of_rank(config.device, config.sizes, config.nnodes, rank)
        return msgspec.structs.replace(config, rank=rank, device=device)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers of this node, by rank from 1."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def wait_until_loaded(self) -> int:
        """Bytes of the weights of all workers, once they have loaded them.

        Raises what a worker raised, with its rank, or RankFailed.
        """
        num_bytes = 0
        for worker in self._workers:
            report = worker.report()
            if not isinstance(report, Loaded):
                raise worker.error(report)
            num_bytes += report.nbytes
        self._unheard = {worker.channel.socket: worker for worker in self._workers}
        self._watcher.start()
        return num_bytes

    def announce(self, command: Command) -> None:
        """Send a command to every worker. Raises RankFailed if one is gone."""
        self.check()
        body = self._encoder.encode(command)
        for worker in self._workers:
            try:
                worker.channel.send_encoded(body)
            except OSError as error:
                raise self._failed_because(error) from error

    def check(self) -> None:
        """Raise RankFailed if a worker has ended."""
        if self._failure is not None:
            raise self._failure

    def explain(self, error: RankFailed) -> RankFailed:
        """The failure of a worker that made an exchange fail with `error`, if there is one."""
        return self._failed_because(error)

    def watch(self, on_failure: OnFailure) -> None:
        with self._lock:
            self._on_failure, failure = on_failure, self._failure
        if failure is not None:
            on_failure(failure)

    def close(self) -> None:
        """End the workers; kills those that do not end within a few seconds."""
        with self._lock:
            self._closing = True
        for worker in self._workers:
            worker.hang_up()
        until_s = time.monotonic() + END_S
        for worker in self._workers:
            worker.end(until_s)
        if self._watcher.is_alive():
            self._watcher.join()
        for worker in self._workers:
            worker.channel.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch_workers(self) -> None:
        """Wait until a worker reports a fault or ends, and find out which one is the cause.

        The others fail as well, for want of its answers, and report that they lost it.
        """
        until_s: float | None = None
        while self._unheard:
            wait_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            ready, _, _ = select.select(list(self._unheard), [], [], wait_s)
            with self._lock:
                if self._closing:
                    return
            if not ready:
                self._fail(self._silence())
                return
            worker = self._unheard.pop(ready[0])
            report = worker.report()
            if not (isinstance(report, Fault) and report.kind == RankFailed.__name__):
                self._fail(worker.failure(report))
                return
            until_s = until_s or time.monotonic() + SETTLE_S
            lost = worker.failure(report)
        self._fail(lost)

    def _silence(self) -> RankFailed:
        """The failure of those that neither report nor end."""
        ranks = [str(worker.rank) for worker in self._unheard.values()]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
        return RankFailed(f"{who} did not answer within {self.config.timeout_s:g} s")

    def _fail(self, failure: RankFailed) -> None:
        with self._lock:
            if self._failure is not None or self._closing:
                return
            self._failure, on_failure = failure, self._on_failure
        for worker in self._workers:
            worker.kill()
        if self._segment is not None:
            self._segment.abort()
        if on_failure is not None:
            on_failure(failure)

    def _failed_because(self, error: Exception) -> RankFailed:
        """Give the watcher a moment to find out which worker it was."""
        self._watcher.join(END_S)
        if self._failure is None:
            self._fail(self._silence() if self._unheard else RankFailed(str(error)))
        return self._failure or RankFailed(str(error))


class _Worker:
    """A rank: the socket to it, and its process if that is a child of this one."""

    def __init__(self, config: RankConfig, remote: socket.socket | None = None) -> None:
        self.rank = config.rank
        self.process: subprocess.Popen[bytes] | None = None
        self.channel = Channel(self._start(config) if remote is None else remote)
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        self.channel.send(config)

    def _start(self, config: RankConfig) -> socket.socket:
        """Start the process; returns this end of the socket to it."""
        ours, theirs = socket.socketpair()
        threads = str(config.num_threads)
        command: Sequence[str] = (sys.executable, "-m", WORKER_MODULE, str(theirs.fileno()))
        try:
            # A separate session: the terminal's Ctrl-C ends rank 0, which ends the workers.
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), *([] if config.segment is None else [config.segment])],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": threads},
            )
        finally:
            theirs.close()
        return ours

    def report(self) -> Report | None:
        """The next report; None if the worker has ended."""
        return self.channel.receive(self._decoder)

    def error(self, report: Report | None) -> RidgelineError:
        """What a worker's failure to load raises."""
        if isinstance(report, Fault) and report.kind:
            kind = getattr(ridgeline.errors, report.kind, None)
            if isinstance(kind, type) and issubclass(kind, UserError):
                return kind(f"rank {self.rank}: {report.text}")
        return self.failure(report)

    def failure(self, report: Report | None) -> RankFailed:
        """Why the worker is gone."""
        if isinstance(report, Fault):
            return RankFailed(f"rank {self.rank} failed: {report.text}")
        if self.process is None:
            return RankFailed(f"rank {self.rank}, on another node, closed its connection")
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(END_S)
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
            return RankFailed(f"rank {self.rank} (process {self.process.pid}) ended {how}")
        return RankFailed(f"rank {self.rank} (process {self.process.pid}) closed its connection")

    def hang_up(self) -> None:
        with suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End the process now; a rank of another node ends soon after its socket does."""
        if self.process is None:
            self.hang_up()
        else:
            self.process.kill()

    def end(self, until_s: float) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
