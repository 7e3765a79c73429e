"""The tokenizer that `--tokenizer` names: for servers that do not count, and to compare servers."""

from __future__ import annotations

from functools import cache

import msgspec

from ridgeline.config.load import BenchOptions
from ridgeline.errors import BadInput
from ridgeline.hub.download import ensure_downloaded
from ridgeline.measure.bench_options import workload_of
from ridgeline.measure.client.accepted_prompts import COMMON_WORDS, CountTokens, Vocabulary
from ridgeline.measure.metrics.latency import successful_requests
from ridgeline.measure.workload import ChatPrompt, Prompt, plain_chat
from ridgeline.records import RunTrace


@cache
def vocabulary_of(name: str | None) -> Vocabulary:
    """The vocabulary of a model's tokenizer; common words without a name. Raises UserError."""
    if name is None:
        return COMMON_WORDS
    from ridgeline.engine.tokenization import NoTokenizer, load_tokenizer

    ensure_downloaded(name)
    tokenizer = load_tokenizer(name)
    if isinstance(tokenizer, NoTokenizer):
        raise BadInput(
            "--tokenizer names a model without a readable tokenizer",
            value=name,
            fix="name a model directory, a .gguf file or a model of the Hugging Face Hub",
        )

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return Vocabulary(decode=tokenizer.decode, count_tokens=count, name=name)


class NormalisedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of a run in the tokens of one tokenizer, so that servers can be compared.

    `input_tokens` are those of the workload's texts, without chat templates; None for prompts of
    token ids, and for later turns of conversations.
    """

    tokenizer: str
    output_tokens: int
    output_tok_s: float
    input_tokens: int | None


def normalised_tokens(
    run: RunTrace, options: BenchOptions, tokenizer: str | None
) -> NormalisedTokens | None:
    """Count the answers of a run, and its prompts, again. None without a tokenizer."""
    vocabulary = vocabulary_of(tokenizer)
    if vocabulary.count_tokens is None:
        return None
    done = successful_requests(run.requests)
    output_tokens = sum(vocabulary.count_tokens(request.text) for request in done)
    prompts = {
        request.id: request.prompt
        for request in workload_of(options).sample(len(run.requests), options.seed)
    }
    lengths = [_count_prompt(prompts.get(request.id), vocabulary.count_tokens) for request in done]
    known = [length for length in lengths if length is not None]
    return NormalisedTokens(
        tokenizer=vocabulary.name,
        output_tokens=output_tokens,
        output_tok_s=output_tokens / run.duration_s if run.duration_s > 0 else 0.0,
        input_tokens=sum(known) if known and len(known) == len(lengths) else None,
    )


def _count_prompt(prompt: Prompt | None, count: CountTokens) -> int | None:
    if prompt is None or isinstance(prompt, tuple):
        return None
    return count(plain_chat(prompt) if isinstance(prompt, ChatPrompt) else prompt)
