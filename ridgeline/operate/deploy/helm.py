"""A Helm chart of the objects that kustomize writes, with the plan's values as defaults."""

from __future__ import annotations

import json
from typing import Any

from ridgeline.operate.deploy.kubernetes_objects import (
    EMPTY_CACHE,
    ClusterValues,
    cache_claim,
    server_resources,
)
from ridgeline.operate.deploy.kustomize import manifests
from ridgeline.operate.deploy.plan import SERVER_PORT, DeploymentPlan
from ridgeline.operate.yaml_text import TemplateLines, Unquoted, to_yaml

CHART_VERSION = "0.3.0"
_BACKENDS = TemplateLines(
    "{{- if .Values.maxReplicas }}\n"
    '- "--backend-dns"\n'
    f'- "http://{{{{ .Release.Name }}}}-server:{SERVER_PORT}"\n'
    "{{- else }}\n"
    "{{- range $i := until (int .Values.replicas) }}\n"
    '- "--backend"\n'
    f'- "http://{{{{ $.Release.Name }}}}-server-{{{{ $i }}}}.{{{{ $.Release.Name }}}}-server'
    f':{SERVER_PORT}"\n'
    "{{- end }}\n"
    "{{- end }}"
)
_COUNT = TemplateLines(
    "{{- if not .Values.maxReplicas }}\nreplicas: {{ .Values.replicas }}\n{{- end }}"
)
_CLAIMS = TemplateLines(
    "{{- if .Values.cacheGib }}\n"
    + to_yaml({"volumeClaimTemplates": [cache_claim(Unquoted("{{ .Values.cacheGib }}"))]})
    + "{{- end }}"
)
_NO_CLAIMS = TemplateLines(
    "{{- if not .Values.cacheGib }}\n" + to_yaml([EMPTY_CACHE]) + "{{- end }}"
)
_SLO_CLASSES = TemplateLines(
    '{{- with .Values.sloClasses }}\n- "--slo-classes"\n- {{ . | quote }}\n{{- end }}'
)
_ARGUMENTS = TemplateLines("{{- range .Values.arguments }}\n- {{ . | quote }}\n{{- end }}")
_SECRET = "{{ .Values.keySecret | default (printf `%s-key` .Release.Name) }}"
_NOTES = f"""\
{{{{ .Values.replicas }}}}{{{{ with .Values.maxReplicas }}}} to {{{{ . }}}}{{{{ end }}}} servers \
of {{{{ .Values.model }}}}, and a gateway.
Clients send the key in the Secret {_SECRET}:

  kubectl create secret generic {_SECRET} --from-literal=key=...
  kubectl port-forward service/{{{{ .Release.Name }}}}-gateway 8080:80
"""


def render_helm(plan: DeploymentPlan) -> dict[str, str]:
    """A chart for `helm install`, in the folder of the plan's name."""
    chart = {
        "apiVersion": "v2",
        "name": plan.name,
        "description": f"{plan.server} servers behind a Ridgeline gateway",
        "type": "application",
        "version": CHART_VERSION,
        "kubeVersion": ">=1.25.0-0",
    }
    values = {
        "model": plan.model,
        "image": plan.server_image,
        "gatewayImage": plan.route_image,
        "replicas": plan.num_replicas,
        "maxReplicas": plan.max_replicas or 0,
        "cacheGib": plan.cache_gib or 0,
        "resources": server_resources(plan),
        "sloClasses": plan.slo_classes,
        "arguments": list(plan.arguments),
        "keySecret": "",
    }
    files = {
        "Chart.yaml": to_yaml(chart),
        "values.yaml": to_yaml(values),
        "values.schema.json": json.dumps(_schema(), indent=2) + "\n",
        "templates/NOTES.txt": _NOTES,
        **{f"templates/{name}": text for name, text in _templates(plan).items()},
    }
    return {f"{plan.name}/{name}": text for name, text in files.items()}


def _templates(plan: DeploymentPlan) -> dict[str, str]:
    texts = manifests(_expressions(plan))
    scaled = texts["autoscaler.yaml"]
    return {
        **texts,
        "autoscaler.yaml": f"{{{{- if .Values.maxReplicas }}}}\n{scaled}{{{{- end }}}}\n",
    }


def _expressions(plan: DeploymentPlan) -> ClusterValues:
    """Expressions in place of what `values.yaml` sets."""
    bare = DeploymentPlan(
        model="{{ .Values.model }}", server=plan.server, num_gpus=plan.gpus, arguments=()
    )
    slo = [_SLO_CLASSES] if plan.server == "ridgeline" else []
    return ClusterValues(
        profile=plan.profile,
        name="{{ .Release.Name }}",
        server_image="{{ .Values.image }}",
        gateway_image="{{ .Values.gatewayImage }}",
        server_arguments=[*bare.server_arguments, *slo, _ARGUMENTS],
        gateway_arguments=[*bare.route_arguments([]), _BACKENDS, _SLO_CLASSES],
        count=_COUNT,
        num_replicas=Unquoted("{{ .Values.replicas }}"),
        max_replicas=Unquoted("{{ .Values.maxReplicas }}"),
        claims=_CLAIMS,
        emptied=[_NO_CLAIMS],
        resources=Unquoted("{{- toYaml .Values.resources | nindent 12 }}"),
        key_secret=_SECRET,
        app="{{ .Chart.Name }}",
        namespace="{{ .Release.Namespace }}",
    )


def _schema() -> dict[str, Any]:
    """What `helm install --set` may set: a misspelt name is refused."""
    text = {"type": "string"}
    return {
        "$schema": "https://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "required": ["model", "image", "gatewayImage", "replicas", "resources"],
        "properties": {
            "model": text,
            "image": text,
            "gatewayImage": text,
            "replicas": {"type": "integer", "minimum": 1, "maximum": 1000},
            "maxReplicas": {"type": "integer", "minimum": 0, "maximum": 1000},
            "cacheGib": {"type": "integer", "minimum": 0},
            "resources": {"type": "object"},
            "sloClasses": text,
            "arguments": {"type": "array", "items": text},
            "keySecret": text,
            "global": {"type": "object"},
        },
    }
