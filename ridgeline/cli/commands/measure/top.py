"""`ridgeline top`: a server's figures, once or live."""

from __future__ import annotations

import signal
import threading

from rich.live import Live

from ridgeline.cli.commands.measure.key_presses import key_presses
from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.live_progress import ProgressLines
from ridgeline.cli.render.measure.top import server_screen, server_table
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
        ReportConsole().print(server_table(view))


def _watch(options: TopOptions) -> None:
    """Update the table until q or Ctrl-C; ? shows and hides the explanation of the figures."""
    console = ReportConsole()
    views = watch_server(
        options.url,
        api_key=options.api_key,
        interval_s=options.interval,
        observer=ProgressLines(console),
    )
    view, show_help = next(views), False

    def on_key(key: str) -> None:
        nonlocal show_help
        if key in "qQ":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif key in "?h":
            show_help = not show_help
            live.update(server_screen(view, show_help=show_help), refresh=True)

    try:
        with (
            Live(server_screen(view), console=console, auto_refresh=False) as live,
            key_presses(on_key),
        ):
            for view in views:
                live.update(server_screen(view, show_help=show_help), refresh=True)
    except KeyboardInterrupt:
        return
