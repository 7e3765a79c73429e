"""A load that needs more connections than may be opened: the client's fault, never the server's."""

from __future__ import annotations

import errno
import resource
import socket
import subprocess
import sys

import pytest

from ridgeline.config.load import BenchOptions
from ridgeline.errors import BadInput
from ridgeline.hardware import open_files
from ridgeline.hardware.open_files import RESERVED, OpenFilesError, make_room_for_load
from ridgeline.measure.bench_options import most_at_once
from ridgeline.measure.client.http_connection import connect
from ridgeline.measure.client.http_target import HttpTarget
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.mock.server import MockServer
from ridgeline.measure.workload import parse_workload
from ridgeline.measure.workload.arrivals import Closed, burst
from tests.measure.memory_transport import connect_to_mock

SHORT = parse_workload("synthetic:input=8,output=3")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_missing_file_is_no_refusal_of_the_server(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*args: object, **more: object) -> None:
        raise OSError(number, "none left")

    monkeypatch.setattr(socket, "socket", no_file)
    target = HttpTarget("http://127.0.0.1:9", "m", connect=connect)
    with pytest.raises(OpenFilesError, match=r"ulimit -n.*--max-concurrency"):
        await run_load(target, SHORT, burst(), LoadOptions(num_requests=3))


def test_resolver_without_a_file_is_no_refusal_either() -> None:
    """Looking up a name opens files; a resolver that cannot may say "Invalid argument"."""
    code = (
        "import asyncio, concurrent.futures.thread, os, resource, socket\n"
        "from ridgeline.measure.client.http_connection import Origin, connect\n"
        "from ridgeline.hardware.open_files import OpenFilesError\n"
        "def fail(*args, **more): raise OSError(22, 'Invalid argument')\n"
        "async def main():\n"
        "    socket.getaddrinfo = fail\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "    held = []\n"
        "    try:\n"
        "        while True: held.append(os.open(os.devnull, os.O_RDONLY))\n"
        "    except OSError: pass\n"
        "    try: await connect(Origin('chat.test', 9), asyncio.Protocol())\n"
        "    except OpenFilesError: print('no file')\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "no file\n", ended.stderr


@pytest.mark.parametrize("num_warmups", [0, 4])
def test_run_stops_at_the_limit_and_blames_no_server(in_virtual_time, num_warmups) -> None:
    async def main() -> None:
        opened, join = 0, connect_to_mock(MockServer())

        async def connect_two(origin, protocol):
            nonlocal opened
            opened += 1
            if opened > 2:
                raise OpenFilesError
            return await join(origin, protocol)

        target = HttpTarget("http://mock:80", "m", connect=connect_two)
        options = LoadOptions(num_requests=50, num_warmups=num_warmups)
        with pytest.raises(OpenFilesError):
            await run_load(target, SHORT, Closed(5), options)
        assert opened < 12, "it went on"

    in_virtual_time(main())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_concurrency": 7}, 7),
        ({"max_concurrency": 7, "num_prompts": 3}, 3),
        ({"num_prompts": 5000}, 5000),
        ({"num_prompts": 5000, "request_rate": 3.0}, None),
        ({"num_prompts": 5000, "request_rate": 3.0, "max_concurrency": 9}, 9),
        ({"duration_s": 5.0}, None),
    ],
)
def test_most_requests_at_once_follow_from_the_load(options, expected) -> None:
    assert most_at_once(BenchOptions(**options)) == expected


@pytest.mark.parametrize(
    ("soft", "hard", "number", "soft_then"),
    [
        (1024, 4096, None, 4096),
        (1024, 4096, 4096 - RESERVED, 4096),
        (1024, resource.RLIM_INFINITY, 10**6, resource.RLIM_INFINITY),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 10**6, resource.RLIM_INFINITY),
    ],
)
def test_soft_limit_is_raised_to_the_hard_one(monkeypatch, soft, hard, number, soft_then) -> None:
    limits = [soft, hard]
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda what: tuple(limits))
    monkeypatch.setattr(
        open_files.resource, "setrlimit", lambda what, new: limits.__setitem__(0, new[0])
    )
    make_room_for_load(number)
    assert limits == [soft_then, hard]


def test_concurrency_beyond_the_hard_limit_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda what: (1024, 1024))
    with pytest.raises(BadInput, match=r"got '900 requests at once'; limit: 896 .*ulimit -Hn 1028"):
        make_room_for_load(900)


def test_bench_refuses_it_before_anything_is_sent() -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from ridgeline.cli.main import main\n"
        "sys.exit(main(['bench', '--url', 'http://127.0.0.1:9', '--max-concurrency', '500',\n"
        "               '--workload', 'synthetic:input=8,output=3', '--num-prompts', '600']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2 and "500 requests at once" in ended.stderr, ended.stderr
