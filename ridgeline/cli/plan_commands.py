"""Flags of the commands that answer before anything is rented: predict, plan, simulate, cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_SHAPE = "A published shape's name, a config.json, or a model directory."
_WEIGHTS = "float32, bfloat16, float16, fp8, int8, int4, mxfp4 (default: as stored)."
_KV = "float32, bfloat16, float16, fp8, int8 (default: as stored)."
Catalogue = Annotated[
    Path | None,
    typer.Option(help="A catalogue of accelerators instead of ours (TOML).", metavar="FILE"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_plan_commands(app: typer.Typer) -> None:
    """Register them."""
    app.command()(predict)


def predict(
    model: Annotated[str | None, typer.Argument(help=_SHAPE, show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="An accelerator of the catalogue.")] = None,
    isl: Annotated[int, typer.Option(help="Prompt tokens.")] = 1024,
    osl: Annotated[int, typer.Option(help="Answer tokens.")] = 256,
    batch: Annotated[int, typer.Option(help="Requests in flight, in a closed loop.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor parallel devices.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(help="Devices that whole experts are spread over.")] = 1,
    weight_dtype: Annotated[str | None, typer.Option(help=_WEIGHTS)] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=_KV)] = None,
    cached: Annotated[int, typer.Option(help="Prompt tokens that the prefix cache holds.")] = 0,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens per step.")] = 8192,
    input: Annotated[
        str | None, typer.Option(help="JSONL of points; - reads stdin.", metavar="FILE")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write JSONL there, not to stdout.", metavar="FILE")
    ] = None,
    catalogue: Catalogue = None,
    list_models: Annotated[
        bool, typer.Option("--list-models", help="Print the known shapes and devices.")
    ] = False,
    json: Json = False,
) -> None:
    """Predict time, throughput and memory of an operating point, from arithmetic alone."""
    from ridgeline.cli.predict import answer_file, answer_one, list_known
    from ridgeline.errors import BadInput
    from ridgeline.plan.predict import Point

    if list_models:
        list_known(catalogue)
        return
    if input is not None:
        if model is not None or device is not None:
            raise BadInput("MODEL and --device have no effect with --input", value=input)
        code = answer_file(input, output, catalogue)
        if code:
            raise typer.Exit(code)
        return
    if model is None or device is None:
        raise BadInput("predict needs a MODEL and a --device, or --input FILE", value=model)
    if output is not None:
        raise BadInput("--output has no effect without --input", value=str(output))
    point = Point(
        model=model,
        device=device,
        isl=isl,
        osl=osl,
        batch=batch,
        tp=tp,
        pp=pp,
        ep=ep,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        cached=cached,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    answer_one(point, catalogue, json)
