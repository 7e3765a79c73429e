"""How long a workload's prompts and answers are, in tokens."""

from __future__ import annotations

from ridgeline.errors import BadInput
from ridgeline.measure.workload import Chat, Prompt, parse_workload, plain_chat

ISL, OSL = 1024, 256  # tokens of a request where nothing else is said
BYTES_PER_TOKEN = 4  # of English text under the tokenizers of today; texts are not tokenised here


def workload_lengths(workload: str, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, answer) of `count` requests; texts are estimated at four bytes per token."""
    sampled = parse_workload(workload).sample(count, seed)
    return [(_length(request.prompt), request.max_tokens) for request in sampled]


def _length(prompt: Prompt) -> int:
    if isinstance(prompt, tuple):
        return len(prompt)
    text = plain_chat(prompt) if isinstance(prompt, Chat) else prompt
    return max(1, len(text.encode()) // BYTES_PER_TOKEN)


def is_text(workload: str) -> bool:
    """Whether the lengths are estimates."""
    request = next(iter(parse_workload(workload).sample(1, 0)), None)
    if request is None:
        raise BadInput("the workload has no requests", value=workload)
    return not isinstance(request.prompt, tuple)
