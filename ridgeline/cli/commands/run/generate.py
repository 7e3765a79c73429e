"""`ridgeline generate`: one answer on the terminal as it comes, and how fast it came."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.settings import Settings
from ridgeline.config.tools import GenerateOptions
from ridgeline.errors import RidgelineError
from ridgeline.records import Failed, Finished, Sampling, Token

if TYPE_CHECKING:
    from ridgeline.engine.engine import Engine


def generate(call: Invocation) -> int:
    """`ridgeline generate`."""
    options = call.read(GenerateOptions)
    sampling = Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        stop=options.stop,
    )
    settings = call.settings(options.model)
    return command(settings, options.prompt, sampling, chat=options.chat)


def command(settings: Settings, prompt: str, sampling: Sampling, *, chat: bool = False) -> int:
    """Stream the answer to stdout and a line of figures to stderr."""
    from ridgeline.engine.engine import Engine

    text = sys.stdin.read() if prompt == "-" else prompt
    engine = Engine.from_settings(settings)
    try:
        asked: str | Sequence[int] = text
        if chat:
            asked = engine.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        line = asyncio.run(_answer(engine, asked, sampling))
    finally:
        engine.close()
    Console(stderr=True, highlight=False).print(line, style="dim", markup=False)
    return 0


async def _answer(engine: Engine, prompt: str | Sequence[int], sampling: Sampling) -> str:
    """Print the text as it comes; returns the line of figures."""
    sent_s = time.perf_counter()
    token_s: list[float] = []
    async for event in engine.stream(prompt, sampling):
        if isinstance(event, Token):
            token_s.append(time.perf_counter())
        if isinstance(event, Token | Finished):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        elif isinstance(event, Failed):
            raise RidgelineError(event.error)
    sys.stdout.write("\n")
    return figures(sent_s, token_s)


def figures(sent_s: float, token_s: Sequence[float], num_tokens: int | None = None) -> str:
    """`42 tokens · ttft 12 ms · 350 tok/s`: the rate is that of decoding, first token out.

    `token_s`: when something came; `num_tokens`: of how many tokens, where that is known better.
    """
    if not token_s:
        return "0 tokens"
    count = num_tokens or len(token_s)
    parts = [f"{count} tokens", f"ttft {(token_s[0] - sent_s) * 1000:.0f} ms"]
    if len(token_s) > 1:
        parts.append(f"{(count - 1) / max(token_s[-1] - token_s[0], 1e-9):.1f} tok/s")
    return " · ".join(parts)
