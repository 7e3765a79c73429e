"""The planning commands: predict, plan, cost and pack."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole, print_prose
from ridgeline.cli.render.planning.capacity import print_capacity
from ridgeline.cli.render.planning.catalogue import print_catalogue
from ridgeline.cli.render.planning.cost import print_cost
from ridgeline.cli.render.planning.pack import pack_table
from ridgeline.cli.render.planning.plan import print_manifests, print_plan
from ridgeline.cli.render.planning.predict import prediction_table, print_waterfall
from ridgeline.config.load import PredictOptions
from ridgeline.config.planning import (
    CapacityOptions,
    CostOptions,
    PackOptions,
    PlanOptions,
)
from ridgeline.config.tools import CatalogueOptions
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.workflows.planning.capacity import capacity as measure_capacity
from ridgeline.workflows.planning.catalogue import catalogue as read_devices
from ridgeline.workflows.planning.cost import cost as compare_cost
from ridgeline.workflows.planning.pack import pack as place_models
from ridgeline.workflows.planning.plan import plan as make_plan
from ridgeline.workflows.planning.predict import (
    known_names,
    operating_point,
    predict_file,
    predict_point,
    sources_of,
)

SOME_FAILED = 2


def predict(call: Invocation) -> int:
    """`ridgeline predict`: one operating point, or a file of them."""
    options = call.read(PredictOptions)
    out = ReportConsole()
    catalogue, calibration = options.catalogue, options.calibration
    if options.list_models:
        names = known_names(catalogue=catalogue, calibration=calibration)
        print_prose(out, "models:       " + " ".join(names.models))
        print_prose(out, "accelerators: " + " ".join(names.accelerators))
        return 0
    if options.input is not None:
        return _predict_file(options, options.input)
    point = operating_point(options)
    result = predict_point(point, sources_of(options), explain=options.explain)
    if options.json:
        print(json_line(result.to_dict()))
    else:
        out.print(prediction_table(result))
        if result.waterfall is not None:
            print_waterfall(result.waterfall, out)
    return 0


def _predict_file(options: PredictOptions, source: str) -> int:
    """Predict every line of a file; 2 if a line could not be predicted."""
    failed = False

    def lines() -> Iterator[str]:
        nonlocal failed
        for prediction in predict_file(source, sources_of(options), explain=options.explain):
            failed |= "error" in prediction
            yield json_line(prediction)

    if options.output is not None:
        write_file(options.output, (f"{line}\n".encode() for line in lines()))
    else:
        for line in lines():
            print(line)
    return SOME_FAILED if failed else 0


def plan(call: Invocation) -> None:
    """`ridgeline plan`."""
    options = call.read(PlanOptions)
    result = make_plan(options)
    if options.html is not None:
        write_file(options.html, [result.to_html().encode()])
    if options.json:
        print(json_line(result.to_dict()))
    else:
        print_plan(result, ReportConsole())
    if options.manifests is not None:
        paths = result.save_manifests(options.manifests)
        print_manifests(result, paths, ReportConsole(stderr=True))


def cost(call: Invocation) -> None:
    """`ridgeline cost`."""
    options = call.read(CostOptions)
    result = compare_cost(options)
    if options.json:
        print(json_line(result.to_dict()))
    else:
        print_cost(result, ReportConsole())


def pack(call: Invocation) -> None:
    """`ridgeline pack`: several models on a stock of devices."""
    options = call.read(PackOptions)
    result = place_models(options.models, options.accelerator, catalogue=options.catalogue)
    if options.json:
        print(json_line(result.to_dict()))
    else:
        ReportConsole().print(pack_table(result))


def catalogue(call: Invocation) -> None:
    """`ridgeline catalogue`."""
    options = call.read(CatalogueOptions)
    result = read_devices(options)
    if options.json:
        print(json_line(result.to_dict()))
    else:
        print_catalogue(result, ReportConsole(), one=options.device is not None)


def capacity(call: Invocation) -> int:
    """`ridgeline capacity`; 2 if no device holds the model."""
    options = call.read(CapacityOptions)
    result = measure_capacity(options)
    if options.json:
        print(json_line(result.to_dict()))
    else:
        print_capacity(result, ReportConsole(), named=options.accelerator is not None)
    return 0 if result.rows else SOME_FAILED
