"""Start, change, show and end a fleet on a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.fleet.ray.applications import KEY, PREFIX, actor_environment, failure_of, run_models
from ridgeline.fleet.ray.fleet_file import FleetFile, FleetModel
from ridgeline.fleet.ray.gateway_actor import GatewaySupervisor
from ridgeline.fleet.ray.scaling import scaled
from ridgeline.fleet.ray.server_actor import GATEWAY, NAMESPACE

_START_ATTEMPTS = 3
_ROOM_S = 10.0  # in which Ray places what it has room for


def import_ray() -> Any:
    """The module `ray`. Raises BadInput where it is not installed."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        from ray import serve  # noqa: F401  # the extra of ray
    except ImportError:
        raise BadInput("a fleet needs Ray Serve", fix="pip install 'ridgeline[fleet]'") from None
    return ray


def connect(address: str | None, *, start: bool) -> bool:
    """Connect to the cluster at `address`, or to that of this machine; True if one was started for
    as long as this process runs. Raises CannotRun where there is none."""
    ray = import_ray()
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
    try:
        ray.init(address or "auto", **options)
        return False
    except ConnectionError as error:
        if address is not None or not start or is_about_token(error):
            raise no_cluster(error) from None
    except ray.exceptions.RayError as error:
        raise no_cluster(error) from None
    for _ in range(_START_ATTEMPTS):
        try:
            ray.init(include_dashboard=False, **options)
            return True
        except Exception as error:  # on a busy machine its processes may not answer within 30 s
            ray.shutdown()
            why = str(error)
    raise CannotRun(f"Ray does not start: {startup_cause() or why}")


def is_about_token(error: Exception) -> bool:
    """Whether a cluster runs, and only the token of this machine is missing or another one."""
    return re.search(r"AuthToken|RAY_AUTH|[Aa]uthentication", str(error)) is not None


def no_cluster(error: Exception) -> CannotRun:
    """Why no Ray cluster can be used, as Ray says it."""
    if not is_about_token(error):
        return CannotRun(f"no Ray cluster answers: {error}")
    return CannotRun(
        f"the Ray cluster does not accept this machine: {' '.join(str(error).split())[:300]}",
        fix="give every machine the same token before `ray start`: copy ~/.ray/auth_token of the "
        "first one, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
    )


def startup_cause() -> str | None:
    """Why the raylet of the last start ended, where its log says so: Ray's error does not."""
    logs = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "session_latest", "logs")
    try:
        text = (logs / "raylet.out").read_text(errors="replace")
    except OSError:
        return None
    if "Timed out waiting for file" in text:  # ray-project/ray#65983
        return (
            "its agents did not start within the 15 s that Ray allows them, so the machine is too "
            f"busy (log: {logs / 'raylet.out'})"
        )
    fatal = re.search(r"Check failed: .{0,300}", text)
    return None if fatal is None else f"{fatal[0]} (log: {logs / 'raylet.out'})"


def deploy(fleet: FleetFile) -> list[str]:
    """Make the cluster run the fleet, changing the servers of each model one after another.

    Returns the applications that the fleet does not have any more, and that serve until `remove`
    ends them. Where the cluster has no room for theirs and the new ones, they end at once. Raises
    BadInput where servers on several machines would have no key.
    """
    ray = import_ray()

    is_single = sum(node["Alive"] for node in ray.nodes()) == 1
    if not is_single and not os.environ.get(KEY):
        raise BadInput(f"a fleet on several machines needs a key in {KEY}")
    gateway = (
        ray.remote(GatewaySupervisor)
        .options(
            name=GATEWAY,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=16,
            max_restarts=-1,  # what it is asked waits meanwhile, and may be asked twice
            max_task_retries=-1,
            scheduling_strategy=_this_node(),
            runtime_env=actor_environment(),
        )
        .remote(fleet.host, fleet.port, fleet.route)
    )
    ray.get(gateway.status.remote())
    _start_serve()
    known = _applications()
    leaving = sorted(known - {PREFIX + model.name for model in fleet.models})
    new = [model for model in fleet.models if PREFIX + model.name not in known]
    if leaving and not all(_has_room(model, model.replicas) for model in new):
        remove(leaving)
        leaving = []
    fleet, replicas = _with_surge(fleet, known), ray.get(gateway.hold.remote())
    try:
        models = (
            msgspec.structs.replace(model, replicas=scaled(model, replicas.get(model.name, 0)))
            for model in fleet.models
        )
        run_models(list(models), fleet)
    finally:
        ray.get(gateway.follow_load.remote(fleet, replicas))
    return leaving


def _start_serve() -> None:
    """Ray Serve without its own proxies, which would take port 8000 of every machine for nothing;
    one that runs already stays as it is."""
    import_ray()
    from ray import serve

    serve.start(proxy_location="Disabled")


def _this_node() -> Any:
    """Places the gateway on this machine: its URL names an address of it, and another machine of
    the cluster may fail without it."""
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def remove(applications: Iterable[str]) -> None:
    """End the servers of these applications."""
    from ray import serve

    for name in applications:
        serve.delete(name)


def _with_surge(fleet: FleetFile, known: set[str]) -> FleetFile:
    """The fleet in which only those models have `surge` that the cluster has room for."""
    models = (
        msgspec.structs.replace(
            model,
            surge=model.surge and (PREFIX + model.name not in known or _has_room(model, 1)),
        )
        for model in fleet.models
    )
    return msgspec.structs.replace(fleet, models=tuple(models))


def _has_room(model: FleetModel, count: int) -> bool:
    """Whether the cluster could place that many more servers of the model now."""
    import_ray()
    from ray.util import placement_group, remove_placement_group

    needs = {"CPU": model.cpus, "GPU": model.gpus, **model.resources}
    bundle = {name: amount for name, amount in needs.items() if amount}
    if not bundle:
        return True
    group = placement_group([bundle] * count)
    try:
        return bool(group.wait(_ROOM_S))
    finally:
        remove_placement_group(group)


def wait_ready(fleet: FleetFile, timeout_s: float, on_change: Callable[[str], None]) -> None:
    """Wait until every server runs as the file says. Raises CannotRun in the end."""
    from ray import serve

    deadline_s, before = time.monotonic() + timeout_s, ""
    wanted = {PREFIX + model.name for model in fleet.models}
    while time.monotonic() < deadline_s:
        states = {
            name: application.status.value
            for name, application in serve.status().applications.items()
            if name in wanted
        }
        now = ", ".join(f"{name.removeprefix(PREFIX)} {state}" for name, state in states.items())
        if now != before:
            on_change(now)
            before = now
        failed = [name for name, state in states.items() if state in ("DEPLOY_FAILED", "UNHEALTHY")]
        if failed and all(s not in ("DEPLOYING",) for s in states.values()):
            name = failed[0].removeprefix(PREFIX)
            raise CannotRun(f"{name} does not start: {failure_of(failed[0])}")
        if len(states) == len(fleet.models) and {*states.values()} == {"RUNNING"}:
            return
        time.sleep(0.5)
    raise CannotRun(f"the fleet is not ready after {timeout_s:g} s: {before}")


def read_status() -> dict[str, Any] | None:
    """The gateway and the servers; None if no fleet runs."""
    ray = import_ray()
    try:
        gateway = ray.get_actor(GATEWAY, NAMESPACE)
    except ValueError:
        return None
    status: dict[str, Any] = ray.get(gateway.status.remote(), timeout=60)
    return status


def is_up() -> bool:
    """Whether a fleet runs, as far as Ray knows: its gateway may be about to be started again."""
    ray = import_ray()
    try:
        ray.get_actor(GATEWAY, NAMESPACE)
    except ValueError:
        return False
    return True


def take_down() -> bool:
    """End the servers, and then the gateway; False if no fleet ran."""
    ray = import_ray()
    from ray import serve

    try:
        gateway = ray.get_actor(GATEWAY, NAMESPACE)
    except ValueError:
        return False
    remove(_applications())
    with contextlib.suppress(Exception):
        ray.get(gateway.stop.remote(), timeout=90)
    ray.kill(gateway)
    serve.shutdown()
    return True


def _applications() -> set[str]:
    from ray import serve

    return {name for name in serve.status().applications if name.startswith(PREFIX)}
