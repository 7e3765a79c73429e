"""`ridgeline generate`: one answer as it is generated, and how fast it came."""

from __future__ import annotations

import sys

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.chat import reply_figures
from ridgeline.cli.render.console import ReportConsole, print_prose
from ridgeline.config.tools import GenerateOptions
from ridgeline.records import Sampling
from ridgeline.records.progress import Message, ProgressEvent
from ridgeline.report.json_line import json_line


def generate(call: Invocation) -> None:
    """`ridgeline generate`: the answer goes to stdout as it comes, its figures to stderr.

    With --json, one record of both goes to stdout when the answer is complete.
    """
    options = call.read(GenerateOptions)
    if options.model is None:
        from ridgeline.workflows.text.prompt_check import check_is_no_model  # not for `--help`

        check_is_no_model(options.prompt)
    sampling = Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        stop=options.stop,
    )
    settings = call.settings(options.model)
    from ridgeline.workflows.text.generation import open_stream  # imports torch
    from ridgeline.workflows.text.prompt_check import text_or_bytes

    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    console = ReportConsole(stderr=True)

    def observer(event: ProgressEvent) -> None:
        if isinstance(event, Message):
            print_prose(console, event.text, "dim")

    prompt = (
        [{"role": "user", "content": text}]
        if options.chat
        else text_or_bytes(settings.model, text, observer)
    )
    with open_stream(settings, prompt, sampling, observer) as stream:
        for piece in stream:
            if not options.json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    if options.json:
        print(json_line(stream.reply.to_dict()))
        return
    sys.stdout.write("\n")
    print_prose(console, reply_figures(stream.reply), "dim")
