"""A server that is measured and never changed (`--advise`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ridgeline.errors import CannotRun
from ridgeline.optimize.drivers.base import Shell
from ridgeline.optimize.drivers.server_process import answers, models_url


class FixedServer:
    """A `Driver` and the one `ServerHandle` that it has: the server as it runs."""

    side_by_side = True
    num_starts = 1

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> FixedServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing was changed."""

    def configure(self, flags: Sequence[str], log: Path) -> FixedServer:
        if flags:
            raise CannotRun("this server is only measured", value=" ".join(flags))
        return self

    def plan(self, flags: Sequence[str]) -> list[Shell]:
        return []

    def plan_restore(self) -> list[Shell]:
        return []

    @property
    def is_up(self) -> bool:
        return answers(models_url(self.url))

    def start(self) -> None:
        if not self.is_up:
            raise CannotRun("the server does not answer", value=models_url(self.url))

    def stop(self) -> None:
        """Nothing: it is not Ridgeline's."""
