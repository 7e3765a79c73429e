"""How much of a load's prompts repeats the head of an earlier one: what a prefix cache saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ridgeline.measure.workload.base import Chat, LoadRequest, plain_chat

BLOCK = 16
CHAR_BLOCK = 64  # characters that stand for a block of tokens, where nothing tokenizes


def shared_prompt_share(prompts: Iterable[Sequence[int]], block: int = BLOCK) -> float:
    """Share of all prompt tokens that lie in whole blocks seen before, at the same place after the
    same beginning. 0 without prompts.
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


def shared_of(requests: Sequence[LoadRequest]) -> float:
    """How much of the load repeats the head of an earlier prompt; of text, by characters."""
    ids = [r.prompt for r in requests if isinstance(r.prompt, tuple)]
    if ids:
        return shared_prompt_share(ids)
    texts = [plain_chat(r.prompt) if isinstance(r.prompt, Chat) else r.prompt for r in requests]
    return shared_prompt_share(([ord(c) for c in str(t)] for t in texts), CHAR_BLOCK)
