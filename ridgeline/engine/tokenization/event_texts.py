"""Adds text to events: the scheduler works in token ids, clients read text and use stop strings."""

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
ChoiceId = tuple[str, int]
Finish = Callable[[str, int, str], list[Event]]
"""Ends a choice at a stop string: (request id, index, string) → Finished, or [] if it ended."""


class EventTexts:
    """Adds the text to each Token and Finished. Owned by the engine thread.

    A token that ended its choice (end of sequence, a stop token) has no text, unless the sampling
    includes what stopped it. A stop string ends its choice in the step that completed it: if the
    scheduler has not ended the choice itself, `finish` does; otherwise its Finished is amended.
    Tokens that the same step produced after a stop string (accepted drafts) are neither delivered
    nor counted.
    """

    def __init__(self, tokenizer: Tokenizer, finish: Finish) -> None:
        self._tokenizer, self._finish = tokenizer, finish
        self._requests: dict[str, Request] = {}
        self._outputs: dict[ChoiceId, OutputText] = {}

    def begin(self, request: Request) -> None:
        """Call before the first event of a request."""
        self._requests[request.id] = request

    def end(self, request_id: str) -> None:
        """Call after the last event of a request."""
        request = self._requests.pop(request_id)
        for index in range(request.sampling.n):
            self._outputs.pop((request_id, index), None)

    def add_texts(self, events: Sequence[Event]) -> list[Event]:
        """The events of one commit, in order, with their texts."""
        with_text: list[Event] = []
        commit = _Commit(events)
        for place, event in enumerate(events):
            if isinstance(event, Token):
                output = self._output((event.request_id, event.index))
                if output.has_no_stops and not commit.endings:  # nearly always
                    text = output.push_token(event.token)
                    with_text.append(replace(event, text=text) if text else event)
                else:
                    with_text += self._token(event, output, commit, place)
            elif isinstance(event, Finished):
                with_text.append(self._finished(event, commit))
            else:
                with_text.append(event)
        return with_text

    def _token(self, event: Token, output: OutputText, commit: _Commit, place: int) -> list[Event]:
        choice = event.request_id, event.index
        if choice in commit.stopped:
            return []
        ending = commit.endings.get(choice)
        is_last = ending is not None and commit.num_after(choice, place) == 0
        if ending is not None and is_last and ending.reason == "stop" and not self._shows(event):
            text, stop = output.push_end(event.token)
        else:
            text, stop = output.push(event.token)
        events: list[Event] = [replace(event, text=text) if text else event]
        if stop is not None:
            num_after = commit.num_after(choice, place)
            commit.stopped[choice] = stop, num_after
            ended = [] if ending is not None else self._finish(*choice, stop)
            events += [_without_tokens(end, num_after) for end in ended]
        return events

    def _shows(self, event: Token) -> bool:
        """Whether what stops the request is shown."""
        return self._requests[event.request_id].sampling.include_stop_str_in_output

    def _finished(self, event: Finished, commit: _Commit) -> Finished:
        choice, text = (event.request_id, event.index), ""
        stop, num_after = commit.stopped.get(choice, (None, 0))
        event = _without_tokens(event, num_after)
        if stop is None:
            output = self._output(choice)
            text, stop = output.flush()
            if stop is None and isinstance(event.stop_reason, int):
                stop_reason = output.stop_tokens.get(event.stop_reason, event.stop_reason)
                event = replace(event, stop_reason=stop_reason)
        if stop is not None and event.reason != "abort":
            return replace(event, text=text, reason="stop", stop_reason=stop)
        return replace(event, text=text) if text else event

    def _output(self, choice: ChoiceId) -> OutputText:
        output = self._outputs.get(choice)
        if output is None:
            request = self._requests[choice[0]]
            output = OutputText.begin(self._tokenizer, request.prompt, request.sampling)
            self._outputs[choice] = output
        return output


class _Commit:
    """The events of one commit, indexed by choice."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self.endings = {(e.request_id, e.index): e for e in events if isinstance(e, Finished)}
        # The stop string of each choice that met one, and the number of tokens after it.
        self.stopped: dict[ChoiceId, tuple[str, int]] = {}

    def num_after(self, choice: ChoiceId, place: int) -> int:
        """How many tokens of the choice follow the event at index `place`."""
        places = self._token_places[choice]
        return len(places) - bisect_right(places, place)

    @cached_property
    def _token_places(self) -> dict[ChoiceId, list[int]]:
        """Indices of each choice's tokens; few commits need them."""
        places: dict[ChoiceId, list[int]] = {}
        for place, event in enumerate(self._events):
            if isinstance(event, Token):
                places.setdefault((event.request_id, event.index), []).append(place)
        return places


def _without_tokens(event: E, num_tokens: int) -> E:
    """A Finished that does not count the last `num_tokens` tokens."""
    if not num_tokens or not isinstance(event, Finished):
        return event
    usage = event.usage
    num_left = usage.completion_tokens - num_tokens
    return replace(event, usage=replace(usage, completion_tokens=num_left))
