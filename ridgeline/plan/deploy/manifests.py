"""Renders a plan as a Kubernetes Deployment, a Ray Serve configuration and a KubeRay RayService.

The manifests contain the plan (number of replicas, device by node selector and device plugin
resource, vLLM flags) and what a cluster needs in addition: a pinned image, probes with a timeout
that follows from the size of the weights, space in /dev/shm for tensor parallel ranks, disk for the
weights, tolerations for the taints of accelerator nodes, and a disruption budget. CPU cores and
host memory are not part of a plan; the values are starting points to be measured.

Manifests are built as text rather than as a tree, so that comments survive and users can edit them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from textwrap import indent
from types import MappingProxyType

import msgspec

from ridgeline.plan.deploy.clusters import DeploymentTarget
from ridgeline.plan.deploy.launch import (
    CannotLaunch,
    LaunchCommand,
    LaunchPlan,
    sglang_command,
    trtllm_command,
    vllm_command,
)
from ridgeline.plan.step_time.parallel_layout import NODE_DEVICES

GIB = 1 << 30
DOWNLOAD_BYTES_S = 100e6  # conservative download rate from the hub, for the startup probe
CPUS, CPUS_PER_DEVICE = 4, 2
HOST_GIB, HOST_GIB_PER_DEVICE = 16, 16
SHM_GIB_PER_DEVICE = 1
DRAIN_S = 15  # until load balancers have removed a terminating pod
GRACE_S = 120


class Manifests(msgspec.Struct, frozen=True, kw_only=True):
    """`files`: name → text. `left_out`: name → why the file was not written."""

    files: dict[str, str]
    left_out: dict[str, str]


class FleetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the manifests. `weight_bytes`: size of the model's files as downloaded;
    `summary`: the demand and SLO, for the comment at the top. `whole_command`: the image's entry
    point is not the server, so that the pod names the whole command."""

    start: LaunchPlan
    place: DeploymentTarget
    command: LaunchCommand
    weight_bytes: float
    summary: str
    whole_command: bool = False

    @property
    def name(self) -> str:
        """A DNS label derived from the model's name."""
        words = re.sub(r"[^a-z0-9]+", "-", self.start.folder.lower()).strip("-")
        return words[:50].strip("-") or "llm"

    @property
    def devices(self) -> int:
        """Devices of one pod: those of the whole replica, or of one of its nodes."""
        return min(self.start.candidate.layout.num_devices, NODE_DEVICES)

    @property
    def cache_gib(self) -> int:
        """Disk for the weights, with a margin of 20 %."""
        return max(1, math.ceil(1.2 * self.weight_bytes / GIB))

    @property
    def shm_gib(self) -> int:
        return SHM_GIB_PER_DEVICE * self.devices

    @property
    def startup_s(self) -> int:
        """Startup timeout: ten minutes for the engine, plus the download of the weights."""
        return 600 + math.ceil(self.weight_bytes / DOWNLOAD_BYTES_S / 60) * 60


def render_manifests(
    start: LaunchPlan, place: DeploymentTarget, weight_bytes: float, summary: str
) -> Manifests:
    """Render every manifest that the plan supports; the others are listed with the reason."""
    files, left_out = {}, {}
    for name, write in _WRITERS.items():
        try:
            files[name] = write(
                FleetManifest(
                    start=start,
                    place=place,
                    command=_COMMANDS.get(name, vllm_command)(start),
                    weight_bytes=weight_bytes,
                    summary=summary,
                )
            )
        except CannotLaunch as reason:
            left_out[name] = str(reason)
    return Manifests(files=files, left_out=left_out)


# ---- Kubernetes --------------------------------------------------------------------------------


def render_kubernetes(fleet: FleetManifest) -> str:
    """A Deployment with its Service and PodDisruptionBudget."""
    candidate = fleet.start.candidate
    if candidate.layout.num_devices > NODE_DEVICES:
        raise CannotLaunch(
            f"a replica needs {candidate.layout.num_devices} devices on several nodes, but a pod "
            "of a Deployment runs on one node: use the RayService, or a LeaderWorkerSet"
        )
    return f"""{_head(fleet)}apiVersion: apps/v1
kind: Deployment
metadata:
  name: {fleet.name}
  labels: {{{_labels(fleet)}}}
spec:
  replicas: {candidate.num_replicas}
{_strategy(candidate.num_replicas)}  selector:
    matchLabels: {{app.kubernetes.io/name: {fleet.name}}}
  template:
    metadata:
      labels: {{{_labels(fleet)}}}
      annotations: {{prometheus.io/scrape: "true", prometheus.io/port: "8000"}}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false  # vLLM would read VLLM_* variables of Services as settings
      terminationGracePeriodSeconds: {GRACE_S}
{indent(_where(fleet), "      ")}      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: topology.kubernetes.io/zone
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{app.kubernetes.io/name: {fleet.name}}}
      containers:
{indent(_container(fleet), "        ")}{indent(_volumes(fleet), "      ")}---
{_service(fleet)}---
{_budget(fleet)}"""


def _head(fleet: FleetManifest) -> str:
    """Comment lines: the plan, and the commands to run first."""
    candidate = fleet.start.candidate
    lines = [
        f"# {candidate.num_replicas} x {candidate.device} {candidate.layout}, "
        f"{candidate.weight_dtype} weights, {candidate.kv_dtype} KV: {fleet.summary}"
    ]
    lines += [f"# first: {line.removeprefix('# ')}" for line in fleet.command.first]
    if fleet.command.first or not fleet.start.on_hub:
        model = _model(fleet.command)
        lines.append(f"# and mount {model} into the pods: it is not on the hub")
    return "".join(f"{line}\n" for line in lines)


def _model(command: LaunchCommand) -> str:
    """The model that a server's command names."""
    words = command.words
    if "--model-path" in words:
        return words[words.index("--model-path") + 1]
    return words[1] if words[0] == "trtllm-serve" else words[2]


def render_sglang(fleet: FleetManifest) -> str:
    """The Deployment with SGLang."""
    return _render_other(fleet, fleet.place.sglang_image, "SGLang")


def render_trtllm(fleet: FleetManifest) -> str:
    """The Deployment with TensorRT-LLM."""
    return _render_other(fleet, fleet.place.trtllm_image, "TensorRT-LLM")


def _render_other(fleet: FleetManifest, image: str | None, engine: str) -> str:
    if image is None:
        raise CannotLaunch(f"no {engine} image is known for {fleet.start.device.vendor} devices")
    words = [*fleet.command.words, "--host", "0.0.0.0", "--port", "8000"]
    return render_kubernetes(
        msgspec.structs.replace(
            fleet,
            place=msgspec.structs.replace(fleet.place, image=image),
            command=msgspec.structs.replace(fleet.command, words=words),
            whole_command=True,
        )
    )


def _labels(fleet: FleetManifest) -> str:
    return f"app.kubernetes.io/name: {fleet.name}, app.kubernetes.io/component: engine"


def _strategy(num_replicas: int) -> str:
    # Spare devices are rare, so rollouts replace replicas in place; a single replica must surge.
    surge, unavailable = (1, 0) if num_replicas == 1 else (0, 1)
    why = "needs spare devices during a rollout" if surge else "in place, without spare devices"
    return (
        "  strategy:\n    type: RollingUpdate\n"
        f"    rollingUpdate: {{maxSurge: {surge}, maxUnavailable: {unavailable}}}  # {why}\n"
    )


def _where(fleet: FleetManifest) -> str:
    place = fleet.place
    return (
        f"nodeSelector:\n  {place.label}: {place.value}\n"
        "tolerations:\n"
        f"  - {{key: {place.resource}, operator: Exists, effect: NoSchedule}}\n"
    )


def _container(fleet: FleetManifest) -> str:
    chosen = fleet.command.words[0 if fleet.whole_command else 2 :]
    words = "".join(f'    - "{word}"\n' for word in chosen)
    candidate = fleet.start.candidate
    return f"""- name: engine  # one replica on {candidate.layout.num_devices} x {candidate.device}
  image: {fleet.place.image}
  {"command" if fleet.whole_command else "args"}:
{words}{indent(_environment(), "  ")}  ports:
    - {{name: http, containerPort: 8000}}
  startupProbe:  # downloads and loads the weights: up to {fleet.startup_s // 60} minutes
    httpGet: {{path: /health, port: http}}
    periodSeconds: 10
    failureThreshold: {fleet.startup_s // 10}
  readinessProbe:
    httpGet: {{path: /health, port: http}}
    periodSeconds: 5
  livenessProbe:
    httpGet: {{path: /health, port: http}}
    periodSeconds: 15
    timeoutSeconds: 5
    failureThreshold: 4
  lifecycle:
    preStop:  # requests arrive until the endpoints no longer list this pod
      exec: {{command: ["sleep", "{DRAIN_S}"]}}
{indent(_resources(fleet), "  ")}  securityContext:
    allowPrivilegeEscalation: false
    capabilities: {{drop: [ALL]}}
    seccompProfile: {{type: RuntimeDefault}}
{indent(_mounts(), "  ")}"""


def _environment() -> str:
    return """env:
  - name: HF_TOKEN  # gated models: kubectl create secret generic hf-token --from-literal=token=…
    valueFrom:
      secretKeyRef: {name: hf-token, key: token, optional: true}
  - {name: HF_HOME, value: /cache}
"""


def _resources(fleet: FleetManifest) -> str:
    cpus = CPUS + CPUS_PER_DEVICE * fleet.devices
    host = HOST_GIB + HOST_GIB_PER_DEVICE * fleet.devices + fleet.shm_gib
    devices = f"{fleet.place.resource}: {fleet.devices}"
    return f"""resources:  # CPU and host memory are starting points: measure and adjust them
  requests:
    cpu: {cpus}
    memory: {host}Gi
    ephemeral-storage: {fleet.cache_gib + 10}Gi
    {devices}
  limits:
    memory: {host}Gi
    {devices}
"""


def _mounts() -> str:
    return """volumeMounts:
  - {name: cache, mountPath: /cache}
  - {name: shm, mountPath: /dev/shm}
"""


def _volumes(fleet: FleetManifest) -> str:
    return f"""volumes:
  - name: cache  # weights; use a PersistentVolumeClaim to keep them across restarts
    emptyDir: {{sizeLimit: {fleet.cache_gib}Gi}}
  - name: shm  # communication between tensor parallel ranks
    emptyDir: {{medium: Memory, sizeLimit: {fleet.shm_gib}Gi}}
"""


def _service(fleet: FleetManifest) -> str:
    return f"""apiVersion: v1
kind: Service
metadata:
  name: {fleet.name}
  labels: {{{_labels(fleet)}}}
spec:
  selector: {{app.kubernetes.io/name: {fleet.name}}}
  ports:
    - {{name: http, port: 80, targetPort: http}}
"""


def _budget(fleet: FleetManifest) -> str:
    # maxUnavailable 1 even for a single replica: otherwise its node could never be drained.
    return f"""apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {fleet.name}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{app.kubernetes.io/name: {fleet.name}}}
"""


# ---- Ray ---------------------------------------------------------------------------------------


def render_ray_serve(fleet: FleetManifest) -> str:
    """A Ray Serve LLM configuration for `serve run` on an existing cluster."""
    return _head(fleet) + _application(fleet)


def _application(fleet: FleetManifest) -> str:
    start = fleet.start
    layout = start.candidate.layout
    if layout.num_attention > 1:
        raise CannotLaunch("Ray Serve needs a separate builder for attention data parallelism")
    arguments = "".join(f"            {k}: {v}\n" for k, v in _engine_arguments(fleet).items())
    return f"""applications:
  - name: llm
    route_prefix: /
    import_path: ray.serve.llm:build_openai_app
    args:
      llm_configs:
        - model_loading_config:
            model_id: {fleet.name}
            model_source: {_model(fleet.command)}
          deployment_config:
            num_replicas: {start.candidate.num_replicas}
            max_ongoing_requests: {2 * start.candidate.max_num_seqs}
          engine_kwargs:
{arguments}"""


def _engine_arguments(fleet: FleetManifest) -> dict[str, object]:
    start, words = fleet.start, fleet.command.words
    layout = start.candidate.layout
    arguments: dict[str, object] = {
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "max_model_len": start.max_model_len,
        "max_num_seqs": start.candidate.max_num_seqs,
        "max_num_batched_tokens": start.candidate.max_num_batched_tokens,
        "gpu_memory_utilization": 0.9,
        **({"enable_expert_parallel": "true"} if layout.ep > 1 else {}),
    }
    for flag in ("--quantization", "--dtype", "--kv-cache-dtype"):
        if flag in words:
            arguments[flag.removeprefix("--").replace("-", "_")] = words[words.index(flag) + 1]
    return arguments


def render_ray_service(fleet: FleetManifest) -> str:
    """A KubeRay RayService: a Ray cluster on the planned devices, and the application on it."""
    image = fleet.place.ray_image
    if image is None:
        vendor = fleet.start.device.vendor
        raise CannotLaunch(f"no Ray image is known for {vendor} devices: use --ray-image")
    candidate = fleet.start.candidate
    nodes = candidate.num_replicas * math.ceil(candidate.layout.num_devices / NODE_DEVICES)
    application = indent(_application(fleet), "    ")
    return f"""{_head(fleet)}apiVersion: ray.io/v1
kind: RayService
metadata:
  name: {fleet.name}
  labels: {{{_labels(fleet)}}}
spec:
  serveConfigV2: |
{application}  rayClusterConfig:
{_ray_version(image)}    headGroupSpec:
      rayStartParams: {{num-cpus: "0", num-gpus: "0"}}
      template:
        spec:
          containers:
            - name: ray-head
              image: {image}
              ports:
                - {{name: gcs, containerPort: 6379}}
                - {{name: dashboard, containerPort: 8265}}
                - {{name: serve, containerPort: 8000}}
              resources:
                requests: {{cpu: 4, memory: 16Gi}}
                limits: {{memory: 16Gi}}
    workerGroupSpecs:
      - groupName: engines  # {nodes} x {fleet.devices} devices
        replicas: {nodes}
        minReplicas: {nodes}
        maxReplicas: {nodes}
        rayStartParams: {{num-gpus: "{fleet.devices}"}}
        template:
          spec:
{indent(_where(fleet), "            ")}            containers:
              - name: ray-worker
                image: {image}
{indent(_environment() + _resources(fleet) + _mounts(), "                ")}\
{indent(_volumes(fleet), "            ")}"""


def _ray_version(image: str) -> str:
    """The `rayVersion` line that KubeRay expects; empty for an image named by digest only."""
    version = re.search(r":(\d+\.\d+\.\d+)", image)
    return f'    rayVersion: "{version[1]}"\n' if version else ""


_COMMANDS: Mapping[str, Callable[[LaunchPlan], LaunchCommand]] = MappingProxyType(
    {
        "kubernetes-sglang.yaml": sglang_command,
        "kubernetes-tensorrt-llm.yaml": trtllm_command,
    }
)
_WRITERS: Mapping[str, Callable[[FleetManifest], str]] = MappingProxyType(
    {
        "kubernetes.yaml": render_kubernetes,
        "kubernetes-sglang.yaml": render_sglang,
        "kubernetes-tensorrt-llm.yaml": render_trtllm,
        "ray-serve.yaml": render_ray_serve,
        "ray-service.yaml": render_ray_service,
    }
)
