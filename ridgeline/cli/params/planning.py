"""Flags that several of the planning commands share, or that are long to explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SHAPE = "A published shape's name, a config.json, or a model directory."
WEIGHTS = "float32, bfloat16, float16, fp8, int8, int4, mxfp4 (default: as stored)."
KV = "float32, bfloat16, float16, fp8, int8 (default: as stored)."
Catalogue = Annotated[
    Path | None,
    typer.Option(help="A catalogue of accelerators instead of ours (TOML).", metavar="FILE"),
]
Calibrated = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        help="A file of `ridgeline calibrate`: adds its device, by default this-machine.",
        metavar="FILE",
    ),
]
Drafts = Annotated[int, typer.Option(help="Speculation: drafts per sequence and step.")]
Acceptance = Annotated[float | None, typer.Option(help="Probability that a draft is accepted.")]
OffPeakHours = Annotated[
    str | None,
    typer.Option(help="When those are served, as 22:00-06:00@18:30 (@: the start's time)."),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(help="What if: a setting and values, as replicas=2,4,8; may be repeated."),
]
Workers = Annotated[
    int | None, typer.Option(help="With --sweep: fleets at a time (default: one per core).", min=1)
]
Seats = Annotated[
    int | None, typer.Option(help="Seats of a replica (default: 256; calibrated: 64).")
]
StepTokens = Annotated[
    int | None, typer.Option(help="Tokens per step (default: 8192; calibrated: 512).")
]
Devices = Annotated[
    str | None,
    typer.Option(
        help="An accelerator of the catalogue, or the calibrated one; a mixed fleet as "
        "h100-sxm=2,l40s=4."
    ),
]
RouterName = Annotated[
    str,
    typer.Option(help="round-robin, least-loaded, power-of-two, prefix-aware or session."),
]
DecodeReplicas = Annotated[
    int, typer.Option(help="Disaggregate: so many replicas decode, the others prefill.")
]
SharePrefixes = Annotated[bool, typer.Option(help="Share what recorded prompts have in common.")]
BatchShare = Annotated[float, typer.Option(help="Share of requests that may wait for the others.")]
AcceptStale = Annotated[
    bool, typer.Option("--accept-stale", help="Use prices older than a year, and say so.")
]
SpotPrice = Annotated[
    float | None, typer.Option(help="Dollars per spot device and hour, beside the others.")
]
SpotInterruptions = Annotated[
    float, typer.Option(help="Spot: how often an hour a device is taken away.")
]
SpotLost = Annotated[
    float, typer.Option(help="Spot: seconds of work lost each time, starting again included.")
]
Cluster = Annotated[
    str,
    typer.Option(
        help="Whose labels the manifests select nodes by: gpu-operator (with or without a cloud), "
        "gke, eks, eks-auto, karpenter or aks."
    ),
]
NodeLabel = Annotated[
    str | None, typer.Option(help="Select nodes by this label instead.", metavar="KEY=VALUE")
]
Image = Annotated[
    str | None,
    typer.Option(help="Image of vLLM, by tag or digest (default: a release).", metavar="NAME:TAG"),
]
RayImage = Annotated[
    str | None, typer.Option(help="Image of Ray with vLLM, likewise.", metavar="NAME:TAG")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Seeds = Annotated[
    int,
    typer.Option(help="So many loads and, calibrated, so much weather: figures with intervals."),
]
