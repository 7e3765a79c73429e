"""What `ridgeline chat` prints besides the answers."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from ridgeline.workflows.text.transcript import Reply

COMMANDS: Mapping[str, str] = {
    "/help": "show this list",
    "/clear": "forget the conversation, but not the system prompt",
    "/system [TEXT]": "set the system prompt, or remove it; clears the conversation",
    "/save [FILE]": "write the conversation to a .json or .html file",
    "/exit": "leave (also Ctrl-D)",
}


def help_table() -> Table:
    """The commands and keys."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, meaning in COMMANDS.items():
        table.add_row(escape(name), meaning)
    table.add_row("Ctrl-C", "stop the answer; what came of it is remembered")
    table.add_row("\\ at the end of a line", "continue the message on the next line")
    return table


def reply_figures(reply: Reply) -> str:
    """`42 tokens · TTFT 12 ms · 350 tok/s`; the rate leaves out the first token."""
    parts = [f"{reply.usage.completion_tokens} tokens"]
    if reply.ttft_s is not None:
        parts.append(f"TTFT {reply.ttft_s * 1000:,.0f} ms")
    if reply.tokens_per_s is not None:
        parts.append(f"{reply.tokens_per_s:,.1f} tok/s")
    usage = reply.usage
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens cached")
    if reply.finish_reason == "length":
        parts.append("cut off by --max-tokens")
    elif reply.finish_reason == "abort":
        parts.append("stopped")
    return " · ".join(parts)
