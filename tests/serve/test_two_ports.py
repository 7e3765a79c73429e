"""A server with a port for clients and one for operators."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.errors import BadInput
from ridgeline.serve import server
from ridgeline.workflows.serving.serve import _listen_for_admin


def test_room_for_open_files_is_made_once_for_both_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(server, "raise_limit", lambda number, each: made.append(number))
    options = ServerOptions(port=0, admin_port=0)
    with ExitStack() as resources, server.listen(options):
        assert _listen_for_admin(options, resources) is not None
    assert made == [options.max_num_connections]


def test_a_taken_admin_port_is_named_by_its_flag() -> None:
    with ExitStack() as resources, server.listen(ServerOptions(port=0)) as taken:
        options = ServerOptions(admin_port=taken.getsockname()[1])
        with pytest.raises(BadInput, match="--admin-port 0 takes any free port"):
            _listen_for_admin(options, resources)
