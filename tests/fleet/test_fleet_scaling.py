"""Autoscaling of a fleet on Ray, and placement of its models by their rates; without Ray."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.commands.run.fleet import check_command
from ridgeline.config.settings import Settings
from ridgeline.engine.config import resolve
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.fleet.page.view import BackendView, FleetView
from ridgeline.fleet.ray.applications import cause_in
from ridgeline.fleet.ray.deploy import startup_cause
from ridgeline.fleet.ray.fleet_file import FleetModel, read_fleet_file
from ridgeline.fleet.ray.scaling import FleetScaler
from ridgeline.workflows.serving.pack_fleet import pack_fleet


def seen(*in_flight: int, models: tuple[str, ...] = ("demo",), parked: int = 0) -> FleetView:
    backends = tuple(
        BackendView(
            url=f"http://h:{number}",
            state="ready",
            arm="stable",
            models=models,
            in_flight=count,
            queued_tokens=0,
            prefill_tok_s=0.0,
        )
        for number, count in enumerate(in_flight)
    )
    return FleetView(
        backends=backends,
        models=models,
        num_parked=parked,
        num_suspects=0,
        oldest_s=0.0,
        wanted_replicas=1,
        counts={},
    )


MODEL = FleetModel(model="demo", replicas=2, max_replicas=6, target_in_flight=4, stable_s=60)


class World:
    """A gateway whose view a test sets, and the changes that the scaler makes."""

    def __init__(self, *models: FleetModel, replicas: dict[str, int] | None = None) -> None:
        self.view: FleetView | None = seen(0, 0)
        self.changes: list[tuple[str, int]] = []
        self.scaler = FleetScaler(models, lambda: self.view, self._set, replicas or {})

    def _set(self, model: FleetModel, count: int) -> None:
        self.changes.append((model.name, count))


def test_load_adds_servers_at_once_and_removes_them_after_the_stable_time() -> None:
    world = World(MODEL)
    world.scaler.step(0.0)
    assert world.changes == []
    world.view = seen(10, 8)
    world.scaler.step(5.0)
    assert world.changes == [("demo", 5)]
    world.view = seen(0, 0, 0, 0, 0)
    world.scaler.step(30.0)
    assert world.changes == [("demo", 5)]
    world.scaler.step(66.0)
    assert world.changes[-1] == ("demo", 2)


@pytest.mark.parametrize(("wanted", "expected"), [(4, 4), (9, 6), (1, 2)])
def test_next_scaler_sets_what_was_wanted_last(wanted: int, expected: int) -> None:
    world = World(MODEL, replicas={"demo": wanted})
    world.view = None
    world.scaler.step(0.0)
    assert world.changes == [("demo", expected)]
    world.scaler.step(5.0)
    assert len(world.changes) == 1
    world.view = seen(0, 0)
    world.scaler.step(10.0)
    assert world.changes[-1] == ("demo", 2)


def test_batch_requests_add_servers_to_their_own_model() -> None:
    busy, other = (msgspec.structs.replace(MODEL, model=m) for m in "ab")
    world = World(busy, other)
    view = seen(1, 1)
    own = (
        msgspec.structs.replace(
            view.backends[0], models=("a",), batch_store="s", batch_servers=3.6
        ),
        msgspec.structs.replace(view.backends[1], models=("b",)),
    )
    world.view = msgspec.structs.replace(view, backends=own)
    world.scaler.step(0.0)
    assert world.changes == [("a", 4)]


def test_old_requests_add_servers_to_their_own_model() -> None:
    waiting, other = (msgspec.structs.replace(MODEL, model=m, allowed_wait_s=2.0) for m in "ab")
    world = World(waiting, other)
    view = seen(1, 1)
    own = (
        msgspec.structs.replace(view.backends[0], models=("a",), oldest_s=3.0),
        msgspec.structs.replace(view.backends[1], models=("b",)),
    )
    world.view = msgspec.structs.replace(view, backends=own)
    world.scaler.step(0.0)
    assert world.changes == [("a", 3)]


def test_floor_and_ceiling_hold_and_a_silent_gateway_changes_nothing() -> None:
    world = World(MODEL)
    world.view = seen(500, 500)
    world.scaler.step(0.0)
    assert world.changes == [("demo", 6)]
    world.view = None
    for second in range(10, 400, 10):
        world.scaler.step(float(second))
    assert world.changes == [("demo", 6)]


def test_each_model_follows_its_own_requests() -> None:
    other = FleetModel(model="x/other", max_replicas=4, target_in_flight=4, stable_s=0)
    world = World(MODEL, other, FleetModel(model="fixed"))
    world.view = seen(9, models=("x/other",))
    world.scaler.step(0.0)
    assert world.changes == [("other", 3)]


def test_change_that_fails_is_tried_again() -> None:
    def fail(model: FleetModel, count: int) -> None:
        raise OSError

    scaler = FleetScaler([MODEL], lambda: seen(20), fail)
    for second in (0.0, 5.0):
        with pytest.raises(OSError):
            scaler.step(second)
    assert scaler.replicas["demo"] == 2


def write(folder: Path, text: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def test_rates_become_replicas_parts_of_gpus_and_resources(tmp_path: Path) -> None:
    text = """
    stock = "h100-sxm=4,l4=2"
    [[models]]
    model = "llama-3.1-70b"
    rate = 0.5
    [[models]]
    model = "llama-3.2-1b"
    rate = 2.0
    serve = ["--max-num-seqs", "64"]
    [[models]]
    model = "demo"
    replicas = 2
    """
    fleet = pack_fleet(read_fleet_file(write(tmp_path, text)))
    by_model = {model.model: model for model in fleet.models}
    assert by_model["demo"].replicas == 2 and by_model["demo"].gpus == 0
    large, small = by_model["llama-3.1-70b"], by_model["llama-3.2-1b"]
    assert large.placed_on == "h100-sxm" and large.gpus >= 2
    size = str(int(large.gpus))
    assert large.serve[-2:] == ("--tensor-parallel-size", size)
    assert large.resources == {"h100-sxm": large.gpus}
    assert 0 < small.gpus <= 1 and small.serve[:2] == ("--max-num-seqs", "64")
    assert "--kv-cache-memory-bytes" in small.serve
    assert len({model.name for model in fleet.models}) == len(fleet.models)


@pytest.mark.parametrize(("flags", "longest"), [((), 320), (("--max-model-len", "2000"), 2000)])
def test_packed_server_holds_its_longest_request(
    tmp_path: Path, flags: tuple[str, ...], longest: int
) -> None:
    text = f"""
    stock = "l4=1"
    [[models]]
    model = "demo"
    rate = 0.1
    input_len = 64
    output_len = 16
    serve = {list(flags)!r}
    """
    (model,) = pack_fleet(read_fleet_file(write(tmp_path, text))).models
    given = dict(zip(model.serve[::2], model.serve[1::2], strict=True))
    assert given["--max-model-len"] == str(longest)
    settings = Settings(
        model="demo",
        max_model_len=longest,
        kv_cache_dtype="bfloat16",
        kv_cache_memory_bytes=int(given["--kv-cache-memory-bytes"]),
    )
    assert given["--kv-cache-dtype"] == "bfloat16"
    assert resolve(settings).max_model_len == longest


def test_max_model_len_extends_the_context_by_linear_scaling(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 1001,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    text = """
    stock = "l4=1"
    [[models]]
    model = "./long"
    rate = 0.1
    input_len = 3000
    output_len = 100
    serve = ["--max-model-len", "4004"]
    """
    (model,) = pack_fleet(read_fleet_file(write(tmp_path, text))).models
    assert model.placed_on == "l4"


def test_file_without_rates_is_unchanged(tmp_path: Path) -> None:
    fleet = read_fleet_file(write(tmp_path, '[[models]]\nmodel = "demo"'))
    assert pack_fleet(fleet) is fleet


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[models]]\nmodel = "a"\nrate = 1.0', "stock of devices"),
        ('stock = "l4=1"\n[[models]]\nmodel = "a"\nrate = 1.0\nreplicas = 2', "leave these out"),
        ('[[models]]\nmodel = "a"\nreplicas = 3\nmax_replicas = 2', "below replicas"),
        ('[[models]]\nmodel = "a"\ntarget_in_flight = 0', "must be positive"),
    ],
)
def test_contradictory_entries_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_fleet_file(write(tmp_path, text))


@pytest.mark.parametrize(
    ("gateway", "model", "message"),
    [
        ("port = 0", "", "port"),
        ("port = 70000", "", "port"),
        ('host = "a b"', "", "host"),
        ("drain_s = -1", "", "drain_s"),
        ("", "replicas = 1000000000", "replicas"),
        ("", "target_in_flight = nan", "finite"),
        ("", "stable_s = inf", "finite"),
        ('stock = "l4=1"', "", "no model of the fleet has a rate"),
        ("drain_s = 100_000_000_000", "", "drain_s"),
        ('host = "300.1.1.1"', "", "host is not an address"),
        (f'host = "{"a" * 64}.example"', "", "host is not an address"),
        ("", "max_replicas = 1_000_000_000", "max_replicas"),
        ("", "target_in_flight = 3.0", "without max_replicas"),
        ("", "allowed_wait_s = 3.0", "without max_replicas"),
        ("", "stable_s = 3.0", "without max_replicas"),
        ("", "input_len = 4096", "without rate"),
        ("", 'placed_on = "l4"', "placed_on"),
        ("", "cpus = 1e9", "out of range"),
        ("", "gpus = 65.0", "out of range"),
        ("", "resources = {a = 1e300}", "must be positive"),
        ('stock = "l4=1"', "rate = 1.0\noutput_len = 100_000_000_000", "output_len"),
        ("", "cpus = nan", "finite"),
        ("", "gpus = 1.5", "whole number"),
        ("", "gpus = -1.0", "out of range"),
        ("", "resources = {a = -1.0}", "must be positive"),
        ("", 'resources = {"" = 1.0}', "Ray has not taken"),
        ("", "resources = {CPU = 1.0}", "Ray has not taken"),
        ('stock = "l4=1"', "rate = 0.0", "must be positive"),
        ('stock = "l4=1"', "rate = nan", "finite"),
        ('stock = "l4=1"', "rate = 1.0\ninput_len = 0", "input_len"),
        ("", 'quantization = "int8"', "without rate"),
    ],
)
def test_values_out_of_range_are_refused(
    tmp_path: Path, gateway: str, model: str, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        read_fleet_file(write(tmp_path, f'{gateway}\n[[models]]\nmodel = "demo"\n{model}'))


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("serve", ["demo", "--nope"], "--nope"),
        ("serve", ["demo", "--port", "1"], "the fleet sets --port"),
        ("serve", ["demo", "--host=::"], "the fleet sets --host"),
        ("serve", ["demo", "other"], "other"),
        ("serve", ["demo", "--max-num-seqs", "-4"], "max.num.seqs"),
        ("serve", ["demo", "--help"], "would not start"),
        ("route", ["--silence-s", "x"], "silence"),
        ("route", ["--backend-file", "x"], "the fleet sets"),
        ("route", ["--slo-classes", "x"], "slo-classes"),
        ("route", ["--canary", "nope"], "URL"),
        ("route", ["--fallback-url", "http://x"], "dollars-per-hour"),
        ("route", ["--prefill-backend", "http://x:1"], "need each other"),
    ],
)
def test_flags_of_a_fleet_are_those_of_its_commands(
    command: str, words: list[str], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        check_command(command, words)


def test_valid_flags_of_a_fleet_are_accepted() -> None:
    check_command("serve", ["demo", "--twin", "--device", "l4", "--max-num-seqs", "4"])
    check_command("route", ["--policy", "ttft"])


@pytest.mark.parametrize("name", ["./none", "../none", "/none/model", "~/none-model", "~no-one/m"])
def test_missing_folder_of_a_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"is not there|no user's folder"):
        read_fleet_file(write(tmp_path, f'[[models]]\nmodel = "{name}"'))
    (tmp_path / "here").mkdir()
    fleet = read_fleet_file(write(tmp_path, '[[models]]\nmodel = "./here"'))
    assert fleet.models[0].model == str((tmp_path / "here").resolve())


@pytest.mark.parametrize("rate", ["1e8", "1e300"])
def test_rate_beyond_every_stock_is_refused(tmp_path: Path, rate: str) -> None:
    text = f'stock = "l4=1"\n[[models]]\nmodel = "demo"\nrate = {rate}'
    with pytest.raises(DoesNotFit, match="too many replicas"):
        pack_fleet(read_fleet_file(write(tmp_path, text)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("input_len = 100_000", r"longer than the context.*100,000 \+ 256.*2,048"),
        ("input_len = 2000\noutput_len = 100", "longer than the context"),
        ('serve = ["--max-model-len", "1k"]', r"shorter than its requests.*>= .*1,280"),
        ('serve = ["--max-model-len=64"]', "shorter than its requests"),
    ],
)
def test_requests_that_no_server_could_take_are_refused(
    tmp_path: Path, fields: str, message: str
) -> None:
    text = f'stock = "l4=1"\n[[models]]\nmodel = "demo"\nrate = 1.0\n{fields}'
    with pytest.raises(BadInput, match=message):
        pack_fleet(read_fleet_file(write(tmp_path, text)))


def test_stock_that_does_not_suffice_is_refused(tmp_path: Path) -> None:
    text = 'stock = "l4=1"\n[[models]]\nmodel = "llama-3.1-70b"\nrate = 1.0'
    with pytest.raises(DoesNotFit):
        pack_fleet(read_fleet_file(write(tmp_path, text)))


def test_cause_of_a_failed_server_is_its_own_words() -> None:
    message = (
        "The deployment failed to start 3 times in a row. Error:\n  File replica.py, line 1\n"
        "RuntimeError: Traceback (most recent call last):\n  File server_actor.py, line 34\n"
        "RuntimeError: the server has ended: the KV cache cannot hold one sequence\n"
    )
    assert cause_in(message) == "the server has ended: the KV cache cannot hold one sequence"
    assert cause_in("no node has a GPU") == "no node has a GPU"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("Check failed: Timed out waiting for file /tmp/ray/metrics_agent_port_1", "too busy"),
        ("(raylet) Check failed: no space left on /dev/shm", "no space left"),
        ("(raylet) started", None),
    ],
)
def test_failed_start_of_ray_is_explained_by_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, cause: str | None
) -> None:
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(log)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    explanation = startup_cause()
    assert explanation is None if cause is None else cause in str(explanation)
