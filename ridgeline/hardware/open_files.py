"""The system's limit of open files, which bounds the connections of servers and load clients."""

from __future__ import annotations

import errno
import logging
import os
import resource
from contextlib import suppress

from ridgeline.errors import BadInput, CannotRun

_LOG = logging.getLogger(__name__)
RESERVED = 128
"""Descriptors kept free of connections: for libraries, models, batch files, and connections that
are accepted only to be refused."""
MIN_CONNECTIONS = 32


def raise_limit(num_connections: int, files_each: int = 1) -> None:
    """Raise this process's soft limit of open files, so that it holds `num_connections`.

    The hard limit, which only an administrator can raise, is kept. Each connection takes
    `files_each` descriptors. Raises BadInput where even MIN_CONNECTIONS would not fit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections * files_each + RESERVED
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    least = min(MIN_CONNECTIONS, num_connections) * files_each + RESERVED
    if max(allowed, soft) < least and soft != resource.RLIM_INFINITY:
        raise BadInput(
            "the limit of open files is too low to serve",
            value=f"ulimit -n {hard}",
            limit=f"at least {least}",
            fix=f"raise the hard limit (ulimit -Hn {wanted}, LimitNOFILE={wanted} of systemd)",
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def make_room_for_load(num_connections: int | None = None) -> None:
    """Raise the soft limit of open files to the hard one, for a client that opens as many
    connections as requests are in flight.

    `num_connections`: the largest number, where the load has one. Raises BadInput if the hard limit
    is too low for it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and soft != resource.RLIM_INFINITY:
        with suppress(ValueError, OSError):  # some systems cap what they call unlimited
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if num_connections is None or soft == resource.RLIM_INFINITY:
        return
    if num_connections + RESERVED > soft:
        raise BadInput(
            "the limit of open files is too low for this concurrency",
            value=f"{num_connections:,} requests at once",
            limit=f"{max(0, soft - RESERVED):,} with ulimit -n {soft}",
            fix=f"lower the concurrency, or raise the hard limit (ulimit -Hn "
            f"{num_connections + RESERVED})",
        )


def are_used_up() -> bool:
    """Whether this process can open no further file now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


class OpenFilesError(CannotRun):
    """A load client could not open a connection: the fault is its own, not the server's."""

    def __init__(self) -> None:
        super().__init__(
            "the load needs more connections than this process may open",
            value=f"ulimit -n {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}",
            fix="raise the limit (ulimit -n); `bench` can bound the load (--max-concurrency)",
        )


def connections_that_fit(num_connections: int, files_each: int = 1) -> int:
    """At most `num_connections`: as many as the soft limit of open files has room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return num_connections
    fitting = max(1, (soft - RESERVED) // files_each)
    if fitting >= num_connections:
        return num_connections
    _LOG.warning(
        "at most %d connections (--max-num-connections %d): the limit of open files is %d "
        "(ulimit -n)",
        fitting,
        num_connections,
        soft,
    )
    return fitting
