"""The text of one choice as it grows: detokeniser, then stop strings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ridgeline.engine.tokenization.detokenize import Detokenizer
from ridgeline.engine.tokenization.stop import NoStops, StopMatcher, make_stops
from ridgeline.engine.tokenization.tokenizer import Tokenizer
from ridgeline.records import Sampling


class OutputText:
    """Turns tokens into text that can be delivered.

    A stop string may end with the token after `min_tokens`, and not before. `stop_tokens`: the
    special tokens that stop the output, each with the stop string that requested it. `marks`: the
    special tokens that stop strings contain among other text, with their texts; those that are in
    `skipped` are not in the text of the detokeniser.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        *,
        min_tokens: int = 0,
        stop_tokens: Mapping[int, str] | None = None,
        marks: Mapping[int, str] | None = None,
        skipped: Collection[int] = (),
    ) -> None:
        self._detokenizer, self._stops = detokenizer, stops
        self.stop_tokens, self._marks, self._skipped = stop_tokens or {}, marks or {}, skipped
        self._num_early = min_tokens
        self.has_no_stops = isinstance(stops, NoStops)
        self.push_token = detokenizer.push  # a faster `push` for outputs without stop strings

    @staticmethod
    def begin(tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling) -> OutputText:
        """The output of one choice of a request."""
        stop_tokens = special_stops(sampling, tokenizer)
        mixed = [stop for stop in sampling.stop if stop not in stop_tokens.values()]
        marks = _marks_in(mixed, tokenizer)
        over_special = [stop for stop in mixed if any(mark in stop for mark in marks.values())]
        visible = [stop for stop in sampling.stop if stop not in over_special]
        shown = {*sampling.shown_special_tokens, *stop_tokens.values()}
        skipped = [token for token, text in marks.items() if text not in shown]
        return OutputText(
            tokenizer.detokenizer(
                prompt,
                skip_special_tokens=sampling.skip_special_tokens,
                shown_special_tokens=tuple(shown),
            ),
            make_stops(
                visible, include=sampling.include_stop_str_in_output, over_special=over_special
            ),
            min_tokens=sampling.min_tokens,
            stop_tokens=stop_tokens,
            marks=marks,
            skipped=skipped if sampling.skip_special_tokens else (),
        )

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that can now be delivered, and the stop string that ends it, if any."""
        text = self._detokenizer.push(token)
        return self._match(text, self._marks[token] if token in self._skipped else "")

    def push_end(self, token: int) -> tuple[str, str | None]:
        """As `push`, for a token that ends the output and is not delivered: it has no text, but may
        be the special token with which a stop string ends."""
        mark = self._marks.get(token)
        return ("", None) if mark is None else self._match(self._detokenizer.flush(), mark)

    def _match(self, text: str, mark: str) -> tuple[str, str | None]:
        may_stop = self._num_early <= 0
        self._num_early -= 1
        return self._stops.push(text, mark, may_stop=may_stop)

    def flush(self) -> tuple[str, str | None]:
        """The text held back until the end, and the stop string that it completes, if any."""
        text, stop = self._stops.push(self._detokenizer.flush(), may_stop=self._num_early <= 0)
        return (text, stop) if stop else (text + self._stops.flush(), None)


def special_stops(sampling: Sampling, tokenizer: Tokenizer) -> dict[int, str]:
    """The stop strings that are special tokens, by token id.

    Their text is skipped in an output, where a stop string would never be found.
    """
    ids = {text: tokenizer.special_token_id(text) for text in sampling.stop}
    return {token: text for text, token in ids.items() if token is not None}


def _marks_in(stops: Sequence[str], tokenizer: Tokenizer) -> dict[int, str]:
    """The special tokens that stop strings contain, by token id."""
    if not stops:
        return {}
    special = tokenizer.special_tokens.items()
    return {token: text for text, token in special if text and any(text in s for s in stops)}
