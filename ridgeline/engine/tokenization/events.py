"""Text for events: the scheduler speaks in token ids, users read text and wait for stop strings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

from msgspec.structs import replace

from ridgeline.engine.tokenization.output import OutputText
from ridgeline.engine.tokenization.tokenizer import Tokenizer
from ridgeline.records import Event, Finished, Request, Token

E = TypeVar("E", bound=Event)
Choice = tuple[str, int]
Finish = Callable[[str, int, str], list[Event]]
"""End a choice because of a stop string: (request id, choice, string) → its Finished, unless it ended.
"""


class EventTexts:
    """Puts the text to each Token and Finished. Owned by the engine thread.

    A token that ended its choice (end of sequence, a stop token) has no text, unless the sampling
    includes what stopped it. A stop string ends its choice in the step that completed it: what the
    scheduler did not end itself is ended by `finish`, what it did is amended. Tokens that the same
    step gave after a stop string (accepted drafts) are neither told nor counted.
    """

    def __init__(self, tokenizer: Tokenizer, finish: Finish) -> None:
        self._tokenizer, self._finish = tokenizer, finish
        self._requests: dict[str, Request] = {}
        self._outputs: dict[Choice, OutputText] = {}

    def begin(self, request: Request) -> None:
        """Events of `request` will come."""
        self._requests[request.id] = request

    def end(self, request_id: str) -> None:
        """No more of them will."""
        request = self._requests.pop(request_id)
        for index in range(request.sampling.n):
            self._outputs.pop((request_id, index), None)

    def put(self, events: Sequence[Event]) -> list[Event]:
        """The events of one commit, in order, with their texts."""
        told: list[Event] = []
        commit = _Commit(events)
        for place, event in enumerate(events):
            if isinstance(event, Token):
                output = self._output((event.request_id, event.index))
                if output.is_free and not commit.endings:  # nearly always
                    text = output.grow(event.token)
                    told.append(replace(event, text=text) if text else event)
                else:
                    told += self._token(event, output, commit, place)
            elif isinstance(event, Finished):
                told.append(self._finished(event, commit))
            else:
                told.append(event)
        return told

    def _token(self, event: Token, output: OutputText, commit: _Commit, place: int) -> list[Event]:
        choice = event.request_id, event.index
        if choice in commit.stopped:
            return []
        ending = commit.endings.get(choice)
        if ending is not None and self._is_silent(ending) and not commit.num_after(choice, place):
            return [event]
        text, stop = output.push(event.token)
        told: list[Event] = [replace(event, text=text) if text else event]
        if stop is not None:
            num_after = commit.num_after(choice, place)
            commit.stopped[choice] = stop, num_after
            ended = [] if ending is not None else self._finish(*choice, stop)
            told += [_shortened(each, num_after) for each in ended]
        return told

    def _is_silent(self, ending: Finished) -> bool:
        """Did its last token end it, and is not to be shown?"""
        sampling = self._requests[ending.request_id].sampling
        return ending.reason == "stop" and not sampling.include_stop_str_in_output

    def _finished(self, event: Finished, commit: _Commit) -> Finished:
        choice, text = (event.request_id, event.index), ""
        stop, num_after = commit.stopped.get(choice, (None, 0))
        event = _shortened(event, num_after)
        if stop is None:
            text, stop = self._output(choice).flush()
        if stop is not None and event.reason != "abort":
            return replace(event, text=text, reason="stop", stop_reason=stop)
        return replace(event, text=text) if text else event

    def _output(self, choice: Choice) -> OutputText:
        found = self._outputs.get(choice)
        if found is None:
            request = self._requests[choice[0]]
            found = OutputText.begin(self._tokenizer, request.prompt, request.sampling)
            self._outputs[choice] = found
        return found


class _Commit:
    """What is known of one commit's events while they are being told."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self.endings = {(e.request_id, e.index): e for e in events if isinstance(e, Finished)}
        self.stopped: dict[Choice, tuple[str, int]] = {}  # the string, and how many tokens too many

    def num_after(self, choice: Choice, place: int) -> int:
        """How many tokens of the choice follow the one at `place`."""
        places = self._places[choice]
        return len(places) - bisect_right(places, place)

    @cached_property
    def _places(self) -> dict[Choice, list[int]]:
        """Where each choice's tokens stand; few commits are asked."""
        found: dict[Choice, list[int]] = {}
        for place, event in enumerate(self._events):
            if isinstance(event, Token):
                found.setdefault((event.request_id, event.index), []).append(place)
        return found


def _shortened(event: E, num_tokens: int) -> E:
    """An ending that does not count the last `num_tokens` tokens."""
    if not num_tokens or not isinstance(event, Finished):
        return event
    usage = event.usage
    num_left = usage.completion_tokens - num_tokens
    return replace(event, usage=replace(usage, completion_tokens=num_left))
