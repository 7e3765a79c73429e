"""How much of a load's prompts repeats the head of an earlier one: what a prefix cache saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BLOCK = 16


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
