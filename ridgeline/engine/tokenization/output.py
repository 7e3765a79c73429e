"""The text of one choice as it grows: detokeniser, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.tokenization.detokenize import Detokenizer
from ridgeline.engine.tokenization.stop import NoStops, Stops, make_stops
from ridgeline.engine.tokenization.tokenizer import Tokenizer
from ridgeline.records import Sampling


class OutputText:
    """Tokens in, certain text out. Stop strings count from the token after `min_tokens` on."""

    def __init__(self, detokenizer: Detokenizer, stops: Stops, *, min_tokens: int = 0) -> None:
        self._detokenizer, self._stops = detokenizer, stops
        self._unchecked = min_tokens
        self.is_free = isinstance(stops, NoStops)  # it can end at no string
        self.grow = detokenizer.push  # `push` where it is free

    @staticmethod
    def begin(tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling) -> OutputText:
        """For one choice of a request."""
        return OutputText(
            tokenizer.detokenizer(prompt, skip_special_tokens=sampling.skip_special_tokens),
            make_stops(sampling.stop, include=sampling.include_stop_str_in_output),
            min_tokens=sampling.min_tokens,
        )

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that became certain, and the stop string if it ended with this token."""
        text = self._detokenizer.push(token)
        if self._unchecked > 0:
            self._unchecked -= 1
            return text, None
        return self._stops.push(text)

    def flush(self) -> tuple[str, str | None]:
        """What was held back: the end of the answer, or a stop string that only now is complete."""
        text, stop = self._stops.push(self._detokenizer.flush())
        return (text, stop) if stop else (text + self._stops.flush(), None)
