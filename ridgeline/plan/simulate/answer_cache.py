"""The response cache of a simulated server: answers that are given again, without a step.

A stored answer goes token by token through the server, which takes `HIT_S` and `HIT_TOKEN_S`. The
semantic cache embeds each question that was not answered exactly: one pass over its tokens, which
is counted as that many more prompt tokens. (They take up blocks of the KV cache here for as long as
the request runs, which they do not in the engine.)
"""

from __future__ import annotations

from collections import OrderedDict

HIT_S = 2e-3
HIT_TOKEN_S = 5e-5
"""Measured on `ridgeline serve demo` with two busy cores: 0.9 to 10 ms, and 40 to 90 us a token."""
ENTRY_BYTES, TOKEN_BYTES = 600, 132
"""Of a stored answer in the server, without log-probabilities."""
QUESTION_TOKENS = 64
"""Of a question that is embedded, without --question-len."""
MAX_SHARE = 0.5
"""Of the bound, what the answers of one tenant may take, as in the server; simulated requests are
of one tenant."""


def hit_s(num_output: int) -> float:
    """Seconds from a request to the end of its stored answer."""
    return HIT_S + HIT_TOKEN_S * num_output


class AnswerCache:
    """Which answers one server has stored: the rule of the server's cache, without the answers."""

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self._max_bytes, self._ttl_s, self._num_bytes = int(max_bytes * MAX_SHARE), ttl_s, 0
        self._stored: OrderedDict[int, tuple[float, int]] = OrderedDict()  # when, and bytes

    def find(self, key: int, now_s: float) -> bool:
        """Whether the answer is stored; it is then the most recently used one."""
        stored = self._stored.get(key)
        if stored is None:
            return False
        if now_s - stored[0] > self._ttl_s:
            self._drop(key)
            return False
        self._stored.move_to_end(key)
        return True

    def store(self, key: int, num_output: int, now_s: float) -> None:
        """Keep an answer of that many tokens; the least recently used ones make room for it."""
        num_bytes = ENTRY_BYTES + TOKEN_BYTES * num_output
        if num_bytes > self._max_bytes:
            return
        if key in self._stored:
            self._drop(key)
        while self._num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))
        self._stored[key] = now_s, num_bytes
        self._num_bytes += num_bytes

    def _drop(self, key: int) -> None:
        self._num_bytes -= self._stored.pop(key)[1]
