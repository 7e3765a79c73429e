"""Text for events: the scheduler speaks in token ids, users read text and wait for stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ridgeline.engine.text.output import OutputText
from ridgeline.engine.text.tokenizer import Tokenizer
from ridgeline.records import Ask, Event, Finished, Token

Choice = tuple[str, int]
Finish = Callable[[str, int, str], list[Event]]
"""End a choice because of a stop string: (ask id, choice, string) → its Finished, unless it ended.
"""


class EventTexts:
    """Puts the text to each Token and Finished. Owned by the engine thread.

    A token that ended its choice (end of sequence, a stop token) has no text, unless the sampling
    includes what stopped it. A stop string ends its choice in the step that completed it: what the
    scheduler did not end itself is ended by `finish`, what it did is amended.
    """

    def __init__(self, tokenizer: Tokenizer, finish: Finish) -> None:
        self._tokenizer, self._finish = tokenizer, finish
        self._asks: dict[str, Ask] = {}
        self._outputs: dict[Choice, OutputText] = {}

    def begin(self, ask: Ask) -> None:
        """Events of `ask` will come."""
        self._asks[ask.id] = ask

    def end(self, ask_id: str) -> None:
        """No more of them will."""
        ask = self._asks.pop(ask_id)
        for index in range(ask.sampling.n):
            self._outputs.pop((ask_id, index), None)

    def put(self, events: Sequence[Event]) -> list[Event]:
        """The events of one commit, in order, with their texts."""
        told: list[Event] = []
        stopped: dict[Choice, str] = {}
        last = {(e.ask_id, e.index): e for e in events if isinstance(e, Finished)}
        for event in events:
            if isinstance(event, Token):
                told += self._token(event, last.get((event.ask_id, event.index)), stopped)
            elif isinstance(event, Finished):
                told.append(self._finished(event, stopped.get((event.ask_id, event.index))))
            else:
                told.append(event)
        return told

    def _token(
        self, event: Token, ending: Finished | None, stopped: dict[Choice, str]
    ) -> list[Event]:
        choice = event.ask_id, event.index
        if choice in stopped:
            return []
        if ending is not None and self._is_silent(ending):
            return [event]
        text, stop = self._output(choice).push(event.token)
        told: list[Event] = [replace(event, text=text) if text else event]
        if stop is not None:
            stopped[choice] = stop
            told += [] if ending is not None else self._finish(*choice, stop)
        return told

    def _is_silent(self, ending: Finished) -> bool:
        """Did a token end it that is not to be shown? (One step of a choice gives one token.)"""
        sampling = self._asks[ending.ask_id].sampling
        return ending.reason == "stop" and not sampling.include_stop_str_in_output

    def _finished(self, event: Finished, stop: str | None) -> Finished:
        text = ""
        if stop is None:
            text, stop = self._output((event.ask_id, event.index)).flush()
        if stop is not None and event.reason != "abort":
            return replace(event, text=text, reason="stop", stop_reason=stop)
        return replace(event, text=text) if text else event

    def _output(self, choice: Choice) -> OutputText:
        found = self._outputs.get(choice)
        if found is None:
            ask = self._asks[choice[0]]
            found = OutputText.begin(self._tokenizer, ask.prompt, ask.sampling)
            self._outputs[choice] = found
        return found
