"""`ridgeline generate`: one answer as it is generated, and how fast it came."""

from __future__ import annotations

import sys
from typing import Any

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.chat import reply_figures
from ridgeline.cli.render.console import ReportConsole, print_prose
from ridgeline.config.tools import GenerateOptions
from ridgeline.records import Sampling
from ridgeline.records.progress import Message, ProgressEvent
from ridgeline.report.json_line import json_line

NO_TEXT = (
    "a shape with random weights has no tokenizer: the bytes of the prompt are its token ids, and "
    "the answer has no text"
)


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
    from ridgeline.modelspec.checkpoints.locate import is_dummy
    from ridgeline.workflows.text.generation import open_stream  # imports torch

    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    prompt: Any = [{"role": "user", "content": text}] if options.chat else text
    console = ReportConsole(stderr=True)
    if is_dummy(settings.model) and not options.chat:
        prompt = list(text.encode())
        print_prose(console, NO_TEXT, "dim")

    def observer(event: ProgressEvent) -> None:
        if isinstance(event, Message):
            print_prose(console, event.text, "dim")

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
