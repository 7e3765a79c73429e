"""Deployment files: their commands are accepted, names match, and the platforms' schemas hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from msgspec.structs import replace

from ridgeline.cli.app import app
from ridgeline.cli.main import main
from ridgeline.config.commands import COMMANDS
from ridgeline.config.option import Option, options_of
from ridgeline.errors import BadInput
from ridgeline.fleet.page.view import FleetView
from ridgeline.fleet.ray.fleet_file import read_fleet_file
from ridgeline.operate.deploy import PLATFORMS, Platform, render_deployment
from ridgeline.operate.deploy.plan import DeploymentPlan

PLAN = DeploymentPlan(
    model="demo", image="ridgeline:1", num_replicas=3, slo_classes="chat=ttft:500"
)
VLLM = DeploymentPlan(
    model="owner/model",
    server="vllm",
    image="vllm:1",
    num_replicas=2,
    num_gpus=2,
    cpus=16,
    memory_gib=64,
    arguments=("--max-num-seqs", "64", "--enforce-eager"),
)
SCALED = replace(PLAN, max_replicas=8, cache_gib=20, namespace="llm")
PLANS = pytest.mark.parametrize("plan", [PLAN, VLLM], ids=["ridgeline", "vllm"])
ON_KUBERNETES = pytest.mark.parametrize(
    "plan", [PLAN, VLLM, SCALED], ids=["ridgeline", "vllm", "scaled"]
)


def objects(plan: DeploymentPlan = PLAN) -> list[Any]:
    texts = render_deployment("kustomize", plan)
    return [o for name, text in texts.items() if name != "kustomization.yaml"
            for o in yaml.safe_load_all(text)]  # fmt: skip


def options(command: str) -> list[Option]:
    return [o for section in COMMANDS[command].sections for o in options_of(section).values()]


def parse_json(texts: dict[str, str]) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in texts.items() if name.endswith(".json")}


def test_every_platform_is_an_option() -> None:
    known = next(o for o in options("deploy") if o.name == "platform")
    assert {*known.choices} == {*get_args(Platform)} == {*PLATFORMS}


def test_compose_starts_every_server_and_routes_to_it() -> None:
    compose = yaml.safe_load(render_deployment("compose", PLAN)["compose.yaml"])
    servers = [name for name in compose["services"] if name.startswith("server-")]
    assert len(servers) == 3
    command = compose["services"]["gateway"]["command"]
    assert [f"http://{name}:8000" in command for name in servers] == [True] * 3
    assert all("RIDGELINE_API_KEY" in s["environment"] for s in compose["services"].values())


def test_compose_gives_every_server_gpus_of_its_own() -> None:
    compose = yaml.safe_load(render_deployment("compose", VLLM)["compose.yaml"])
    reserved = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in compose["services"].items()
        if name.startswith("server-")
    ]
    assert reserved == [["0", "1"], ["2", "3"]]
    server = compose["services"]["server-1"]
    assert server["entrypoint"] == ["vllm", "serve"]
    assert server["command"][:1] == ["owner/model"]
    assert server["command"][-5:] == [
        *("--tensor-parallel-size", "2"),
        *VLLM.arguments,
    ]
    assert "VLLM_API_KEY" in server["environment"]


def test_kustomization_lists_its_files_and_selectors_match() -> None:
    texts = render_deployment("kustomize", PLAN)
    assert {*yaml.safe_load(texts["kustomization.yaml"])["resources"]} == {*texts} - {
        "kustomization.yaml"
    }
    for item in objects():
        spec = item["spec"]
        if item["kind"] in ("StatefulSet", "Deployment"):
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    by_kind = {(o["kind"], o["metadata"]["name"]): o for o in objects()}
    servers = by_kind["StatefulSet", "ridgeline-server"]
    assert ("Service", servers["spec"]["serviceName"]) in by_kind
    gateway = by_kind["Deployment", "ridgeline-gateway"]
    arguments = gateway["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "http://ridgeline-server-2.ridgeline-server:8000" in arguments
    grace_s = servers["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    server_arguments = servers["spec"]["template"]["spec"]["containers"][0]["args"]
    assert grace_s > int(server_arguments[server_arguments.index("--shutdown-timeout-s") + 1])


def by_name(plan: DeploymentPlan) -> dict[tuple[str, str], Any]:
    return {(o["kind"], o["metadata"]["name"]): o for o in objects(plan)}


@ON_KUBERNETES
def test_pods_may_drain_before_they_are_killed(plan: DeploymentPlan) -> None:
    for kind, name, flag in (
        ("StatefulSet", "server", "--shutdown-timeout" + "-s" * (plan.server == "ridgeline")),
        ("Deployment", "gateway", "--shutdown-timeout-s"),
    ):
        pod = by_name(plan)[kind, f"ridgeline-{name}"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        drain_s = int(container["args"][container["args"].index(flag) + 1])
        hook = container.get("lifecycle", {"preStop": {"exec": {"command": ["sleep", "0"]}}})
        leave_s = int(hook["preStop"]["exec"]["command"][1])
        assert leave_s + drain_s < pod["terminationGracePeriodSeconds"]


def test_given_drain_of_vllm_is_kept() -> None:
    plan = replace(VLLM, arguments=("--shutdown-timeout=5",))
    assert [word for word in plan.server_arguments if "shutdown" in word] == [*plan.arguments]


def test_number_of_servers_follows_the_load() -> None:
    scaled = by_name(SCALED)
    servers = scaled["StatefulSet", "ridgeline-server"]["spec"]
    assert "replicas" not in servers  # an update would undo what the autoscaler has decided
    (claim,) = servers["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert [v["name"] for v in servers["template"]["spec"]["volumes"]] == ["shm"]
    gateway = scaled["Deployment", "ridgeline-gateway"]["spec"]["template"]["spec"]
    arguments = gateway["containers"][0]["args"]
    assert "--backend" not in arguments
    assert arguments[arguments.index("--backend-dns") + 1] == "http://ridgeline-server:8000"
    spec = scaled["ScaledObject", "ridgeline-server"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (3, 8)
    (trigger,) = spec["triggers"]
    service = scaled["Service", "ridgeline-gateway"]
    assert trigger["metadata"]["url"].startswith(f"http://{service['metadata']['name']}.llm.svc/")
    assert trigger["metadata"]["valueLocation"] in FleetView.__struct_fields__
    access = scaled["TriggerAuthentication", trigger["authenticationRef"]["name"]]["spec"]
    assert access["secretTargetRef"][0]["name"] == "ridgeline-key"
    kustomization = render_deployment("kustomize", SCALED)["kustomization.yaml"]
    assert yaml.safe_load(kustomization)["namespace"] == "llm"


def test_autoscaler_fits_the_models_of_keda() -> None:
    keda = pytest.importorskip("cloudcoil.models.keda.v1alpha1", reason="make deploy-tools")
    for item in objects(SCALED):
        if item["apiVersion"].startswith("keda.sh"):
            model = getattr(keda, item["kind"]).model_validate(item)
            kept = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
            assert kept == item  # an unknown field would be left out


@pytest.mark.parametrize("platform", ["compose", "ecs", "kuberay"])
def test_what_only_kubernetes_has_is_refused_elsewhere(platform: Platform) -> None:
    with pytest.raises(BadInput, match="--max-replicas is for kustomize and helm alone"):
        render_deployment(platform, SCALED)
    with pytest.raises(BadInput, match="--namespace is for kustomize alone"):
        render_deployment("helm", SCALED)
    with pytest.raises(BadInput, match="not above --replicas"):
        replace(PLAN, max_replicas=3)


def test_arguments_are_those_of_the_commands() -> None:
    for words in (PLAN.server_arguments, PLAN.route_arguments(["http://a:1"])):
        command = app.commands[words[0]]
        command.make_context(words[0], words[1:], resilient_parsing=False)


@pytest.mark.parametrize("version", ["1.30", "1.36"])
@ON_KUBERNETES
def test_objects_fit_kubernetes_schemas(plan: DeploymentPlan, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for item in objects(plan):
        if item["apiVersion"].startswith("keda.sh"):
            continue
        validate.validate(item, version, strict=True)
    misspelt = objects(plan)[0]
    misspelt["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(validate.ValidationError):
        validate.validate(misspelt, version, strict=True)


def test_kubectl_builds_the_kustomization(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not here")
    assert main(["deploy", "--for", "kustomize", "--model", "demo", "--out", str(tmp_path)]) == 0
    command = [kubectl, "kustomize", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "kind: StatefulSet" in result.stdout, result.stderr


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def helm_template(chart: Path, values: dict[str, Any]) -> list[Any]:
    """The objects of a chart, installed as `ridgeline`, by `helm` or by its SDK for Python."""
    if helm := shutil.which("helm"):
        path = chart.parent / "values.yaml"
        path.write_text(yaml.safe_dump(values))
        for command in (["lint", "--strict"], ["template", "ridgeline"]):
            words = [helm, *command, str(chart), "--values", str(path)]
            result = subprocess.run(words, capture_output=True, text=True, check=True)
        text = result.stdout
    else:
        sdk = pytest.importorskip("helm_python", reason="no Helm: make deploy-tools")
        assert not sdk.lint(str(chart), values, strict=True)["errors"]
        files = sdk.Chart.load(str(chart)).render(values, name="ridgeline")
        text = "---\n".join(text for name, text in files.items() if name.endswith(".yaml"))
    return [item for item in yaml.safe_load_all(text) if item]


@ON_KUBERNETES
def test_chart_renders_the_objects_of_kustomize(plan: DeploymentPlan, tmp_path: Path) -> None:
    plan = replace(plan, namespace=None)
    write(tmp_path, render_deployment("helm", plan))
    rendered = helm_template(tmp_path / "ridgeline", {})
    expected = {(o["kind"], o["metadata"]["name"]): o for o in objects(plan)}
    assert {(o["kind"], o["metadata"]["name"]): o for o in rendered} == expected


def test_chart_takes_values(tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    write(tmp_path, render_deployment("helm", PLAN))
    values = {"replicas": 5, "arguments": ["--max-num-seqs", "8"], "sloClasses": ""}
    rendered = helm_template(tmp_path / "ridgeline", {**values, "keySecret": "mine"})
    for item in rendered:
        validate.validate(item, "1.36", strict=True)
    specs = {item["kind"]: item["spec"] for item in rendered}
    server, gateway = specs["StatefulSet"], specs["Deployment"]
    container = server["template"]["spec"]["containers"][0]
    assert server["replicas"] == 5 and container["args"][-2:] == ["--max-num-seqs", "8"]
    assert "--slo-classes" not in container["args"]
    assert container["env"][-1]["valueFrom"]["secretKeyRef"]["name"] == "mine"
    arguments = gateway["template"]["spec"]["containers"][0]["args"]
    assert arguments.count("--backend") == 5


def test_chart_refuses_misspelt_values(tmp_path: Path) -> None:
    write(tmp_path, render_deployment("helm", PLAN))
    assert helm_template(tmp_path / "ridgeline", {})
    with pytest.raises(Exception, match=r"replica|exit status 1"):
        helm_template(tmp_path / "ridgeline", {"replica": 5})


RAY_PLANS = pytest.mark.parametrize(
    ("plan", "kind"), [(PLAN, "RayJob"), (VLLM, "RayService")], ids=["ridgeline", "vllm"]
)


def ray_objects(plan: DeploymentPlan) -> dict[str, Any]:
    (text,) = render_deployment("kuberay", plan).values()
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


@RAY_PLANS
def test_ray_objects_fit_the_schemas_of_kuberay(plan: DeploymentPlan, kind: str) -> None:
    """Those of its CRDs at feeaf72facab, without pods, descriptions and status; no other field."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parent / "kuberay_crds.json").read_text())[kind]
    item = ray_objects(plan)[kind]
    jsonschema.validate(item, schema)
    cluster = next(v for v in item["spec"].values() if isinstance(v, dict))
    cluster["workerGroupSpecs"][0]["replica"] = 2
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(item, schema)


@RAY_PLANS
def test_ray_pods_fit_kubernetes_schemas(plan: DeploymentPlan, kind: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    items = ray_objects(plan)
    cluster = next(v for v in items.pop(kind)["spec"].values() if isinstance(v, dict))
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = {"metadata": {}, **group["template"]}
        template["metadata"] = {"name": "x", **template["metadata"]}
        validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, "1.36", strict=True)
    for item in items.values():
        validate.validate(item, "1.36", strict=True)


def test_ray_job_starts_the_fleet_of_its_file(tmp_path: Path) -> None:
    items = ray_objects(PLAN)
    ((name, text),) = items["ConfigMap"]["data"].items()
    (tmp_path / name).write_text(text)
    fleet = read_fleet_file(tmp_path / name)
    (model,) = fleet.models
    assert (model.model, model.replicas, model.cpus) == ("demo", 3, 4)
    assert items["RayJob"]["spec"]["entrypoint"].endswith(f"/{name}")
    head = items["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    selector = items["Service"]["spec"]["selector"]
    assert selector.items() <= head["metadata"]["labels"].items()
    assert items["Service"]["spec"]["ports"][0]["targetPort"] == fleet.port


def test_ray_service_names_the_options_of_the_engine() -> None:
    service = ray_objects(VLLM)["RayService"]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    assert llm["engine_kwargs"] == {
        "tensor_parallel_size": 2,
        "max_num_seqs": 64,
        "enforce_eager": True,
    }


def check_aws(service: str, operation: str, parameters: dict[str, Any]) -> None:
    """The parameters fit the model of the service that the AWS CLI has, too."""
    session = pytest.importorskip("botocore.session")
    validate = pytest.importorskip("botocore.validate")
    shape = session.get_session().get_service_model(service).operation_model(operation).input_shape
    report = validate.ParamValidator().validate(parameters, shape)
    assert not report.has_errors(), report.generate_report()


@PLANS
def test_ecs_inputs_fit_the_service_model(plan: DeploymentPlan) -> None:
    texts = parse_json(render_deployment("ecs", plan))
    for name, parameters in texts.items():
        is_task = name.endswith("-task.json")
        check_aws("ecs", "RegisterTaskDefinition" if is_task else "CreateService", parameters)
    with pytest.raises(AssertionError, match="Unknown parameter"):
        check_aws("ecs", "CreateService", {**texts["gateway.json"], "desiredCounts": 1})
    families = {value["family"] for value in texts.values() if "family" in value}
    services = {name: value for name, value in texts.items() if "serviceName" in value}
    assert {value["taskDefinition"] for value in services.values()} == families
    aliases = {
        alias["dnsName"]
        for value in services.values()
        for service in value["serviceConnectConfiguration"].get("services", ())
        for alias in service["clientAliases"]
    }
    command = texts["gateway-task.json"]["containerDefinitions"][0]["command"]
    backends = [command[i + 1] for i, word in enumerate(command) if word == "--backend"]
    assert backends == [f"http://{name}:8000" for name in sorted(aliases)]


@pytest.mark.parametrize(
    ("cpus", "memory_gib", "size"),
    [(1, 1, (1024, 2)), (3, 9, (4096, 9)), (4, 40, (8192, 40)), (8, 17, (8192, 20))],
)
def test_ecs_task_has_a_size_of_fargate(cpus: int, memory_gib: int, size: tuple[int, int]) -> None:
    plan = DeploymentPlan(model="demo", cpus=cpus, memory_gib=memory_gib)
    task = parse_json(render_deployment("ecs", plan))["server-task.json"]
    assert (int(task["cpu"]), int(task["memory"]) // 1024) == size


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(BadInput, match="Fargate has no task of this size"):
        render_deployment("ecs", DeploymentPlan(model="demo", cpus=64))
    for platform in ("sagemaker", "kuberay"):
        with pytest.raises(BadInput, match="needs --image"):
            render_deployment(platform, DeploymentPlan(model="demo"))  # type: ignore[arg-type]
    for field in ({"name": "$(reboot)"}, {"image": "a b"}, {"gateway_image": "a\nRUN x"}):
        with pytest.raises(BadInput):
            DeploymentPlan(model="demo", **field)
    plan = DeploymentPlan(model="demo", image="x", arguments=("8",))
    with pytest.raises(BadInput, match="belongs to none"):
        render_deployment("sagemaker", plan)


@PLANS
def test_sagemaker_inputs_fit_the_service_model(plan: DeploymentPlan) -> None:
    texts = parse_json(render_deployment("sagemaker", plan))
    check_aws("sagemaker", "CreateModel", texts["model.json"])
    check_aws("sagemaker", "CreateEndpointConfig", texts["endpoint-config.json"])
    check_aws("sagemaker", "CreateEndpoint", texts["endpoint.json"])


def test_sagemaker_environment_holds_options_of_serve() -> None:
    arguments = ("--max-num-seqs=8", "--log-requests", "--dtype", "bfloat16")
    plan = DeploymentPlan(model="demo", image="x", slo_classes="a=ttft:1", arguments=arguments)
    container = parse_json(render_deployment("sagemaker", plan))["model.json"]["PrimaryContainer"]
    environment = container["Environment"]
    assert environment.keys() <= {option.env for option in options("serve")}
    assert environment["RIDGELINE_MAX_NUM_SEQS"] == "8"
    assert environment["RIDGELINE_LOG_REQUESTS"] == "true"
    vllm = parse_json(render_deployment("sagemaker", VLLM))["model.json"]["PrimaryContainer"]
    assert vllm["Environment"] == {
        "SM_VLLM_MODEL": "owner/model",
        "SM_VLLM_MAX_NUM_SEQS": "64",
        "SM_VLLM_ENFORCE_EAGER": "true",
    }


FAKE_DOCKER = """#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS"
case "$1 $2" in
  "inspect --format") echo healthy ;;
  "inspect "*|"network inspect") exit 1 ;;
esac
"""


@PLANS
def test_docker_script_starts_every_server_and_the_gateway(
    plan: DeploymentPlan, tmp_path: Path
) -> None:
    write(tmp_path, {**render_deployment("docker", plan), "bin/docker": FAKE_DOCKER})
    (tmp_path / "bin/docker").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "RIDGELINE_API_KEY": "a key",
    }
    script = ["sh", str(tmp_path / "run.sh")]
    subprocess.run(script, env=environment, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    runs = [call for call in calls if call.startswith("run ")]
    names = [f"ridgeline-server-{i + 1}" for i in range(plan.num_replicas)]
    assert [call.split("--name ")[1].split()[0] for call in runs] == [*names, "ridgeline-gateway"]
    assert f"{plan.profile.key_variable}=a key" in runs[0]
    assert all(f"--backend http://{name}:8000" in runs[-1] for name in names)
    if plan.gpus:
        assert '--gpus "device=2,3"' in runs[1]
    del environment["RIDGELINE_API_KEY"]
    refused = subprocess.run(script, env=environment, check=False, capture_output=True, text=True)
    assert refused.returncode != 0 and "set a key" in refused.stderr


@PLANS
def test_scripts_are_shell(plan: DeploymentPlan, tmp_path: Path) -> None:
    for platform in ("docker", "ecs", "sagemaker"):
        text = render_deployment(platform, plan)  # type: ignore[arg-type]
        script = text.get("deploy.sh") or text["run.sh"]
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)


def dockerfiles() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {
        "repository": (root / "Dockerfile").read_text(),
        "ridgeline": render_deployment("docker", PLAN)["Dockerfile"],
        "vllm": render_deployment("docker", VLLM)["Dockerfile"],
    }


@pytest.mark.parametrize("name", ["repository", "ridgeline", "vllm"])
def test_dockerfiles_pass_hadolint(name: str) -> None:
    hadolint = shutil.which("hadolint") or pytest.skip("no hadolint: make deploy-tools")
    command = [hadolint, "-"]
    result = subprocess.run(
        command, input=dockerfiles()[name], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_repository_image_is_small_and_without_root() -> None:
    lines = dockerfiles()["repository"].splitlines()
    final = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM")) :]
    assert "USER 10001:10001" in final
    assert not any("apt-get" in line or "COPY ridgeline" in line for line in final)
    assert any(line.startswith("HEALTHCHECK") for line in final)
    (base,) = [line for line in lines if line.startswith("ARG PYTHON_IMAGE=")]
    version = base.split(":")[1].split("-")[0]
    assert version.count(".") == 2  # a release, not a moving tag
    root = Path(__file__).parents[2]
    ignored = (root / ".dockerignore").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY ") and "--from" not in line
              for word in line.split()[1:-1]}  # fmt: skip
    assert ignored[0] == "*" and copied == {line[1:] for line in ignored if line[0] == "!"}
    assert all((root / name).exists() for name in copied)
