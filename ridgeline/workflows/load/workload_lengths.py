"""Prompt and output lengths of a workload, in tokens, without a tokenizer."""

from __future__ import annotations

from ridgeline.errors import BadInput
from ridgeline.measure.workload import ChatPrompt, Prompt, parse_workload, plain_chat

ISL, OSL = 1024, 256  # default prompt and output tokens of a planned request
BYTES_PER_TOKEN = 4  # of English text, with the tokenizers of today's models


def workload_lengths(workload: str, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of `count` requests; text at four bytes per token."""
    requests = parse_workload(workload).sample(count, seed)
    return [(_prompt_tokens(request.prompt), request.max_tokens) for request in requests]


def _prompt_tokens(prompt: Prompt) -> int:
    if isinstance(prompt, tuple):
        return len(prompt)
    text = plain_chat(prompt) if isinstance(prompt, ChatPrompt) else prompt
    return max(1, len(text.encode()) // BYTES_PER_TOKEN)


def is_text(workload: str) -> bool:
    """Whether the workload is text, so that its lengths are estimates."""
    request = next(iter(parse_workload(workload).sample(1, 0)), None)
    if request is None:
        raise BadInput("the workload has no requests", value=workload)
    return not isinstance(request.prompt, tuple)
