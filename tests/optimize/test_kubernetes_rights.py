"""The rights in the cluster that `--kubernetes` needs, as the command prints them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ridgeline.cli.main import main
from ridgeline.errors import BadInput
from ridgeline.optimize.drivers.kubernetes.rights import rights_manifest

EXAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes" / "optimize-rbac.yaml"
CHANGING = {"create", "patch", "delete"}


def test_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimize", "--url", "http://{service}:8000", "--kubernetes", "prod/chat", "--rbac"]
    assert main(words) == 0
    assert capsys.readouterr().out == EXAMPLE.read_text(encoding="utf-8")


@pytest.mark.parametrize("place", ["prod/chat", "prod/statefulset/chat/vllm"])
@pytest.mark.parametrize("on_copy", [True, False])
def test_manifest_holds_the_schemas_and_binds_its_own_role(place: str, on_copy: bool) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    objects = list(yaml.safe_load_all(rights_manifest(place, on_copy=on_copy)))
    for document in objects:
        validate.validate(document, "1.32", strict=True)
    account, role, binding = objects
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    assert {row["metadata"]["namespace"] for row in objects} == {"prod"}


@pytest.mark.parametrize("on_copy", [True, False])
def test_nothing_but_the_server_or_its_copy_can_be_changed(on_copy: bool) -> None:
    _, role, _ = yaml.safe_load_all(rights_manifest("prod/chat", on_copy=on_copy))
    own = ["chat-ridgeline"] if on_copy else ["chat"]
    for rule in role["rules"]:
        if CHANGING & set(rule["verbs"]) and rule["verbs"] != ["create"]:
            assert rule["resourceNames"] == own
    resources = {name for rule in role["rules"] for name in rule["resources"]}
    assert resources <= {"deployments", "services", "pods", "pods/log", "pods/portforward"}


def test_rights_need_a_place_and_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="names no Deployment"):
        rights_manifest("chat", on_copy=True)
    restarted = ["--url", "http://h", "--restart-cmd", "vllm serve m {flags}"]
    assert main(["optimize", *restarted, "--rbac"]) == 2
    assert "--kubernetes" in capsys.readouterr().err
