"""Chooses how configurations are applied to the server that the options name."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec

from ridgeline.config.rules import WAYS_TO_APPLY
from ridgeline.errors import BadInput
from ridgeline.optimize.drivers.base import Driver, Report, ServerControl
from ridgeline.optimize.drivers.compile_cache import NONE, CompileCache, volume_for
from ridgeline.optimize.drivers.docker import DockerContainer
from ridgeline.optimize.drivers.in_place import InPlaceDriver, Readiness
from ridgeline.optimize.drivers.restore_script import RESTORE_SCRIPT, RestoreScript
from ridgeline.optimize.drivers.server_process import ProcessDriver, ServerCommand
from ridgeline.optimize.drivers.shell import join_lines
from ridgeline.optimize.external.server_flags import (
    load_server_flags,
    server_flags_for,
    spell_out,
)
from ridgeline.workflows.evaluate.eval_command import check_command

LOST_KERNELS = (
    "compiled kernels are lost with each pod of the copy; --compile-cache pvc:CLAIM or "
    "host:/FOLDER keeps them"
)


class RestartableServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server of another engine, and one way of applying a configuration to it.

    `restart_cmd`: a command line with `{flags}`; it and `url` both contain `{port}`, so that two
    configurations can run at once, or neither does. `apply_cmd`: a command that applies a
    configuration to the server that `server_cmd` describes. `docker`: a container. `kubernetes`:
    NAMESPACE/NAME of a Deployment, which is changed in place, or copied if `url` has `{service}` or
    `{port}`. `slurm`: a job script with `{flags}`; `url` may contain
    `{node}`. `ray`: the Serve configuration that is deployed. `ready_url`: answers once a
    configuration is up (None: the list of models). `server`: vllm, sglang, trtllm, tgi,
    llama-server or ridgeline; None means the one that the command line names. `num_devices`: what
    tensor parallelism and replicas may use (None: as the command has it). `accelerator`: the
    catalogue's device that it runs on (None: that of this machine). `eval_cmd`: the user's
    own quality gate, whose score may drop by `eval_margin`. `candidate_models`: checkpoints to try
    in place of the model. `candidate_drafters`: heads and draft models to speculate with, as
    `eagle3:CHECKPOINT`. `candidate_commands`: to try in place of `restart_cmd`.
    `compile_cache`: where compiled kernels are kept from start to start (None: where the server
    keeps them, and for a container that mounts no cache a volume of its name; "none": nowhere).
    """

    url: str
    restart_cmd: str | None = None
    apply_cmd: str | None = None
    server_cmd: str | None = None
    docker: str | None = None
    kubernetes: str | None = None
    slurm: Path | None = None
    ray: Path | None = None
    ready_url: str | None = None
    server: str | None = None
    served_model_name: str | None = None
    api_key: str | None = None
    start_timeout_s: float = 600.0
    num_devices: int | None = None
    accelerator: str | None = None
    eval_cmd: str | None = None
    eval_margin: float = 0.0
    candidate_models: tuple[str, ...] = ()
    candidate_drafters: tuple[str, ...] = ()
    candidate_commands: tuple[str, ...] = ()
    compile_cache: str | None = None

    def __post_init__(self) -> None:
        for name in ("restart_cmd", "apply_cmd", "server_cmd", "eval_cmd"):
            if (line := getattr(self, name)) is not None:
                msgspec.structs.force_setattr(self, name, join_lines(line))
        lines = tuple(map(join_lines, self.candidate_commands))
        msgspec.structs.force_setattr(self, "candidate_commands", lines)
        if self.eval_cmd is not None:
            check_command(self.eval_cmd)
        given = [name for name in WAYS_TO_APPLY if getattr(self, name) is not None]
        flags = [f"--{name.replace('_', '-')}" for name in given]
        for command in self.candidate_commands:
            _command(self, command)  # raises where it lacks a placeholder
        if len(given) > 1:
            raise BadInput("two ways of applying a configuration", value=" and ".join(flags))
        if self.docker or self.kubernetes or self.ray or self.apply_cmd:
            refused = ["{node}"] if self.kubernetes else ["{port}", "{node}", "{service}"]
            for placeholder in refused:
                if placeholder in self.url:
                    raise BadInput(
                        f"--url has {placeholder}, but {flags[0]} changes the server at one "
                        "address",
                        value=self.url,
                    )
        is_in_place = self.kubernetes is not None and not is_copied(self.url)
        if self.compile_cache == NONE and self.docker is None and self.kubernetes is None:
            raise BadInput(
                "--compile-cache none is for containers and pods: a process keeps its kernels "
                "where the server does",
                value=flags[0] if flags else None,
            )
        if self.compile_cache is not None and is_in_place:
            raise BadInput(
                "--compile-cache needs a copy: in place only the server's arguments change",
                value=self.compile_cache,
                fix="write {service} or {port} in --url, or mount a cache in the Deployment",
            )


def open_driver(
    server: RestartableServer, folder: Path, report: Report
) -> tuple[ServerCommand, Driver]:
    """The server's command line, read where it runs, and what applies changes of it.

    `folder` receives what a driver writes. Raises BadInput, and CannotRun if the server's present
    state cannot be read.
    """
    if server.restart_cmd is not None:
        command = _command(server, server.restart_cmd)
        env = tuple(_cache_variables(server, command.command).items())
        command = msgspec.structs.replace(command, env=env)
        return command, ProcessDriver(command, folder)
    if server.slurm is not None:
        from ridgeline.optimize.drivers.slurm import SlurmDriver, SlurmScript

        script = SlurmScript(server.slurm)
        env_of_jobs = _cache_variables(server, script.command)
        job = SlurmDriver(script, server.url, server.start_timeout_s, folder, report, env_of_jobs)
        return _command(server, script.command), job
    readiness = Readiness(path_url=server.ready_url, timeout_s=server.start_timeout_s)
    if server.kubernetes is not None and is_copied(server.url):
        from ridgeline.optimize.drivers.kubernetes.copy import KubernetesCopyDriver

        copy = KubernetesCopyDriver(server.kubernetes, server.url, readiness, folder, report)
        cache = _cache(server, copy.command.command)
        if cache is not None:
            copy.keep_compiled(cache)
        elif _compiles(server, copy.command.command):
            report(LOST_KERNELS)
        return copy.command, copy
    control = _control(server, folder)
    command = _command(server, f"{shlex.join(control.read_command())} {{flags}}")
    if isinstance(control, DockerContainer):
        _keep_compiled(server, control, command.command, report)
    restore = RestoreScript(folder / RESTORE_SCRIPT)
    return command, InPlaceDriver(control, command, readiness, restore, report)


def cluster_rights(server: RestartableServer) -> str:
    """The manifest of the rights that `--kubernetes` needs. Raises BadInput without one."""
    from ridgeline.optimize.drivers.kubernetes.rights import rights_manifest

    if server.kubernetes is None:
        raise BadInput("--rbac needs --kubernetes NAMESPACE/NAME")
    return rights_manifest(server.kubernetes, on_copy=is_copied(server.url))


def _cache(server: RestartableServer, command: str) -> CompileCache | None:
    """The cache of compiled kernels that the user names, of the server that a command starts."""
    if server.compile_cache in (None, NONE):
        return None
    flags = server_flags_for(command, server.server)
    return CompileCache(str(server.compile_cache), flags.compile_cache)


def _compiles(server: RestartableServer, command: str) -> bool:
    """Whether the server loses minutes with its kernels, and the user did not ask to lose them."""
    variables = server_flags_for(command, server.server).compile_cache
    return server.compile_cache is None and CompileCache("", variables).is_worthwhile


def _keep_compiled(
    server: RestartableServer, control: DockerContainer, command: str, report: Report
) -> None:
    """Give the containers that are tried the cache that the user names, or a volume."""
    cache = _cache(server, command)
    if cache is None and _compiles(server, command) and not control.keeps_its_kernels:
        variables = server_flags_for(command, server.server).compile_cache
        cache = CompileCache(volume_for(str(server.docker)), variables)
        report(
            f"compiled kernels are kept from trial to trial in the volume {cache.volume}, which "
            "stays; --compile-cache none loses them"
        )
    if cache is not None:
        control.keep_compiled(cache)


def _cache_variables(server: RestartableServer, command: str) -> dict[str, str]:
    cache = _cache(server, command)
    return {} if cache is None else cache.environment(str(cache.folder()), os.environ)


def is_copied(url: str) -> bool:
    """Whether an address asks for a copy of a Deployment: `{service}` or `{port}`."""
    return "{service}" in url or "{port}" in url


def read_server(
    server: RestartableServer, folder: Path, report: Report
) -> tuple[ServerCommand, Driver | None]:
    """The command line of a server that is only measured, and what would apply changes of it.

    Without `--server-cmd` or a place to read it from, the server's defaults are assumed. Raises
    BadInput.
    """
    if server.kubernetes or server.docker or server.ray or server.apply_cmd:
        return open_driver(server, folder, report)
    if server.restart_cmd is not None or server.slurm is not None:
        raise BadInput(
            "--advise measures a server that runs: it starts none",
            fix="--server-cmd with the command line that it runs with",
        )
    if server.server_cmd is not None:
        return _command(server, f"{server.server_cmd} {{flags}}"), None
    if server.server is None:
        raise BadInput(
            "--advise needs to know the server's flags",
            fix="--server-cmd 'vllm serve MODEL …', or --server vllm for its defaults",
        )
    program = load_server_flags()[server.server].programs[0]
    return _command(server, f"{program} {{flags}}"), None


def _command(server: RestartableServer, command: str) -> ServerCommand:
    return ServerCommand(
        url=server.url,
        command=spell_out(command, server.server),
        start_timeout_s=server.start_timeout_s,
    )


def _control(server: RestartableServer, folder: Path) -> ServerControl:
    if server.docker is not None:
        return DockerContainer(server.docker)
    if server.kubernetes is not None:
        from ridgeline.optimize.drivers.kubernetes.workload import KubernetesWorkload

        return KubernetesWorkload(server.kubernetes)
    if server.ray is not None:
        from ridgeline.optimize.drivers.ray_serve import RayApplication

        return RayApplication(server.ray, folder)
    if server.apply_cmd is None:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in WAYS_TO_APPLY)
        raise BadInput("--url needs a way of applying a configuration", limit=flags)
    from ridgeline.optimize.drivers.apply_command import ApplyCommand

    if server.server_cmd is None:
        raise BadInput(
            "--apply-cmd needs the command line that the server runs with now",
            fix="--server-cmd 'vllm serve MODEL --max-num-seqs 64'",
        )
    return ApplyCommand(
        server.apply_cmd, server.server_cmd, server.url, server.start_timeout_s, folder
    )
