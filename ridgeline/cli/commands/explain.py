"""The flags of `ridgeline explain`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ridgeline.cli.params.engine import EngineFlags, refuse, takes_engine_flags
from ridgeline.cli.params.load import WORKLOADS
from ridgeline.modelspec.checkpoints.locate import is_built_in


class _TakesAFlag(TyperCommand):
    """`explain --max-num-seqs [demo]` asks about the flag: nothing is there for it to set.

    With a value, or behind a model, it sets what is explained, as everywhere else.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        subject, *rest = args or [""]
        others = [word for word in rest if word != "--json"]
        alone = not others or (len(others) == 1 and is_built_in(others[0]))
        if subject.startswith("--") and "=" not in subject and alone and subject not in _OWN:
            args = [subject.lstrip("-").removeprefix("no-"), *rest]
        return super().parse_args(ctx, args)


_OWN = ("--help", "--json", "--")


def add_to(app: typer.Typer) -> None:
    app.command(cls=_TakesAFlag)(explain)


@takes_engine_flags
def explain(
    subject: Annotated[
        str | None,
        typer.Argument(help="A model, or what is to be explained.", show_default="demo"),
    ] = None,
    model: Annotated[
        str | None, typer.Argument(help="Where: a model directory, 'demo', or 'dummy:SHAPE'.")
    ] = None,
    workload: Annotated[str | None, typer.Option(help=WORKLOADS)] = None,
    slo: Annotated[
        str | None, typer.Option(help="The promise, in ms (default: 'ttft:500 tpot:50').")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests per second that come.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    engine: EngineFlags,
) -> None:
    """Print every engine setting as it would be used and why, and which techniques are for here.

    `explain SUBJECT [MODEL]` explains a technique, metric, flag (with or without its dashes),
    verdict or error instead, with the numbers of this model and machine; `explain topics` lists
    them.
    `explain speculation [MODEL]` runs the model, and measures whether drafts would pay.
    """
    if subject == "speculation":
        only = {"--workload": workload, "--slo": slo, "--request-rate": request_rate}
        refuse([flag for flag, value in only.items() if value], "here: speculation is measured")
        from ridgeline.workflows.explain.explain_speculation import command as speculation

        raise typer.Exit(speculation(engine.settings(model), json))
    from ridgeline.workflows.explain.explain import Asked, command, is_model, subject_command

    asked = Asked(workload=workload, slo=slo, request_rate=request_rate)
    if subject is None or is_model(subject):
        refuse([model] if model else [], "behind another model")
        raise typer.Exit(command(engine.settings(subject), asked, json))
    raise typer.Exit(subject_command(subject, engine.settings(model), asked, json))
