"""A name in DNS with an address for each backend, as a headless Service of Kubernetes has it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from ridgeline.errors import BadInput
from ridgeline.fleet.upstream import BackendAddress

log = logging.getLogger("ridgeline.fleet")

LOOK_UP_S = 5.0
"""Time between two look-ups, and the most that one may take."""

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, those of IPv4 if it has any: a server with one of each kind is one
    server. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family: dict[int, list[str]] = {}
    for family, *_, address in found:
        by_family.setdefault(family, []).append(str(address[0]))
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6, [])


class BackendName:
    """The addresses behind the host of a URL, looked up again from time to time. A look-up that
    fails changes nothing: servers do not end because a name server does. Raises BadInput for https,
    because certificates are for the name and not for its addresses."""

    def __init__(self, url: str, resolve: Resolve = resolve) -> None:
        self._url, self._resolve = BackendAddress.parse(url, "--backend-dns"), resolve
        if self._url.tls:
            raise BadInput("--backend-dns is not an http URL", value=str(self._url))
        self.addresses: list[BackendAddress] = []
        self._next_s: float | None = None
        self._has_failed = False

    async def refresh(self, now_s: float) -> None:
        """Look the name up, if it is time to."""
        if self._next_s is not None and now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_UP_S
        try:
            async with asyncio.timeout(LOOK_UP_S):
                hosts = await self._resolve(self._url.host, self._url.port)
        except (OSError, TimeoutError) as error:
            if not self._has_failed:
                log.warning("%s cannot be looked up: %s", self._url.host, error or "no answer")
            self._has_failed = True
            return
        self._has_failed = False
        self.addresses = [replace(self._url, host=host) for host in sorted({*hosts})]
