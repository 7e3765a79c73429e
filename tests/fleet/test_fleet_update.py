"""How `fleet up` replaces servers, and which servers the gateway gets to know; without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.errors import CannotRun
from ridgeline.fleet.ray import deploy
from ridgeline.fleet.ray.child_process import url_of
from ridgeline.fleet.ray.fleet_file import FleetFile, FleetModel
from ridgeline.fleet.ray.gateway_actor import gateway_words
from ridgeline.fleet.ray.server_actor import listening_address
from ridgeline.fleet.ray.server_table import LOST_AFTER_S, ServerTable


class Cluster:
    """Of Ray, what `deploy` asks: applications that run, and room for further servers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, running: set[str], room: int) -> None:
        self.running, self.room = running, room
        self.replicas: dict[str, int] = {}  # of models that follow the load
        self.num_started = 0
        self.steps: list[str] = []
        for name in ("status", "hold", "follow_load"):
            setattr(self, name, self)
        monkeypatch.setattr(deploy, "import_ray", lambda: self)
        monkeypatch.setattr(deploy, "_this_node", lambda: None)
        monkeypatch.setattr(deploy, "_start_serve", lambda: None)
        monkeypatch.setattr(deploy, "_applications", lambda: set(self.running))
        monkeypatch.setattr(deploy, "_has_room", lambda model, count: count <= self.room)
        monkeypatch.setattr(deploy, "run_models", self.run_models)
        monkeypatch.setattr(
            deploy, "remove", lambda names: self.steps.extend(f"-{n}" for n in names)
        )

    def run_models(self, models: Sequence[FleetModel], _: FleetFile) -> None:
        self.steps += [f"+{model.name}{' surge' if model.surge else ''}" for model in models]
        self.num_started = models[-1].replicas

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True}]

    def get(self, _: Any) -> Any:
        return self.replicas

    def remote(self, *_: Any) -> Any:
        return self

    def options(self, **_: Any) -> Any:
        return self


@pytest.mark.parametrize(
    ("running", "room", "steps", "leaving"),
    [
        ({"ridgeline-demo"}, 1, ["+demo surge"], []),
        ({"ridgeline-demo"}, 0, ["+demo"], []),
        ({"ridgeline-demo-l4"}, 2, ["+demo surge"], ["ridgeline-demo-l4"]),
        ({"ridgeline-demo-l4"}, 1, ["-ridgeline-demo-l4", "+demo surge"], []),
        (set(), 0, ["+demo surge"], []),
    ],
)
def test_old_servers_serve_until_new_ones_do_where_there_is_room(
    running: set[str],
    room: int,
    steps: list[str],
    leaving: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, running, room)
    fleet = FleetFile(models=(FleetModel(model="demo", replicas=2),))
    assert deploy.deploy(fleet) == leaving
    assert cluster.steps == steps


def test_no_server_more_than_usual_runs_where_the_file_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, {"ridgeline-demo"}, 5)
    deploy.deploy(FleetFile(models=(FleetModel(model="demo", surge=False),)))
    assert cluster.steps == ["+demo"]


@pytest.mark.parametrize(("now", "expected"), [(0, 2), (1, 2), (3, 3), (9, 4)])
def test_servers_that_the_load_has_added_stay(
    now: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(monkeypatch, {"ridgeline-demo"}, 1)
    cluster.replicas = {"demo": now}
    deploy.deploy(FleetFile(models=(FleetModel(model="demo", replicas=2, max_replicas=4),)))
    assert cluster.num_started == expected


@pytest.mark.parametrize(
    ("given", "last"),
    [
        ((), ["--park-timeout-s", "300"]),
        (("--park-timeout-s=5",), ["file", "--park-timeout-s=5"]),
        (("--park-timeout-s", "5"), ["--park-timeout-s", "5"]),
    ],
)
def test_gateway_of_a_fleet_waits_as_long_as_a_model_loads(
    given: tuple[str, ...], last: list[str]
) -> None:
    words = gateway_words("127.0.0.1", 1, Path("file"), given)
    assert words[-2:] == last and "".join(words).count("park") == 1


class Table:
    """A table on a clock that a test sets, of servers that answer while `alive` has their URL."""

    def __init__(self, folder: Path) -> None:
        self.now_s, self.alive, self.file = 0.0, {"http://h:1", "http://h:2"}, folder / "backends"
        self.table = ServerTable(self.file, self.alive.__contains__, lambda: self.now_s)
        for number in (1, 2):
            self.note(number)

    def note(self, number: int) -> None:
        self.table.note(f"r{number}", "demo", f"http://h:{number}", number)

    def urls(self) -> list[str]:
        urls = self.file.read_text().split()
        assert urls == [entry.url for entry in self.table.entries()]
        return urls


def test_server_without_a_supervisor_that_does_not_answer_leaves_the_file(tmp_path: Path) -> None:
    world = Table(tmp_path)
    world.now_s = LOST_AFTER_S + 1
    world.note(1)
    world.table.forget_lost()
    assert world.urls() == ["http://h:1", "http://h:2"]  # Ray does not ask, but it serves
    world.alive.clear()
    world.now_s += LOST_AFTER_S / 2
    world.note(1)
    world.now_s += LOST_AFTER_S / 2 + 1
    world.table.forget_lost()
    assert world.urls() == ["http://h:1"]  # the supervisor's word suffices
    world.note(2)  # it was only slow
    assert world.urls() == ["http://h:1", "http://h:2"]


def test_next_table_knows_the_servers_and_forgets_those_that_are_gone(tmp_path: Path) -> None:
    world = Table(tmp_path)
    world.table.remove("r1")
    after = Table.__new__(Table)
    after.now_s, after.alive, after.file = 5.0, set(), world.file
    after.table = ServerTable(after.file, after.alive.__contains__, lambda: after.now_s)
    assert after.urls() == ["http://h:2"]
    after.now_s += LOST_AFTER_S / 2
    after.table.forget_lost()
    assert after.urls() == ["http://h:2"]
    after.now_s += LOST_AFTER_S
    after.table.forget_lost()
    assert after.urls() == []


def test_server_that_left_does_not_come_back_by_a_late_word(tmp_path: Path) -> None:
    world = Table(tmp_path)
    world.table.remove("r1")
    world.note(1)
    assert world.urls() == ["http://h:2"]
    world.table.entries()[0].url = "changed"  # of a copy
    assert world.urls() == ["http://h:2"]


def test_server_listens_where_the_gateway_reaches_it_and_no_further() -> None:
    assert listening_address("10.0.0.7", "10.0.0.7") == "127.0.0.1"
    assert listening_address("10.0.0.8", "10.0.0.7") == "10.0.0.8"
    assert url_of("fd00::8", 8000) == "http://[fd00::8]:8000"


class RefusingRay:
    """Of Ray, a cluster that does not let this machine in."""

    exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))

    def __init__(self, error: Exception) -> None:
        self.error = error

    def init(self, *_: object, **__: object) -> None:
        raise self.error


@pytest.mark.parametrize("kind", [ConnectionError, RefusingRay.exceptions.RayError])
@pytest.mark.parametrize("start", [False, True])
def test_token_that_is_refused_is_named_with_what_to_do(
    kind: type[Exception], start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind("UNAUTHENTICATED: InvalidAuthToken:\n bad token")
    monkeypatch.setattr(deploy, "import_ray", lambda: RefusingRay(error))
    with pytest.raises(CannotRun, match=r"InvalidAuthToken: bad token.*copy ~/.ray/auth_token"):
        deploy.connect(None, start=start)


def test_cluster_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "import_ray", lambda: RefusingRay(ConnectionError("refused")))
    with pytest.raises(CannotRun, match="no Ray cluster answers: refused"):
        deploy.connect("10.0.0.1:6379", start=False)
