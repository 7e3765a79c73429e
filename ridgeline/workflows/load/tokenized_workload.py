"""A workload as token ids, and the statistics of its requests that need no run.

Prompts are tokenised before a run: the load client shares the process with the engine and should
cost it as little as possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import msgspec

from ridgeline.diagnose.conditions import Value
from ridgeline.engine.tokenization import NoTokenizer, Tokenizer
from ridgeline.errors import BadInput
from ridgeline.measure.workload import ChatPrompt, LoadRequest, Workload, plain_chat
from ridgeline.records.traffic import LengthProfile, TrafficProfile

NUM_SAMPLES = 64  # requests that the workload's facts are taken from
NUM_PROFILED = 256  # requests that its recorded shape is taken from
NUM_CHECK_PROMPTS, CHECK_PROMPT_TOKENS = 4, 160
BLOCK_TOKENS = 16


class TokenizedWorkload:
    """A workload whose prompts are token ids. Samples are kept by their number and seed."""

    def __init__(self, workload: Workload, tokenizer: Tokenizer) -> None:
        self._workload, self._tokenizer = workload, tokenizer
        self.requests = cache(self._requests)

    @property
    def name(self) -> str:
        return self._workload.name

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        return iter(self.requests(n, seed))

    def _requests(self, n: int, seed: int) -> tuple[LoadRequest, ...]:
        return tuple(
            msgspec.structs.replace(request, prompt=tuple(self._tokens(request)))
            for request in self._workload.sample(n, seed)
        )

    def _tokens(self, request: LoadRequest) -> Sequence[int]:
        if isinstance(request.prompt, tuple):
            return request.prompt
        if isinstance(self._tokenizer, NoTokenizer):
            raise BadInput(
                f"{self._tokenizer.model} has no tokenizer here for the workload's texts",
                value=self._tokenizer.reason,
                fix="name a MODEL with a tokenizer: a directory, a .gguf file or a model of the "
                "Hugging Face Hub; or choose --workload synthetic:… (prompts of token ids)",
            )
        if isinstance(request.prompt, str):
            return self._tokenizer.encode(request.prompt)
        return self._chat_tokens(request.prompt)

    def _chat_tokens(self, chat: ChatPrompt) -> Sequence[int]:
        """By the model's chat template; as plain text if it has none."""
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        try:
            return self._tokenizer.apply_chat_template(messages)
        except BadInput:
            return self._tokenizer.encode(plain_chat(chat))


def sample_requests(workload: TokenizedWorkload, max_model_len: int) -> list[LoadRequest]:
    """Requests to take the workload's facts from. BadInput if one does not fit the context."""
    sample = list(workload.sample(NUM_SAMPLES, 0))
    longest = max(len(prompt_of(request)) + request.max_tokens for request in sample)
    if longest > max_model_len:
        raise BadInput(
            "a request of the workload does not fit the context",
            value=f"{longest} tokens",
            limit=f"--max-model-len {max_model_len}",
            fix="choose a workload with shorter prompts or a model with a longer context",
        )
    return sample


def prompt_of(request: LoadRequest) -> tuple[int, ...]:
    """The token ids of a tokenised request."""
    assert isinstance(request.prompt, tuple)
    return request.prompt


def check_prompts(sample: Sequence[LoadRequest]) -> tuple[tuple[int, ...], ...]:
    """The ends of a few prompts, for the exactness check."""
    return tuple(
        prompt_of(request)[-CHECK_PROMPT_TOKENS:] for request in sample[:NUM_CHECK_PROMPTS]
    )


def workload_facts(sample: Sequence[LoadRequest]) -> dict[str, Value]:
    """Mean lengths, and the share of prompt tokens that repeats the start of an earlier prompt."""
    return {
        "shared_prompt_share": shared_prompt_share(sample),
        "mean_prompt_tokens": sum(len(prompt_of(request)) for request in sample) / len(sample),
        "mean_output_tokens": sum(request.max_tokens for request in sample) / len(sample),
    }


def traffic_profile(sample: Sequence[LoadRequest]) -> TrafficProfile:
    """The shape of a workload, which `ridgeline watch` compares with live traffic."""
    return TrafficProfile(
        num_requests=len(sample),
        prompt=LengthProfile.of(tuple(len(prompt_of(request)) for request in sample)),
        output=LengthProfile.of(tuple(request.max_tokens for request in sample)),
        shared_share=shared_prompt_share(sample),
    )


def shared_prompt_share(sample: Sequence[LoadRequest]) -> float:
    """Share of prompt tokens, in whole blocks, that repeat the start of an earlier prompt."""
    seen: set[tuple[int, ...]] = set()
    shared = total = 0
    for request in sample:
        tokens = prompt_of(request)
        prefixes = [tokens[:end] for end in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS)]
        shared += BLOCK_TOKENS * sum(prefix in seen for prefix in prefixes)
        total += len(tokens)
        seen.update(prefixes)
    return shared / total
