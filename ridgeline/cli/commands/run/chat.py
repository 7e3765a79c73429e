"""`ridgeline chat`: talk to a model on the terminal, with the speed of every answer.

The model runs in this process, or on a server (`--url`). Ctrl-C stops an answer and keeps what was
said; Ctrl-D leaves. Input from a pipe is answered line by line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing

from rich.console import Console

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.chat import COMMANDS, help_table, reply_figures
from ridgeline.cli.render.console import ReportConsole
from ridgeline.config.tools import ChatOptions
from ridgeline.errors import BadInput, UserError
from ridgeline.records import Sampling, SamplingDefaults
from ridgeline.workflows.text.base import ChatPartner

TEMPERATURE = 0.7
Start = Callable[[str | None], ChatPartner]
"""Begins a conversation with a system prompt."""


def chat(call: Invocation) -> int:
    """`ridgeline chat`."""
    options, console = call.read(ChatOptions), ReportConsole(stderr=True)
    if options.url is not None:
        return ChatLoop(_remote(options), options.system, console).run()
    settings = call.settings(options.model)
    from ridgeline.workflows.open_engine import open_engine
    from ridgeline.workflows.text.conversation import Conversation

    notes: list[object] = []
    with console.status(f"loading {settings.model} …"):
        engine = open_engine(settings, notes.append)
    with closing(engine):
        weights = f"{engine.info.weight_bytes / 1e6:,.0f} MB of weights"
        sampling = _sampling(options, engine.default_sampling)
        console.print(f"{settings.model} · {weights} · loaded in {engine.load_s:.1f} s")
        for note in notes:
            console.print(f"{note}", style="dim", markup=False)

        def start(system: str | None) -> ChatPartner:
            return Conversation(engine, system=system, sampling=sampling)

        return ChatLoop(start, options.system, console).run()


def _sampling(options: ChatOptions, recommended: SamplingDefaults) -> Sampling:
    """As chosen; by default as the publisher of the model recommends."""
    chosen = {"temperature": options.temperature, "top_p": options.top_p}
    if options.temperature is None and recommended.temperature is None:
        chosen["temperature"] = TEMPERATURE
    given = {name: value for name, value in chosen.items() if value is not None}
    return recommended.fill(**given, max_tokens=options.max_tokens)


def _remote(options: ChatOptions) -> Start:
    from ridgeline.workflows.text.remote_conversation import RemoteConversation

    def start(system: str | None) -> ChatPartner:
        assert options.url is not None
        return RemoteConversation(
            options.url,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            model=options.served_model_name,
            api_key=options.api_key,
            system=system,
        )

    return start


class ChatLoop:
    """Reads messages and `/commands` until the input ends, and prints the answers."""

    def __init__(self, start: Start, system: str | None, console: Console) -> None:
        self._start, self._console = start, console
        self._partner = start(system)
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> int:
        """The exit code. From a pipe, the first error ends the conversation."""
        if self._is_terminal:
            self._print("/help lists the commands, Ctrl-D leaves")
        try:
            for text in self._messages():
                try:
                    if not text.startswith("/"):
                        self._answer(text)
                    elif not self._run_command(text):
                        break
                except UserError as error:
                    if not self._is_terminal:
                        raise
                    self._print(f"{error}", "red")
        finally:
            self._partner.close()
        return 0

    def _messages(self) -> Iterator[str]:
        """Lines that are not blank; a backslash at the end continues one on the next line."""
        while True:
            try:
                text = self._read_line()
                while text.endswith("\\"):
                    text = f"{text[:-1]}\n{self._read_line()}"
            except KeyboardInterrupt:
                self._print("\nCtrl-D or /exit leaves")
                continue
            except EOFError:
                if self._is_terminal:
                    self._console.print()
                return
            if text.strip():
                yield text.strip()

    def _read_line(self) -> str:
        if self._is_terminal:
            import readline  # noqa: F401  # gives input() its history and editing keys

            return input("> ")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _answer(self, text: str) -> None:
        """Print the answer as it comes, and how fast it came. Ctrl-C stops it."""
        with self._partner.stream(text) as stream:
            try:
                for piece in stream:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                pass
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._print(reply_figures(stream.reply))

    def _print(self, text: str, style: str = "dim") -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    def _run_command(self, text: str) -> bool:
        """Carry out a `/command`; False if it ends the conversation."""
        name, _, argument = text.partition(" ")
        argument = argument.strip()
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                self._console.print(help_table())
            case "/clear":
                self._partner.reset()
                self._print("conversation cleared")
            case "/system":
                self._partner.close()
                self._partner = self._start(argument or None)
                self._print(
                    f"system prompt {'set' if argument else 'removed'}, conversation cleared"
                )
            case "/save":
                path = self._partner.save(argument or "conversation.json")
                self._print(f"saved to {path}")
            case _:
                raise BadInput("unknown command", value=name, limit=", ".join(COMMANDS))
        return True
