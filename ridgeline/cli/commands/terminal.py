"""The flags of the commands that look at a running server from a terminal: chat and top."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[str, typer.Option(help="The server's address.")]
Key = Annotated[str | None, typer.Option(envvar="RIDGELINE_API_KEY", help="The server's key.")]
HERE = "http://127.0.0.1:8000"


def add_terminal_commands(app: typer.Typer) -> None:
    app.command()(chat)
    app.command()(top)


def chat(
    url: Url = HERE,
    api_key: Key = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
) -> None:
    """Talk to a running server; under every answer, its time to first token and speed."""
    from ridgeline.cli.commands.chat import ChatOptions, command

    command(
        ChatOptions(
            url=url,
            model=model,
            api_key=api_key,
            system=system,
            temperature=temperature,
            max_tokens=max_tokens,
        )
    )


def top(
    url: Url = HERE,
    api_key: Key = None,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05)] = 1.0,
) -> None:
    """Watch a running server: requests, speed, latencies, KV blocks, cache, batch lines."""
    from ridgeline.cli.commands.top import command

    command(url, api_key, once=once, json=json, interval_s=interval)
