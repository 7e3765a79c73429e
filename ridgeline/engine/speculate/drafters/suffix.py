"""Suffix drafts: what followed the last tokens in recent responses to the same tenant.

The outputs of a tenant's finished sequences go into a suffix automaton. A sequence keeps its
position in it, token by token, so the longest suffix that occurs anywhere in those texts is always
known; what followed its latest occurrence is the draft, as long as the match. The sequence's own
text is looked up as well (`NgramDrafter`); the longer match wins.

Bounds: a tenant has two automata. The younger is written until it holds half of the tenant's limit
and then becomes the elder, whose texts are dropped. All tenants together keep a bounded number of
tokens, about 130 bytes each; beyond that the least recently served tenant is forgotten.

Source: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), SAM-Decoding (arXiv 2411.10666).

Invariants: nothing of one tenant's text affects another's drafts, neither tokens nor speed. Output
never depends on it. When it loses: traffic without repetition, at a fifth of a microsecond per
remembered token, one or two per sequence and step for the search, and the memory above.
"""

from __future__ import annotations

from collections.abc import Sequence

import ridgeline._native as _native
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.base import NO_GUESS, LookupGuess, kind_of

MOST_TOKENS, MOST_IN_ALL = 16_384, 65_536
LEAST_MATCH = 2
BETWEEN = -1  # stands between two texts: no draft reaches over it
_WARM = 64  # tokens of its own text that a sequence is matched by at first
_Matches = list[tuple[_native.SuffixAutomaton, _native.SuffixMatch]]


class TenantTexts:
    """Recent responses to one tenant."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens // 2
        self.young, self.old = _native.SuffixAutomaton(), _native.SuffixAutomaton()

    @property
    def num_tokens(self) -> int:
        return self.young.num_tokens + self.old.num_tokens

    def add(self, tokens: Sequence[int]) -> None:
        self.young.feed([*tokens, BETWEEN])
        if self.young.num_tokens >= self._most:
            self.young, self.old = _native.SuffixAutomaton(), self.young


class SuffixDrafter:
    """Looks up suffixes in recent responses to the same tenant and in the sequence itself."""

    name = "suffix"

    def __init__(self, most_tokens: int = MOST_TOKENS, most_in_all: int = MOST_IN_ALL) -> None:
        self._most_tokens, self._most_in_all = most_tokens, most_in_all
        self._texts: dict[str, TenantTexts] = {}  # by tenant; the one served last is last
        self._matches: dict[int, _Matches] = {}
        self._num_prompt: dict[int, int] = {}

    def look(self, context: DraftContext, most: int) -> LookupGuess:
        self._num_prompt[context.seq_id] = context.num_prompt
        texts = self._texts.get(context.tenant)
        if texts is None:
            return NO_GUESS
        best, longest = NO_GUESS, LEAST_MATCH - 1
        for automaton, match in self._matches_for(context, texts):
            found = automaton.look(match, context.tokens, _WARM, longest, most, BETWEEN)
            if found is not None:
                longest, tokens = found
                best = LookupGuess(
                    tokens, tuple([kind_of(longest + i) for i in range(len(tokens))])
                )
        return best

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        """Remember the sequence's output for its tenant."""
        self._matches.pop(seq_id, None)
        num_prompt = self._num_prompt.pop(seq_id, None)
        if num_prompt is None or num_prompt >= len(tokens):
            return
        texts = self._texts.pop(tenant, None) or TenantTexts(self._most_tokens)
        texts.add(tokens[num_prompt:][-self._most_tokens // 2 :])
        self._texts[tenant] = texts
        while self.num_tokens > self._most_in_all and len(self._texts) > 1:
            self._texts.pop(next(iter(self._texts)))

    @property
    def num_tokens(self) -> int:
        """Tokens kept of all tenants together."""
        return sum(texts.num_tokens for texts in self._texts.values())

    def _matches_for(self, context: DraftContext, texts: TenantTexts) -> _Matches:
        """The sequence's matches in the texts kept now."""
        wanted = [texts.young, texts.old] if texts.old.num_tokens else [texts.young]
        matches = self._matches.get(context.seq_id, [])
        if [automaton for automaton, _ in matches] != wanted:
            had, num_read = dict(matches), max(0, len(context.tokens) - _WARM)
            matches = [(one, had.get(one) or _native.SuffixMatch(num_read)) for one in wanted]
            self._matches[context.seq_id] = matches
        return matches
