"""Manifests contain the plan and its devices, with pinned images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ridgeline.errors import BadInput, CannotRun
from ridgeline.plan.deploy.clusters import (
    ManifestOptions,
    cluster_names,
    require_pinned,
    resolve_target,
)
from ridgeline.plan.deploy.launch import LaunchPlan, launch_commands
from ridgeline.plan.deploy.manifests import Manifests, render_manifests
from ridgeline.plan.step_time.parallel_layout import Layout
from tests.plan.test_launch import BEST, CATALOGUE

DIGEST = "repo/engine@sha256:" + "0" * 64


def start(device: str = "h100-sxm", **changes: object) -> LaunchPlan:
    fields = {"layout": Layout(), "weight_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return LaunchPlan(
        candidate=msgspec.structs.replace(BEST, **(fields | changes)),
        device=CATALOGUE[device],
        model="org/My_Model.v2",
        stored="bfloat16",
        max_model_len=4096,
        on_hub=True,
    )


def written(asked: LaunchPlan, **where: Any) -> Manifests:
    return render_manifests(
        asked, resolve_target(asked.device, ManifestOptions(**where)), 140e9, "a summary"
    )


def test_deployment_matches_the_plan() -> None:
    asked = start(weight_dtype="float8_e4m3", kv_dtype="float8_e4m3", layout=Layout(tp=2))
    text = written(asked).files["kubernetes.yaml"]
    deployment, service, budget = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    assert deployment["spec"]["replicas"] == BEST.num_replicas
    assert engine["args"] == launch_commands(asked)["vllm"].split()[2:]
    for amounts in engine["resources"].values():
        assert amounts["nvidia.com/gpu"] == 2
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert [entry["key"] for entry in pod["tolerations"]] == ["nvidia.com/gpu"]
    name = {"app.kubernetes.io/name": "my-model-v2"}
    selected = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert name.items() <= selected and service["spec"]["selector"] == name
    assert budget["spec"]["selector"]["matchLabels"] == name
    assert {entry["name"] for entry in engine["volumeMounts"]} == {
        entry["name"] for entry in pod["volumes"]
    }
    # the startup probe allows for downloading 140 GB
    probe = engine["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > 140e9 / 100e6
    assert {"readinessProbe", "livenessProbe"} <= set(engine)


def test_single_replica_can_be_drained_and_rolled_out() -> None:
    text = written(start(num_replicas=1)).files["kubernetes.yaml"]
    deployment, _, budget = yaml.safe_load_all(text)
    assert budget["spec"]["maxUnavailable"] == 1
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_ray_manifests_match_the_plan() -> None:
    asked = start(weight_dtype="float8_e4m3", kv_dtype="float8_e4m3", layout=Layout(tp=2))
    files = written(asked).files
    (app,) = yaml.safe_load(files["ray-serve.yaml"])["applications"]
    (llm,) = app["args"]["llm_configs"]
    assert llm["model_loading_config"]["model_source"] == "org/My_Model.v2"
    assert llm["deployment_config"]["num_replicas"] == BEST.num_replicas
    assert llm["engine_kwargs"] == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_model_len": 4096,
        "max_num_seqs": BEST.max_num_seqs,
        "max_num_batched_tokens": BEST.max_num_batched_tokens,
        "gpu_memory_utilization": 0.9,
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
    }
    service = yaml.safe_load(files["ray-service.yaml"])
    assert yaml.safe_load(service["spec"]["serveConfigV2"])["applications"] == [app]
    cluster = service["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == BEST.num_replicas
    pod = group["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    (worker,) = pod["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert cluster["rayVersion"] in worker["image"]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_manifests_fit_the_schemas_of_kubernetes_and_kuberay(layout: Layout) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    files = dict(written(start(layout=layout)).files)
    (service,) = yaml.safe_load_all(files.pop("ray-service.yaml"))
    schemas = json.loads((Path(__file__).parents[1] / "operate/kuberay_crds.json").read_text())
    jsonschema.validate(service, schemas["RayService"])
    cluster = service["spec"]["rayClusterConfig"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    del files["ray-serve.yaml"]
    assert len(files) == 3 and len(pods) == 2
    for item in [*pods, *(o for text in files.values() for o in yaml.safe_load_all(text))]:
        validate.validate(item, "1.36", strict=True)


def test_images_are_pinned() -> None:
    for text in written(start()).files.values():
        for line in text.splitlines():
            if line.strip().startswith("image:"):
                require_pinned(line.split("image:")[1].strip())
    chosen = written(start(), image=DIGEST, ray_image="my/ray:2.9.1").files
    assert f"image: {DIGEST}\n" in chosen["kubernetes.yaml"]
    assert "image: my/ray:2.9.1\n" in chosen["ray-service.yaml"]
    assert 'rayVersion: "2.9.1"' in chosen["ray-service.yaml"]
    require_pinned("registry.example:5000/team/vllm:v1.2-cu13")
    for wrong in ("vllm/vllm-openai", "vllm/vllm-openai:latest", "a b:1", "registry:5000/vllm", ""):
        with pytest.raises(BadInput):
            require_pinned(wrong)


@pytest.mark.parametrize(
    ("cluster", "label"),
    [
        ("gke", ("cloud.google.com/gke-accelerator", "nvidia-h100-80gb")),
        ("eks", ("node.kubernetes.io/instance-type", "p5.48xlarge")),
        ("karpenter", ("karpenter.k8s.aws/instance-gpu-name", "h100")),
        ("aks", ("node.kubernetes.io/instance-type", "Standard_ND96isr_H100_v5")),
    ],
)
def test_node_labels_of_cloud_providers(cluster: str, label: tuple[str, str]) -> None:
    found = resolve_target(CATALOGUE["h100-sxm"], ManifestOptions(cluster=cluster))
    assert (found.label, found.value) == label


def test_unknown_labels_and_images_raise() -> None:
    with pytest.raises(CannotRun, match=r"gpu-operator.*--node-label"):
        resolve_target(CATALOGUE["rtx-4090"], ManifestOptions(cluster="gke"))
    with pytest.raises(CannotRun, match="no vLLM image"):
        resolve_target(CATALOGUE["apple-m1-max"], ManifestOptions())
    with pytest.raises(BadInput, match="gke"):
        resolve_target(CATALOGUE["h100-sxm"], ManifestOptions(cluster="gcp"))
    for wrong in ("disk", "disk=", "=ssd", "a b=c", "k=v/w"):
        with pytest.raises(BadInput, match="KEY=VALUE"):
            resolve_target(CATALOGUE["h100-sxm"], ManifestOptions(node_label=wrong))
    found = resolve_target(CATALOGUE["mi325x"], ManifestOptions(node_label="pool=mi325x"))
    assert (found.label, found.value) == ("pool", "mi325x") and "rocm" in found.image


def test_every_label_belongs_to_a_known_device() -> None:
    assert cluster_names()[0] == ManifestOptions().cluster
    from ridgeline.plan.deploy.clusters import _known

    for row in (*_known().cluster, *_known().image):
        assert row.source and row.as_of.startswith("20")
    for row in _known().cluster:
        for device in row.devices:
            assert CATALOGUE[device].vendor == row.vendor


def test_manifests_left_out_have_a_reason() -> None:
    experts = written(start(layout=Layout(tp=2, ep=16), num_devices=16))
    assert not experts.files and "several nodes" in experts.left_out["kubernetes.yaml"]
    assert "data parallelism" in experts.left_out["ray-serve.yaml"]
    wide = written(start(layout=Layout(tp=8, pp=2), num_devices=16))
    (group,) = yaml.safe_load(wide.files["ray-service.yaml"])["spec"]["rayClusterConfig"][
        "workerGroupSpecs"
    ]
    assert group["replicas"] == 2 * BEST.num_replicas and "kubernetes.yaml" in wide.left_out
    amd = written(start("mi300x"))
    others = {"kubernetes-sglang.yaml", "kubernetes-tensorrt-llm.yaml"}
    assert set(amd.left_out) == {"ray-service.yaml", *others}
    assert "vLLM has no int8" in written(start(kv_dtype="int8")).left_out["kubernetes.yaml"]
    made = written(start(weight_dtype="int4")).files["kubernetes.yaml"]
    assert "# first: hf download" in made and next(yaml.safe_load_all(made))


@pytest.mark.parametrize(
    ("name", "engine", "image"),
    [
        ("kubernetes-sglang.yaml", "sglang", "lmsysorg/sglang:v"),
        ("kubernetes-tensorrt-llm.yaml", "tensorrt-llm", "nvcr.io/nvidia/tensorrt-llm/release:"),
    ],
)
def test_other_engines_have_the_deployment_with_their_command(
    name: str, engine: str, image: str
) -> None:
    asked = start(layout=Layout(tp=2))
    deployment, *_ = yaml.safe_load_all(written(asked).files[name])
    (pod,) = deployment["spec"]["template"]["spec"]["containers"]
    words = launch_commands(asked)[engine].split()
    assert pod["command"] == [*words, "--host", "0.0.0.0", "--port", "8000"]
    assert "args" not in pod and pod["image"].startswith(image)
    assert require_pinned(pod["image"]) == pod["image"]
    assert pod["resources"]["limits"]["nvidia.com/gpu"] == 2
