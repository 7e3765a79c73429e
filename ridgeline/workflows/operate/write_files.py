"""Write alert rules, dashboards or a deployment into a folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from ridgeline.config.server import parse_slo_classes
from ridgeline.config.tools import DeployOptions, OperateOptions
from ridgeline.errors import BadInput
from ridgeline.operate.dashboard import build_dashboard
from ridgeline.operate.deploy import render_deployment
from ridgeline.operate.deploy.plan import DeploymentPlan
from ridgeline.operate.rule_tests import build_rule_tests
from ridgeline.operate.rules import build_rules
from ridgeline.operate.yaml_text import to_yaml


def write_operation_files(options: OperateOptions) -> list[Path]:
    """The files that were written. Raises BadInput."""
    classes, server = parse_slo_classes(options.slo_classes), options.server
    if options.what == "rules":
        rules = build_rules(server, classes, options.min_requests)
        tests = build_rule_tests(server, rules, classes, "rules.yaml")
        texts = {"rules.yaml": to_yaml(rules), "rules_test.yaml": to_yaml(tests)}
    else:
        dashboard = build_dashboard(server, classes)
        texts = {f"{server}.json": json.dumps(dashboard, indent=2) + "\n"}
    return write_texts(options.out, texts)


def write_deployment(options: DeployOptions) -> list[Path]:
    """The files that were written. Raises BadInput."""
    parse_slo_classes(options.slo_classes)
    plan = DeploymentPlan(
        model=options.model,
        server=options.server,
        image=options.image,
        gateway_image=options.gateway_image,
        name=options.name,
        num_replicas=options.replicas,
        max_replicas=options.max_replicas,
        cache_gib=options.cache_gib,
        namespace=options.namespace,
        cpus=options.cpus,
        memory_gib=options.memory_gib,
        num_gpus=options.gpus,
        instance_type=options.instance_type,
        slo_classes=options.slo_classes,
        arguments=_words(options.serve_args),
    )
    return write_texts(options.out, render_deployment(options.platform, plan))


def _words(flags: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(flags))
    except ValueError as error:
        raise BadInput(f"--serve-args is not a command line: {error}", value=flags) from None


def write_texts(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write files by their names relative to the folder. Raises BadInput."""
    written = []
    for name, text in texts.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if path.suffix == ".sh":
                path.chmod(0o755)
        except OSError as error:
            raise BadInput(
                f"the file cannot be written: {error.strerror}", value=str(path), fix="change --out"
            ) from None
        written.append(path)
    return written
