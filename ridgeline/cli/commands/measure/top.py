"""`ridgeline top`: a server's figures, once or live."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.live_progress import ProgressLines
from ridgeline.cli.render.measure.top import server_table
from ridgeline.config.tools import TopOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.serving.watch_server import view_server, watch_server


def top(call: Invocation) -> None:
    """`ridgeline top`."""
    options = call.read(TopOptions)
    if not options.once:
        _watch(options)
        return
    view = view_server(options.url, api_key=options.api_key, interval_s=options.interval)
    if options.json:
        print(json_line(view.to_dict()))
    else:
        Console().print(server_table(view))


def _watch(options: TopOptions) -> None:
    """Update the table until Ctrl-C."""
    console = Console()
    views = watch_server(
        options.url,
        api_key=options.api_key,
        interval_s=options.interval,
        observer=ProgressLines(console),
    )
    first = next(views)
    try:
        with Live(server_table(first), console=console, auto_refresh=False) as live:
            for view in views:
                live.update(server_table(view), refresh=True)
    except KeyboardInterrupt:
        return
