"""An asyncio event loop and threads on one virtual clock, all in one thread of the system.

Nothing ever waits: if no callback is ready, the clock jumps to the next timer. Threads are
greenlets that run until they wait for a condition, sleep, or reach a place where the random
generator lets another one run. A seed therefore decides every interleaving, and repeats it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import greenlet

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing is left to do.

    `run_in_executor` runs its function on the loop after a random delay. `create_server` opens no
    socket: the factories of connections are found in `listeners`, the connections in `transports`.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng, self.now_s = rng, 1000.0
        self.listeners: list[VirtualListener] = []
        self.transports: list[Any] = []
        self.faults: list[str] = []
        self.spent_s = 0.0  # how long the function of `run_in_executor` that runs now has waited
        self.before_callback: Callable[[], None] | None = None
        self._selector.close()
        self._selector = _JumpingSelector(self)
        self.set_exception_handler(self._note_fault)

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """`before_callback`, if set, runs before each of these: between any two awaits."""
        if self.before_callback is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(self._run_observed, callback, *args, context=context)

    def _run_observed(self, callback: Callable[..., Any], *args: Any) -> None:
        if self.before_callback is not None:
            self.before_callback()
        callback(*args)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        return self.call_soon(callback, *args, **rest)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            try:
                end = partial(future.set_result, function(*args))
            except BaseException as error:
                end = partial(future.set_exception, error)
            waited_s, self.spent_s = self.spent_s, 0.0
            if waited_s:
                self.call_later(waited_s, lambda: None if future.cancelled() else end())
            elif not future.cancelled():
                end()

        self.call_later(self.rng.choice((0.0, 0.0002, 0.003)), run)
        return future

    async def create_server(self, factory: Callable[[], Any], **_: Any) -> Any:  # type: ignore[override]
        listener = VirtualListener(factory)
        self.listeners.append(listener)
        return listener

    def _note_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context['message']}: {context.get('exception')!r}")


class VirtualListener:
    """A listening socket, and the server that asyncio makes for it."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory, self.is_open = factory, True

    def close(self) -> None:
        self.is_open = False

    async def wait_closed(self) -> None:
        pass


class Stuck(AssertionError):
    """Nothing will ever happen again, although the simulation is not over."""


class _JumpingSelector:
    """Stands for the selector of a loop without sockets: `select` moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> Sequence[Any]:
        if timeout is None:
            raise Stuck("no callback is ready and no timer is set")
        if timeout > 0:
            self._loop.now_s += timeout
        return ()

    def register(self, *_: Any) -> None: ...

    def unregister(self, *_: Any) -> None: ...

    def get_key(self, fd: object) -> Any:
        raise KeyError(fd)

    def close(self) -> None: ...


class VirtualThreads:
    """Stands for the module `threading`: its threads are greenlets on `loop`.

    A thread lets others run when it waits, when it sleeps, and with a probability of `switches` at
    each `switch`. While it holds a condition it never does.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, switches: float) -> None:
        self._loop, self._rng, self._switches = loop, rng, switches
        self._main = greenlet.getcurrent()
        self.is_joining = False  # the main greenlet waits: sleeping threads must not return to it
        self.num_held = 0

    def Condition(self) -> VirtualCondition:  # noqa: N802
        return VirtualCondition(self)

    def Thread(self, target: Callable[..., Any], args: tuple[Any, ...], **_: Any) -> VirtualThread:  # noqa: N802
        return VirtualThread(self, lambda: target(*args))

    @property
    def is_main(self) -> bool:
        return greenlet.getcurrent() is self._main

    def sleep(self, seconds: float) -> None:
        """Let others run for that long, if called in a thread."""
        if not (self.is_main or self.is_joining or self.num_held):
            self._loop.call_later(seconds, greenlet.getcurrent().switch)
            self._main.switch()

    def switch(self) -> None:
        """A place where another thread may run."""
        if not self.is_main and self._rng.random() < self._switches:
            self.sleep(self._rng.choice((0.0, 0.0, 0.0005)))

    def pause(self) -> None:
        """Return to the main greenlet, without a time to come back."""
        self._main.switch()


class VirtualThread:
    """A thread that begins in the next iteration of the loop."""

    def __init__(self, threads: VirtualThreads, run: Callable[[], Any]) -> None:
        self._threads, self._run = threads, run
        self._greenlet = greenlet.greenlet(run)

    def start(self) -> None:
        self._threads._loop.call_soon(self._greenlet.switch)

    def is_alive(self) -> bool:
        return not self._greenlet.dead

    def join(self) -> None:
        """Run the thread to its end. Whatever it waits for must have happened."""
        assert self._threads.is_main
        self._threads.is_joining = True
        for _ in range(1000):
            if self._greenlet.dead:
                break
            self._greenlet.switch()
        self._threads.is_joining = False
        assert self._greenlet.dead, "a thread does not end"


class VirtualCondition:
    """A condition that one thread waits for, and its lock.

    Threads run by turns and never while another one holds the lock, so that it is always free.
    """

    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads
        self._waiting: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._threads.switch()
        self._threads.num_held += 1

    def __exit__(self, *_: object) -> None:
        self._threads.num_held -= 1
        self._threads.switch()

    def wait(self, timeout: float | None = None) -> None:
        threads, current, loop = self._threads, greenlet.getcurrent(), self._threads._loop
        assert not threads.is_main, "the event loop would wait for a thread"
        if threads.is_joining:
            return

        def resume() -> None:
            if self._waiting is resume:  # otherwise it has been resumed already
                self._waiting = None
                current.switch()

        self._waiting = resume
        held, threads.num_held = threads.num_held, 0
        if timeout is not None:
            loop.call_later(timeout, resume)
        threads.pause()
        threads.num_held = held

    def notify(self) -> None:
        if self._waiting is not None:
            self._threads._loop.call_soon(self._waiting)
