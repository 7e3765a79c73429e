"""The system's limit of open files, which bounds how many connections a server can hold."""

from __future__ import annotations

import logging
import resource

from ridgeline.errors import BadInput

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
