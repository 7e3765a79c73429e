"""The voice of `/v1/completions`: how updates and finished choices read in its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.records import TokenLogprobs
from ridgeline.serve.engine_protocol import Tokenizer
from ridgeline.serve.generation.collect import Choice, Tally
from ridgeline.serve.generation.stream import Job, Update
from ridgeline.serve.openai.logprobs import (
    IdNames,
    Offsets,
    completion_logprobs,
    prompt_logprobs,
    trimmed,
)
from ridgeline.serve.openai.schemas import CompletionRequest

OBJECT = "text_completion"
PromptLogprobs = tuple[TokenLogprobs | None, ...]


class CompletionVoice:
    """Renders one completion job. With `echo`, every choice opens with its prompt."""

    chunk_object = answer_object = OBJECT

    def __init__(self, request: CompletionRequest, job: Job, tokenizer: Tokenizer) -> None:
        self._request, self._job = request, job
        self._names = IdNames(tokenizer) if request.return_tokens_as_token_ids else tokenizer
        self._decode, self._bytes_of = tokenizer.decode, tokenizer.bytes_of
        self._offsets: dict[int, Offsets] = {}  # by choice that has begun: of the tokens told
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        more = request.logprobs is not None or request.return_token_ids or job.scores_only
        self._is_only_text = not more

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """The `choices` entries of the chunk for this update (always one)."""
        choice = Choice()
        choice.add(update)
        self._learn(update)
        opens = update.choice not in self._offsets
        return [self._render(update.choice, choice, opens=opens)]

    def only_text(self, update: Update) -> str | None:
        """See `Wording`: not where a choice opens or ends, or more than its text is asked for."""
        if update.finished or not self._is_only_text or update.choice not in self._offsets:
            return None
        return update.text

    def opening_entries(self) -> list[dict[str, Any]] | None:
        """See `Wording`: nothing opens a choice but its prompt."""
        return [] if self._is_only_text and not self._request.echo else None

    def was_opened(self) -> None:
        """See `Wording`."""
        self._offsets[0] = Offsets()

    def text_entry(self, choice: int, text: str) -> dict[str, Any]:
        """The entry of a chunk that says only this."""
        nothing = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        return {"index": choice, "text": text, **nothing}

    def choices(self, tally: Tally) -> list[dict[str, Any]]:
        """The `choices` of a whole answer."""
        for index, choice in enumerate(tally.choices):
            if choice.prompt_logprobs:
                self._prompt_logprobs[self._prompt_of(index)] = choice.prompt_logprobs
        rendered = []
        for index, choice in enumerate(tally.choices):
            entry = self._render(index, choice, opens=True)
            if self._request.prompt_logprobs is not None:
                known = self._prompt_logprobs.get(self._prompt_of(index), ())
                num_top = self._request.prompt_logprobs
                cut = [trimmed(at, num_top) for at in known]
                entry["prompt_logprobs"] = prompt_logprobs(cut, self._names)
            rendered.append(entry)
        return rendered

    def extras(self, _tally: Tally) -> dict[str, Any]:
        """Fields of the answer beside `choices` and `usage`: none."""
        return {}

    def _render(self, index: int, choice: Choice, *, opens: bool) -> dict[str, Any]:
        echo = self._echo(index) if opens and self._request.echo else ""
        text = echo + ("" if self._job.scores_only else choice.text)
        self._offsets.setdefault(index, Offsets())
        logprobs = self._logprobs(index, choice, echo)
        ending = choice.ending
        if self._job.scores_only and choice.finished:
            ending = {"finish_reason": "length", "stop_reason": None}
        ids = self._token_ids(index, choice, opens=opens) if self._request.return_token_ids else {}
        return {"index": index, "text": text, "logprobs": logprobs, **ending, **ids}

    def _echo(self, index: int) -> str:
        """The choice's prompt as the client would recognise it."""
        prompt = self._job.prompts[self._prompt_of(index)]
        if prompt.text is not None:
            return prompt.text
        return self._decode(prompt.tokens, skip_special_tokens=False)

    def _token_ids(self, index: int, choice: Choice, *, opens: bool) -> dict[str, list[int]]:
        """The tokens of this text, and the prompt's where the choice opens."""
        tokens = [] if self._job.scores_only else [event.token for event in choice.tokens]
        prompt = list(self._job.prompts[self._prompt_of(index)].tokens)
        return {"token_ids": tokens} | ({"prompt_token_ids": prompt} if opens else {})

    def _logprobs(self, index: int, choice: Choice, echo: str) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        tokens: list[int] = []
        positions: list[TokenLogprobs | None] = []
        offsets: list[int] = []  # behind those told before, whatever a stop string holds back
        prompt = self._prompt_of(index)
        if echo and prompt in self._prompt_logprobs:
            tokens += self._job.prompts[prompt].tokens
            num_top = self._request.logprobs
            positions += [trimmed(at, num_top) for at in self._prompt_logprobs[prompt]]
            written = self._written(tokens, skip_special_tokens=False)
            offsets += self._offsets[index].of_prompt(echo, written)
        if not self._job.scores_only:
            said = [event.token for event in choice.tokens]
            tokens += said
            positions += [event.logprobs for event in choice.tokens]
            skip = self._job.sampling.skip_special_tokens
            offsets += self._offsets[index].of(self._written(said, skip_special_tokens=skip))
        named = [self._names.decode([token], skip_special_tokens=False) for token in tokens]
        return completion_logprobs(positions, named, self._names, offsets)

    def _written(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> list[bytes]:
        """What each token adds to the text."""
        return [self._bytes_of(each, skip_special_tokens=skip_special_tokens) for each in tokens]

    def _learn(self, update: Update) -> None:
        if update.token and update.token.prompt_logprobs:
            prompt = self._prompt_of(update.choice)
            self._prompt_logprobs[prompt] = update.token.prompt_logprobs

    def _prompt_of(self, index: int) -> int:
        return index // self._job.sampling.n
