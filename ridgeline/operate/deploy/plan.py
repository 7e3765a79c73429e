"""What to deploy, and how the server and the gateway of a deployment are started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from ridgeline.errors import BadInput

ServerName = Literal["ridgeline", "vllm"]
SERVER_PORT, GATEWAY_PORT = 8000, 8080
DRAIN_S = 60
STOP_S = DRAIN_S + 15  # a platform kills what has not stopped after this time
LEAVE_S = 5  # in which Services and load balancers learn that a gateway is about to stop
CACHE = "/cache"
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_DRAINS = {"ridgeline": "--shutdown-timeout-s", "vllm": "--shutdown-timeout"}
_IMAGE = re.compile(r"[A-Za-z0-9./_:@-]+")
USER = 10001  # of Ridgeline's image


class ServerImage(msgspec.Struct, frozen=True, kw_only=True):
    """What a platform has to know of a server's image.

    `entry_point`: the program, where the image's own entry point differs between releases.
    `ready_path` answers 200 once requests are served; `user` is None for an image that only runs as
    root. `python`: the interpreter, for health checks. `num_gpus`: per replica, unless given.
    """

    default: str
    entry_point: tuple[str, ...]
    key_variable: str
    ready_path: str
    health_path: str
    cache: Mapping[str, str]
    user: int | None
    python: str
    num_gpus: int

    def health_command(self, port: int) -> list[str]:
        """A command that fails while the server does not answer."""
        url = f"http://127.0.0.1:{port}{self.health_path}"
        code = f"import urllib.request as r; r.urlopen('{url}', timeout=4)"
        return [self.python, "-c", code]


SERVER_IMAGES: Mapping[ServerName, ServerImage] = MappingProxyType(
    {
        "ridgeline": ServerImage(
            default="ridgeline:latest",
            entry_point=(),
            key_variable="RIDGELINE_API_KEY",
            ready_path="/ready",
            health_path="/health",
            cache={"RIDGELINE_CACHE": CACHE, "HF_HOME": CACHE},
            user=USER,
            python="python",
            num_gpus=0,
        ),
        "vllm": ServerImage(
            default="vllm/vllm-openai:v0.33.0",
            entry_point=("vllm", "serve"),
            key_variable="VLLM_API_KEY",
            ready_path="/health",
            health_path="/health",
            cache={"HF_HOME": CACHE},
            user=None,
            python="python3",
            num_gpus=1,
        ),
    }
)


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to deploy: `num_replicas` servers and the gateway before them.

    `image`: the server's; None takes a default. `gateway_image`: Ridgeline's. `cpus`, `memory_gib`
    and `num_gpus` are those of one server; `num_gpus` None takes what the server needs.
    `max_replicas`: with it the number of servers follows the load, from `num_replicas` to this;
    `cache_gib`: size of a volume that keeps the models of one server, None for none. `namespace`:
    Kubernetes'. `instance_type`: SageMaker's; `arguments`: further words of the server's command
    line.
    """

    model: str
    server: ServerName = "ridgeline"
    image: str | None = None
    gateway_image: str | None = None
    name: str = "ridgeline"
    num_replicas: int = 2
    cpus: int = 4
    memory_gib: int = 8
    num_gpus: int | None = None
    max_replicas: int | None = None
    cache_gib: int | None = None
    namespace: str | None = None
    instance_type: str | None = None
    slo_classes: str = ""
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadInput(
                "--name is not a DNS label of at most 40 characters",
                value=self.name,
                fix="take lower-case letters, digits and hyphens",
            )
        if self.namespace is not None and not _NAMESPACE.fullmatch(self.namespace):
            raise BadInput("--namespace is not a DNS label", value=self.namespace)
        if self.max_replicas is not None and self.max_replicas <= self.num_replicas:
            raise BadInput(
                "--max-replicas is not above --replicas",
                value=self.max_replicas,
                limit=f"> {self.num_replicas}",
            )
        for image in (self.image, self.gateway_image):
            if image is not None and not _IMAGE.fullmatch(image):
                raise BadInput("the name of an image has a character that none has", value=image)

    @property
    def profile(self) -> ServerImage:
        return SERVER_IMAGES[self.server]

    @property
    def server_image(self) -> str:
        return self.image or self.profile.default

    @property
    def route_image(self) -> str:
        """The gateway's image: Ridgeline's, which may be the server's."""
        own = self.image if self.server == "ridgeline" else None
        return self.gateway_image or own or SERVER_IMAGES["ridgeline"].default

    @property
    def gpus(self) -> int:
        return self.profile.num_gpus if self.num_gpus is None else self.num_gpus

    @property
    def server_arguments(self) -> list[str]:
        """The words after the server's entry point; its key is in the environment."""
        if self.server == "vllm":
            own = ["--host", "0.0.0.0", "--port", str(SERVER_PORT)]
            tensor_parallel = "--tensor-parallel-size"
            is_given = any(word.startswith(tensor_parallel) for word in self.arguments)
            parallel = [tensor_parallel, str(self.gpus)] if self.gpus > 1 and not is_given else []
            return [self.model, *own, *self._drain, *parallel, *self.arguments]
        slo = ["--slo-classes", self.slo_classes] if self.slo_classes else []
        own = ["--host", "0.0.0.0", *self._drain]
        device = ["--device", "cuda"] if self.gpus else []
        return ["serve", self.model, *own, *slo, *device, *self.arguments]

    @property
    def _drain(self) -> list[str]:
        """Without it, vLLM aborts its requests at SIGTERM."""
        flag = _DRAINS[self.server]
        is_given = any(word.split("=")[0] == flag for word in self.arguments)
        return [] if is_given else [flag, str(DRAIN_S)]

    def route_arguments(self, backends: list[str], flag: str = "--backend") -> list[str]:
        """The gateway's command line. Its key is the servers': it passes the client's on."""
        slo = ["--slo-classes", self.slo_classes] if self.slo_classes else []
        flags = [word for url in backends for word in (flag, url)]
        own = ["--host", "0.0.0.0", "--shutdown-timeout-s", str(DRAIN_S)]
        return ["route", *own, *flags, *slo]

    def require_image(self, platform: str, example: str) -> str:
        """The image that was given. Raises BadInput where no default can be right."""
        if self.image is None:
            raise BadInput(
                f"--for {platform} needs --image, because no default fits every registry",
                fix=f"name one, such as {example}",
            )
        return self.image
