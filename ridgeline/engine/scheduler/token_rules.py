"""Tokens that the output so far forbids or forces: bad words and thinking budgets.

Both are pure functions of the output, so that drafts, preemption and forks need no state.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.records import ThinkingLimit


def tokens_completing(words: Sequence[tuple[int, ...]], output: Sequence[int]) -> tuple[int, ...]:
    """The tokens that would complete one of the token sequences `words` after `output`."""
    completing = [word[-1] for word in words if _ends_with(output, word[:-1])]
    return tuple(dict.fromkeys(completing))


def _ends_with(output: Sequence[int], tail: tuple[int, ...]) -> bool:
    return not tail or tuple(output[-len(tail) :]) == tail


def open_thinking(limit: ThinkingLimit, prompt: tuple[int, ...]) -> int | None:
    """Thinking tokens at the end of the prompt; None if it does not end inside the thinking."""
    last_start, last_end = _rfind(prompt, limit.start), _rfind(prompt, limit.end)
    if last_start <= last_end:
        return None
    return len(prompt) - last_start - len(limit.start)


def forced_token(limit: ThinkingLimit, output: tuple[int, ...]) -> int | None:
    """The token that has to follow `output`, because its thinking budget is spent; else None.

    Every stretch of thinking has the whole budget; that of the prompt has used up `num_open`.
    """
    at, begin = 0, None if limit.num_open is None else -limit.num_open
    while True:
        if begin is None:
            start = _find(output, limit.start, at)
            if start < 0:
                return None
            at = begin = start + len(limit.start)
        budget_end = max(begin + limit.num_tokens, at)
        end = _find(output, limit.end, at)
        if 0 <= end <= budget_end - len(limit.end):
            at, begin = end + len(limit.end), None
            continue
        num_forced = len(output) - budget_end
        if num_forced < 0:
            return None
        if num_forced < len(limit.forced_end):
            return limit.forced_end[num_forced]
        at, begin = budget_end + len(limit.forced_end), None


def _find(tokens: tuple[int, ...], mark: tuple[int, ...], at: int) -> int:
    """Index of the first occurrence of `mark` from `at` on; -1 if there is none."""
    first, num = mark[0], len(mark)
    while True:
        try:
            at = tokens.index(first, at)
        except ValueError:
            return -1
        if tokens[at : at + num] == mark:
            return at
        at += 1


def _rfind(tokens: tuple[int, ...], mark: tuple[int, ...]) -> int:
    """Index of the last occurrence of `mark`; -1 if there is none."""
    for at in range(len(tokens) - len(mark), -1, -1):
        if tokens[at] == mark[0] and tokens[at : at + len(mark)] == mark:
            return at
    return -1
