"""The commands that need no hardware: predict, plan and cost."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.planning import CostOptions, PlanOptions, PredictOptions
from ridgeline.errors import BadInput

if TYPE_CHECKING:
    from ridgeline.hardware.catalogue import Accelerator
    from ridgeline.plan.step_time.predict import OperatingPoint

SOME_FAILED = 2


def predict(call: Invocation) -> int:
    """`ridgeline predict`: one operating point, or a file of them."""
    from rich.console import Console

    from ridgeline.cli.render.planning.predict import prediction_table
    from ridgeline.modelspec.families.shapes import known_shapes
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.device_catalogue import read_catalogue
    from ridgeline.workflows.planning.predict import predict_point

    options = call.read(PredictOptions)
    out = Console(highlight=False)
    if options.list_models:
        out.print("models:       " + " ".join(known_shapes()))
        out.print(
            "accelerators: " + " ".join(read_catalogue(options.catalogue, options.calibration))
        )
        return 0
    if options.input is not None:
        rows = read_catalogue(options.catalogue, options.calibration)
        return 0 if predict_file(options.input, options.output, rows) else SOME_FAILED
    result = predict_point(
        point_of(options), catalogue=options.catalogue, calibration=options.calibration
    )
    if options.json:
        print(json_line(result.to_dict()))
    else:
        out.print(prediction_table(result))
    return 0


def point_of(options: PredictOptions) -> OperatingPoint:
    """The operating point that the options describe."""
    from ridgeline.plan.step_time.predict import OperatingPoint

    return OperatingPoint(
        model=options.model or "",
        device=options.accelerator or "",
        isl=options.input_len,
        osl=options.output_len,
        batch=options.max_concurrency,
        tp=options.tensor_parallel_size,
        pp=options.pipeline_parallel_size,
        ep=options.expert_parallel_size,
        weight_dtype=options.quantization,
        kv_dtype=options.kv_cache_dtype,
        cached=options.cached_tokens,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_speculative_tokens=options.num_speculative_tokens,
        acceptance=options.acceptance,
        draft_model=options.draft_model,
    )


def predict_file(source: str, output: Path | None, rows: dict[str, Accelerator]) -> bool:
    """Predict every line of a JSONL file (`-`: stdin); False if a line could not be predicted."""
    from ridgeline.plan.step_time.predict import predict as predict_point
    from ridgeline.plan.step_time.predict import predict_lines
    from ridgeline.report.files import write_file
    from ridgeline.report.json_line import json_line

    failed = False

    def answers(points: Iterable[str]) -> Iterator[str]:
        nonlocal failed
        for answer in predict_lines(points, lambda point: predict_point(point, rows)):
            failed |= "error" in answer
            yield json_line(answer)

    if source == "-":
        points: Iterable[str] = sys.stdin
    else:
        try:
            points = Path(source).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput("cannot read the points", value=source, fix=str(error)) from None
    if output is not None:
        write_file(output, (f"{line}\n".encode() for line in answers(points)))
    else:
        for line in answers(points):
            print(line)
    return not failed


def plan(call: Invocation) -> None:
    """`ridgeline plan`."""
    from rich.console import Console

    from ridgeline.cli.render.planning.plan import print_plan
    from ridgeline.report.files import write_file
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.plan import plan as make_plan

    options = call.read(PlanOptions)
    result = make_plan(options)
    if options.html is not None:
        write_file(options.html, [result.to_html().encode()])
    if options.json:
        print(json_line(result.to_dict()))
    else:
        print_plan(result, Console(highlight=False))
    if options.manifests is not None:
        err = Console(highlight=False, stderr=True)
        for path in result.save_manifests(options.manifests):
            err.print(f"written: {path}", style="dim", markup=False, soft_wrap=True)
        left_out = {} if result.manifests is None else result.manifests.left_out
        for name, why in left_out.items():
            err.print(f"not written: {name}: {why}", style="yellow", markup=False, soft_wrap=True)


def cost(call: Invocation) -> None:
    """`ridgeline cost`."""
    from rich.console import Console

    from ridgeline.cli.render.planning.cost import print_cost
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.cost import cost as compare_cost

    options = call.read(CostOptions)
    result = compare_cost(options)
    if options.json:
        print(json_line(result.to_dict()))
    else:
        print_cost(result, Console(highlight=False))
