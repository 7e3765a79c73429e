"""`/v1/completions`: choices as texts, whole and as chunks of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.records import TokenLogprobs
from ridgeline.serve.engine_protocol import ServedTokenizer
from ridgeline.serve.generation.collect import CollectedChoice
from ridgeline.serve.generation.stream import ChoiceUpdate, ResponseStream
from ridgeline.serve.openai.logprobs import (
    TextOffsets,
    TokenDecoder,
    TokenIdDecoder,
    completion_logprobs,
    limit_top,
    prompt_logprobs,
)
from ridgeline.serve.openai.objects import CompletionChoice, CompletionLogprobs
from ridgeline.serve.openai.schemas import CompletionRequest
from ridgeline.serve.openai.stream import OpenAIStream


class CompletionStream(OpenAIStream):
    """With `echo`, every choice opens with its prompt."""

    response_object = chunk_object = "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        stream: ResponseStream,
        model: str,
        tokenizer: ServedTokenizer,
        *,
        include_timings: bool = False,
    ) -> None:
        super().__init__(body, stream, model, include_timings=include_timings)
        self._body, self._request, self._tokenizer = body, stream.request, tokenizer
        self._decoder: TokenDecoder = (
            TokenIdDecoder(tokenizer) if body.return_tokens_as_token_ids else tokenizer
        )
        self._offsets: dict[int, TextOffsets] = {}  # of the choices that have begun
        self._prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}

    def chunk_choices(self, update: ChoiceUpdate) -> Sequence[Mapping[str, Any]]:
        """Always one entry."""
        choice = CollectedChoice(update)
        self._keep_prompt_logprobs(update.choice, choice)
        return [self._entry(update.choice, choice, opens=update.choice not in self._offsets)]

    def response_choices(self, choices: Sequence[CollectedChoice]) -> Sequence[Mapping[str, Any]]:
        """One text per choice."""
        for index, choice in enumerate(choices):
            self._keep_prompt_logprobs(index, choice)
        entries = []
        for index, choice in enumerate(choices):
            entry = self._entry(index, choice, opens=True)
            if self._body.prompt_logprobs is not None:
                positions = self._prompt_logprobs.get(self._prompt_of(index), ())
                limited = [limit_top(at, self._body.prompt_logprobs) for at in positions]
                entry["prompt_logprobs"] = prompt_logprobs(limited, self._decoder)
            entries.append(entry)
        return entries

    def _entry(self, index: int, choice: CollectedChoice, *, opens: bool) -> CompletionChoice:
        score_only = self._request.score_only
        echo = self._echo(index) if opens and self._body.echo else ""
        self._offsets.setdefault(index, TextOffsets())
        entry: CompletionChoice = {
            "index": index,
            "text": echo + ("" if score_only else choice.text),
            "logprobs": self._logprobs(index, choice, echo),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if score_only and choice.finished:
            entry |= {"finish_reason": "length", "stop_reason": None}
        if self._body.return_token_ids:
            entry["token_ids"] = [] if score_only else [event.token for event in choice.tokens]
            if opens:
                prompt = self._request.prompts[self._prompt_of(index)]
                entry["prompt_token_ids"] = list(prompt.tokens)
        return entry

    def _echo(self, index: int) -> str:
        """The choice's prompt as the client sent it, or decoded."""
        prompt = self._request.prompts[self._prompt_of(index)]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.tokens, skip_special_tokens=False)

    def _logprobs(
        self, index: int, choice: CollectedChoice, echo: str
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        tokens: list[int] = []
        positions: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        prompt = self._prompt_of(index)
        if echo and prompt in self._prompt_logprobs:
            tokens += self._request.prompts[prompt].tokens
            num_top = self._body.logprobs
            positions += [limit_top(at, num_top) for at in self._prompt_logprobs[prompt]]
            data = self._bytes(tokens, skip_special_tokens=False)
            offsets += self._offsets[index].add_prompt(echo, data)
        if not self._request.score_only:
            generated = [event.token for event in choice.tokens]
            tokens += generated
            positions += [event.logprobs for event in choice.tokens]
            skip = self._request.sampling.skip_special_tokens
            # behind all earlier tokens, even those whose text a stop string still holds back
            offsets += self._offsets[index].add(self._bytes(generated, skip_special_tokens=skip))
        texts = [self._decoder.decode([token], skip_special_tokens=False) for token in tokens]
        return completion_logprobs(positions, texts, self._decoder, offsets)

    def _bytes(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> list[bytes]:
        """What each token adds to the text."""
        bytes_of = self._tokenizer.bytes_of
        return [bytes_of(token, skip_special_tokens=skip_special_tokens) for token in tokens]

    def _keep_prompt_logprobs(self, index: int, choice: CollectedChoice) -> None:
        if choice.prompt_logprobs:
            self._prompt_logprobs[self._prompt_of(index)] = choice.prompt_logprobs

    def _prompt_of(self, index: int) -> int:
        return index // self._request.sampling.n
