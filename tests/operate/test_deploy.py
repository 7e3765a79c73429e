"""Deployment files: their commands are accepted, names match, and Kubernetes' schemas hold."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridgeline.cli.main import main
from ridgeline.operate.deploy import DeploymentPlan, render_deployment

PLAN = DeploymentPlan(
    model="demo", image="ridgeline:1", num_replicas=3, slo_classes="chat=ttft:500"
)


def objects() -> list[Any]:
    texts = render_deployment("kustomize", PLAN)
    return [o for name, text in texts.items() if name != "kustomization.yaml"
            for o in yaml.safe_load_all(text)]  # fmt: skip


def test_compose_starts_every_server_and_routes_to_it() -> None:
    compose = yaml.safe_load(render_deployment("compose", PLAN)["compose.yaml"])
    servers = [name for name in compose["services"] if name.startswith("server-")]
    assert len(servers) == 3
    command = compose["services"]["gateway"]["command"]
    assert [f"http://{name}:8000" in command for name in servers] == [True] * 3
    assert all("RIDGELINE_API_KEY" in s["environment"] for s in compose["services"].values())


def test_kustomization_lists_its_files_and_selectors_match() -> None:
    texts = render_deployment("kustomize", PLAN)
    assert {*yaml.safe_load(texts["kustomization.yaml"])["resources"]} == {*texts} - {
        "kustomization.yaml"
    }
    for found in objects():
        spec = found["spec"]
        if found["kind"] in ("StatefulSet", "Deployment"):
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


@pytest.mark.parametrize("platform", ["compose", "kustomize"])
def test_arguments_are_those_of_the_commands(platform: Any) -> None:
    from ridgeline.cli.app import app

    for words in (PLAN.serve_arguments, PLAN.route_arguments(["http://a:1"])):
        command = app.commands[words[0]]
        command.make_context(words[0], words[1:], resilient_parsing=False)
    assert render_deployment(platform, PLAN)


def test_objects_fit_kubernetes_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for found in objects():
        validate.validate(found, "1.30", strict=True)


def test_kubectl_builds_the_kustomization(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not here")
    assert main(["deploy", "kustomize", "--model", "demo", "--out", str(tmp_path)]) == 0
    command = [kubectl, "kustomize", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "kind: StatefulSet" in result.stdout, result.stderr
