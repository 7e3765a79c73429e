"""A server in a thread of this process, for notebooks and tests."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

from ridgeline.config.server import ServerOptions, TwinOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import EngineUnavailable
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.serving.serve import ServedModel, serve

_EXIT_S = 30.0  # for which the end of the program waits for a model that is being loaded


class LocalServer:
    """A model that is served until `close`, or until the `with` block is left.

    Constructing it returns when requests are accepted. Raises what `serve` raises.
    """

    def __init__(
        self,
        settings: Settings,
        options: ServerOptions,
        observer: Observer = silent,
        twin: TwinOptions | None = None,
    ) -> None:
        self._ready: Future[tuple[ServedModel, Callable[[], None]]] = Future()
        # A daemon: a notebook that ends without closing its server must not hang.
        self._thread = Thread(
            target=self._run,
            args=(settings, options, observer, twin),
            name="ridgeline-server",
            daemon=True,
        )
        self._is_abandoned = False
        self._failure: EngineUnavailable | None = None
        self._thread.start()
        try:
            self.served, self._stop = self._ready.result()
        except BaseException:  # Ctrl-C: what is being loaded is closed once it is ready
            self._is_abandoned = True
            # Native code must not be under way when Python ends its threads.
            atexit.register(self._thread.join, _EXIT_S)
            raise
        atexit.register(self.close)

    @property
    def url(self) -> str:
        """The address, to which clients append /v1."""
        return self.served.url

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Block until the server stops, which another thread or Ctrl-C may bring about.

        Raises EngineUnavailable where it stopped because its engine had.
        """
        while self._thread.is_alive():
            self._thread.join(1.0)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop; running requests may take up to `shutdown_timeout_s`.

        Closing twice does nothing.
        """
        atexit.unregister(self.close)
        self._stop()
        self._thread.join()

    def to_dict(self) -> dict[str, Any]:
        """What is served, and where, as dicts and plain values."""
        return self.served.to_dict()

    def save(self, path: str | Path) -> Path:
        """Write what is served as .json or .html, and return the path."""
        return self.served.save(path)

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "stopped"
        return f"<LocalServer {self.served.name} at {self.url}, {state}>"

    def _repr_html_(self) -> str:
        return self.served._repr_html_()

    def _run(
        self,
        settings: Settings,
        options: ServerOptions,
        observer: Observer,
        twin: TwinOptions | None,
    ) -> None:
        def ready(served: ServedModel, stop: Callable[[], None]) -> None:
            self._ready.set_result((served, stop))
            if self._is_abandoned:
                stop()

        try:
            serve(settings, options, twin=twin, on_ready=ready, observer=observer)
        except EngineUnavailable as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            self._failure = error
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
