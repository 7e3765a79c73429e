"""Prometheus and promtool of Debian's package, as processes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.operate.yaml_text import to_yaml

ROOT = Path(__file__).parents[2]


def program(name: str) -> str:
    """The path of a program of Debian's package prometheus; `make prometheus` fetches it."""
    fetched = ROOT / "build" / "prometheus" / "usr" / "bin" / name
    path = str(fetched) if fetched.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not here: make prometheus")
    return path


class Prometheus:
    """One that runs, at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def query(self, expression: str) -> list[Any]:
        """The samples of an expression; none while Prometheus is starting."""
        url = f"http://{self.address}/api/v1/query"
        try:
            reply = httpx.get(url, params={"query": expression}, timeout=30)
        except httpx.TransportError:
            return []
        assert reply.status_code in (200, 503), reply.text
        if reply.status_code == 503:
            return []
        result: list[Any] = reply.json()["data"]["result"]
        return result

    def wait(self, *expressions: str) -> None:
        """Until every expression has samples."""
        wait_for(lambda: all(map(self.query, expressions)))


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not within the time"
        time.sleep(0.25)


@contextmanager
def scraping(
    folder: Path, urls: Sequence[str], rules: Mapping[str, Any] | None = None
) -> Iterator[Prometheus]:
    """A Prometheus that reads the metrics of these servers every second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    targets = [url.removeprefix("http://") for url in urls]
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "servers", "static_configs": [{"targets": targets}]}],
    }
    if rules is not None:
        config["rule_files"] = ["rules.yaml"]
        (folder / "rules.yaml").write_text(to_yaml(rules))
    (folder / "prometheus.yml").write_text(to_yaml(config))
    command = [
        program("prometheus"),
        "--config.file=prometheus.yml",
        f"--web.listen-address={address}",
        "--storage.tsdb.path=data",
    ]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait(30)
