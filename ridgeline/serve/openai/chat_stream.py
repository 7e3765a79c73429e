"""The voice of `/v1/chat/completions`: how updates and finished choices read in its JSON."""

from __future__ import annotations

from typing import Any

from ridgeline.records import Token
from ridgeline.serve.engine_protocol import Tokenizer
from ridgeline.serve.generation.collect import Choice, Tally
from ridgeline.serve.generation.stream import Job, Update
from ridgeline.serve.ids import fresh_id
from ridgeline.serve.openai.logprobs import IdNames, chat_logprobs, prompt_logprobs
from ridgeline.serve.openai.schemas import ChatRequest
from ridgeline.serve.output_parsers.base import Call, Content, Part, Plain, Reader, Reasoning
from ridgeline.serve.output_parsers.select import Dialect


class Listener:
    """Follows one choice: its text as parts, its calls counted."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect, self._reader = dialect, dialect.reader()
        self.is_plain = isinstance(self._reader, Plain)  # every part is content, as it comes
        self.num_calls = 0
        self.introduced = False

    def hear(self, text: str, *, ended: bool) -> list[Part]:
        """The parts of the next piece of text; of all that is left where the choice `ended`."""
        reader: Reader = self._reader
        parts = reader.feed(text) if text else []
        return self._counted(parts + (reader.end() if ended else []))

    def reason(self, reason: str | None) -> str | None:
        """Why the choice ended, knowing of its calls."""
        called = self.num_calls and self._dialect.calls_finish and reason == "stop"
        return "tool_calls" if called else reason

    def _counted(self, parts: list[Part]) -> list[Part]:
        kept, most = [], self._dialect.most_calls
        for part in parts:
            if isinstance(part, Call):
                if most is not None and self.num_calls >= most:
                    continue
                self.num_calls += 1
            kept.append(part)
        return kept


class ChatVoice:
    """Renders one chat job. The first chunk of every choice carries the role."""

    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, request: ChatRequest, job: Job, tokenizer: Tokenizer, dialect: Dialect
    ) -> None:
        self._request, self._job = request, job
        self._tokenizer = IdNames(tokenizer) if request.return_tokens_as_token_ids else tokenizer
        self._is_only_text = not (request.logprobs or request.return_token_ids)
        self._listeners = [Listener(dialect) for _ in range(job.sampling.n)]

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """The `choices` entries of the chunks for this update: the role first, where it is due."""
        entries, listener = [], self._listeners[update.choice]
        if not listener.introduced:
            listener.introduced = True
            entries.append(_role(update.choice))
        choice = Choice()
        choice.add(update)
        first_call = listener.num_calls
        parts = listener.hear(update.text, ended=update.finished is not None)
        delta = _delta(parts, first_call)
        if update.token and not delta:
            delta = {"content": ""}  # a token came, whatever its text: clients count them
        entries.append(
            {
                **_entry(update.choice, delta),
                "logprobs": self._logprobs(choice.tokens) if choice.tokens else None,
                **_ending(choice, listener),
                **self._token_ids(choice),
            }
        )
        return entries

    def only_text(self, update: Update) -> str | None:
        """See `Wording`: not where a choice opens or ends, or its text has to be read."""
        listener = self._listeners[update.choice]
        if update.finished or not (self._is_only_text and listener.is_plain):
            return None
        return update.text if listener.introduced else None

    def opening_entries(self) -> list[dict[str, Any]] | None:
        """See `Wording`: the role opens a choice."""
        return [_role(0)] if self._is_only_text and self._listeners[0].is_plain else None

    def was_opened(self) -> None:
        """See `Wording`."""
        self._listeners[0].introduced = True

    def text_entry(self, choice: int, text: str) -> dict[str, Any]:
        """The entry of a chunk that says only this."""
        return {**_entry(choice, {"content": text}), "stop_reason": None}

    def choices(self, tally: Tally) -> list[dict[str, Any]]:
        """The `choices` of a whole answer."""
        return [self._whole(index, choice) for index, choice in enumerate(tally.choices)]

    def extras(self, tally: Tally) -> dict[str, Any]:
        """`prompt_logprobs`, which a chat answer carries beside its choices, when asked for."""
        if self._request.prompt_logprobs is None:
            return {}
        known = next((c.prompt_logprobs for c in tally.choices if c.prompt_logprobs), ())
        return {"prompt_logprobs": prompt_logprobs(known, self._tokenizer)}

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        listener = self._listeners[index]
        parts = listener.hear(choice.text, ended=True)
        return {
            "index": index,
            "message": _message(parts),
            "logprobs": self._logprobs(choice.tokens),
            **_ending(choice, listener),
            **self._token_ids(choice),
        }

    def _token_ids(self, choice: Choice) -> dict[str, list[int]]:
        if not self._request.return_token_ids:
            return {}
        return {"token_ids": [event.token for event in choice.tokens]}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs([at.logprobs for at in tokens if at.logprobs], self._tokenizer)


def call_id() -> str:
    """An id that nobody has used."""
    return fresh_id("call_", 24)


def text_of(parts: list[Part], kind: type[Content] | type[Reasoning]) -> str:
    """All text of one kind."""
    return "".join(part.text for part in parts if isinstance(part, kind))


def _entry(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _role(index: int) -> dict[str, Any]:
    return _entry(index, {"role": "assistant", "content": ""})


def _ending(choice: Choice, listener: Listener) -> dict[str, Any]:
    ending = choice.ending
    return {**ending, "finish_reason": listener.reason(ending["finish_reason"])}


def _delta(parts: list[Part], first_call: int) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if reasoning := text_of(parts, Reasoning):
        delta["reasoning_content"] = reasoning
    if content := text_of(parts, Content):
        delta["content"] = content
    calls = [part for part in parts if isinstance(part, Call)]
    if calls:
        numbered = enumerate(calls, first_call)
        delta["tool_calls"] = [{"index": at, **_call(call)} for at, call in numbered]
    return delta


def _message(parts: list[Part]) -> dict[str, Any]:
    calls = [_call(part) for part in parts if isinstance(part, Call)]
    content, reasoning = text_of(parts, Content), text_of(parts, Reasoning)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}
