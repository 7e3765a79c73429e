"""The voice of `/v1/chat/completions`: how updates and finished choices read in its JSON."""

from __future__ import annotations

from typing import Any

from ridgeline.records import Token
from ridgeline.serve.asks import Job, Update
from ridgeline.serve.choices import Choice, Tally
from ridgeline.serve.contract import Tokenizer
from ridgeline.serve.logprobs import IdNames, chat_logprobs, prompt_logprobs
from ridgeline.serve.requests import ChatRequest


class ChatVoice:
    """Renders one chat job. The first chunk of every choice carries the role."""

    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, job: Job, tokenizer: Tokenizer) -> None:
        self._request, self._job = request, job
        self._tokenizer = IdNames() if request.return_tokens_as_token_ids else tokenizer
        self._introduced: set[int] = set()

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """The `choices` entries of the chunks for this update: the role first, where it is due."""
        entries = []
        if update.choice not in self._introduced:
            self._introduced.add(update.choice)
            entries.append(_entry(update.choice, {"role": "assistant", "content": ""}))
        choice = Choice()
        choice.add(update)
        delta = {"content": update.text} if update.token or update.text else {}
        entries.append(
            {
                **_entry(update.choice, delta),
                "logprobs": self._logprobs(choice.tokens) if choice.tokens else None,
                **choice.ending,
                **self._token_ids(choice),
            }
        )
        return entries

    def choices(self, tally: Tally) -> list[dict[str, Any]]:
        """The `choices` of a whole answer."""
        return [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                **choice.ending,
                **self._token_ids(choice),
            }
            for index, choice in enumerate(tally.choices)
        ]

    def extras(self, tally: Tally) -> dict[str, Any]:
        """`prompt_logprobs`, which a chat answer carries beside its choices, when asked for."""
        if self._request.prompt_logprobs is None:
            return {}
        known = next((c.prompt_logprobs for c in tally.choices if c.prompt_logprobs), ())
        return {"prompt_logprobs": prompt_logprobs(known, self._tokenizer)}

    def _token_ids(self, choice: Choice) -> dict[str, list[int]]:
        if not self._request.return_token_ids:
            return {}
        return {"token_ids": [event.token for event in choice.tokens]}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs([at.logprobs for at in tokens if at.logprobs], self._tokenizer)


def _entry(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
