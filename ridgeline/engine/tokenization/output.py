"""The text of one choice as it grows: detokeniser, then stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.engine.tokenization.detokenize import Detokenizer
from ridgeline.engine.tokenization.stop import NoStops, StopMatcher, make_stops
from ridgeline.engine.tokenization.tokenizer import Tokenizer
from ridgeline.records import Sampling


class OutputText:
    """Turns tokens into text that can be delivered.

    Stop strings are matched from the token after `min_tokens` on. `stop_tokens`: the special tokens
    that stop the output, each with the stop string that requested it. `skipped`: the special tokens
    that the detokeniser shows for the sake of stop strings and that are not delivered, with their
    texts.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        *,
        min_tokens: int = 0,
        stop_tokens: Mapping[int, str] | None = None,
        skipped: Mapping[int, str] | None = None,
    ) -> None:
        self._detokenizer, self._stops = detokenizer, stops
        self.stop_tokens, self._skipped = stop_tokens or {}, skipped or {}
        self._num_unmatched = min_tokens
        self.has_no_stops = isinstance(stops, NoStops)
        self.push_token = detokenizer.push  # a faster `push` for outputs without stop strings

    @staticmethod
    def begin(tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling) -> OutputText:
        """The output of one choice of a request."""
        stop_tokens = special_stops(sampling, tokenizer)
        skipped = _skipped_in_stops(sampling, tokenizer, stop_tokens)
        shown = *sampling.shown_special_tokens, *stop_tokens.values(), *skipped.values()
        over_special = [s for s in sampling.stop if any(mark in s for mark in skipped.values())]
        visible = [stop for stop in sampling.stop if stop not in over_special]
        return OutputText(
            tokenizer.detokenizer(
                prompt,
                skip_special_tokens=sampling.skip_special_tokens,
                shown_special_tokens=shown,
            ),
            make_stops(
                visible, include=sampling.include_stop_str_in_output, over_special=over_special
            ),
            min_tokens=sampling.min_tokens,
            stop_tokens=stop_tokens,
            skipped=skipped,
        )

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that can now be delivered, and the stop string that ends it, if any."""
        text, mark = self._detokenizer.push(token), self._skipped.get(token, "")
        text = text.removesuffix(mark)
        if self._num_unmatched > 0:
            self._num_unmatched -= 1
            return text, None
        return self._stops.push(text, mark)

    def flush(self) -> tuple[str, str | None]:
        """The text held back until the end, and the stop string that it completes, if any."""
        text, stop = self._stops.push(self._detokenizer.flush())
        return (text, stop) if stop else (text + self._stops.flush(), None)


def special_stops(sampling: Sampling, tokenizer: Tokenizer) -> dict[int, str]:
    """The stop strings that are special tokens, by token id.

    Their text is skipped in an output, where a stop string would never be found.
    """
    ids = {text: tokenizer.special_token_id(text) for text in sampling.stop}
    return {token: text for text, token in ids.items() if token is not None}


def _skipped_in_stops(
    sampling: Sampling, tokenizer: Tokenizer, stop_tokens: Mapping[int, str]
) -> dict[int, str]:
    """The skipped special tokens that stop strings contain among other text, by token id."""
    if not sampling.stop or not sampling.skip_special_tokens:
        return {}
    shown = {*sampling.shown_special_tokens, *stop_tokens.values()}
    return {
        token: text
        for text, token in tokenizer.special_tokens.items()
        if text and text not in shown and any(text in stop for stop in sampling.stop)
    }
