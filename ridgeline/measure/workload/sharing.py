"""Share of the prompt tokens of a load that a prefix cache can reuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ridgeline.measure.workload.base import ChatPrompt, LoadRequest, plain_chat

BLOCK = 16
CHAR_BLOCK = 64  # characters counted as a block of tokens if prompts are text


def shared_prompt_share(prompts: Iterable[Sequence[int]], block: int = BLOCK) -> float:
    """Share of all prompt tokens in full blocks that an earlier prompt had after the same prefix.

    0 without prompts.
    """
    seen: set[int] = set()
    shared = total = 0
    for prompt in prompts:
        tokens = tuple(prompt)
        total += len(tokens)
        head = 0
        for end in range(block, len(tokens), block):
            head = hash((head, tokens[end - block : end]))
            shared += block * (head in seen)
            seen.add(head)
    return shared / total if total else 0.0


def shared_share(requests: Sequence[LoadRequest]) -> float:
    """`shared_prompt_share` of a load; text prompts are counted in characters."""
    ids = [r.prompt for r in requests if isinstance(r.prompt, tuple)]
    if ids:
        return shared_prompt_share(ids)
    texts = [
        plain_chat(r.prompt) if isinstance(r.prompt, ChatPrompt) else r.prompt for r in requests
    ]
    return shared_prompt_share(([ord(c) for c in str(t)] for t in texts), CHAR_BLOCK)
