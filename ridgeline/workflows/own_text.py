"""Text that a model writes itself, to train others on: continuations of pieces of a given text, or
answers to user messages that it writes, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ridgeline.records import Sampling
from ridgeline.records.progress import Message, Observer

if TYPE_CHECKING:
    from ridgeline.engine.tokenization.tokenizer import Tokenizer

PROMPT_TOKENS, ANSWER_TOKENS = 32, 224
MESSAGE_TOKENS, MIN_MESSAGE_TOKENS = 56, 4  # of a user message that the model writes
MESSAGE_TEMPERATURE = 0.8  # at 1, a small model's messages make little sense


def num_generated(num_tokens: int) -> int:
    """Tokens of as many whole texts, prompts included, as `num_tokens` need."""
    return _num_texts(num_tokens) * (PROMPT_TOKENS + ANSWER_TOKENS)


def _num_texts(num_tokens: int) -> int:
    return -(-num_tokens // (PROMPT_TOKENS + ANSWER_TOKENS))


class _StoredText(msgspec.Struct):
    arguments: dict[str, Any]
    tokens: list[int]


class OwnText(msgspec.Struct, frozen=True):
    """`num_tokens` of text by `model`, drawn at temperature 1 by `seed`."""

    model: str
    num_tokens: int
    seed: int

    def generate(
        self, given: tuple[list[int], list[int]], output: Path, observer: Observer
    ) -> list[int]:
        """The tokens of all texts. `given`: BOS, which the model reads before each piece, and the
        text whose pieces it continues. Stored next to `output`, for a run that resumes.
        """
        if not self.num_tokens:
            return []

        def write() -> list[int]:
            observer(Message(text=f"{self.model} generates {_num_texts(self.num_tokens)} texts"))
            return self._generate(given)

        arguments = {"model": self.model, "own_tokens": self.num_tokens, "seed": self.seed}
        return _stored_or_written(output, arguments, write)

    def _generate(self, given: tuple[list[int], list[int]]) -> list[int]:
        from ridgeline.engine.engine import Engine

        (bos, text), count = given, _num_texts(self.num_tokens)
        step = max(1, (len(text) - PROMPT_TOKENS) // count)
        prompts = [text[i * step : i * step + PROMPT_TOKENS] for i in range(count)]
        samplings = [
            Sampling(temperature=1.0, seed=self.seed + i, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            for i in range(count)
        ]
        with Engine.open(self.model, max_num_seqs=32) as engine:
            answers = engine.generate([bos + prompt for prompt in prompts], samplings)
        return [
            token
            for prompt, answer in zip(prompts, answers, strict=True)
            for token in (*prompt, *answer.tokens)
        ]


class OwnChats(msgspec.Struct, frozen=True):
    """Chats of one turn by `model`: `num_prompts` user messages, which it writes where its chat
    template puts the user's, and its greedy answers (Magpie; Xu et al. 2024, arXiv 2406.08464).
    """

    model: str
    num_prompts: int
    seed: int

    def generate(self, tokenizer: Tokenizer, output: Path, observer: Observer) -> list[int]:
        """The tokens of all chats, template included. Stored next to `output`, for a run that
        resumes. Raises BadInput for a model without a chat template.
        """

        def write() -> list[int]:
            text = f"{self.model} writes and answers {self.num_prompts} user messages"
            observer(Message(text=text))
            return self._generate(tokenizer)

        arguments = {"model": self.model, "chat_prompts": self.num_prompts, "seed": self.seed}
        return _stored_or_written(output, arguments, write)

    def _generate(self, tokenizer: Tokenizer) -> list[int]:
        from ridgeline.engine.engine import Engine

        before, after = user_turn(tokenizer)
        samplings = [
            Sampling(temperature=MESSAGE_TEMPERATURE, seed=self.seed + i, max_tokens=MESSAGE_TOKENS)
            for i in range(self.num_prompts)
        ]
        greedy = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS)
        with Engine.open(self.model, max_num_seqs=32) as engine:
            messages = engine.generate([before] * self.num_prompts, samplings)
            texts = {
                tuple(tokenizer.encode(message.text.strip(), add_special_tokens=False)): None
                for message in messages
            }
            prompts = [
                [*before, *text, *after] for text in texts if len(text) >= MIN_MESSAGE_TOKENS
            ]
            answers = engine.generate(prompts, greedy)
        return [
            token
            for prompt, answer in zip(prompts, answers, strict=True)
            for token in (*prompt, *answer.tokens)
        ]


def user_turn(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The chat template's tokens before a first user message, and from there to the answer."""
    first, second = (
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in ("A", "B")
    )
    differing = [i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]
    return first[: differing[0]], first[differing[-1] + 1 :]


def forget_own_text(output: Path) -> None:
    """Remove the text that was stored next to `output`, once the training is complete."""
    _stored_at(output).unlink(missing_ok=True)


def _stored_or_written(
    output: Path, arguments: dict[str, object], write: Callable[[], list[int]]
) -> list[int]:
    """The tokens that are stored for these arguments; else those of `write`, which are stored."""
    from ridgeline.compress.unfinished import file_of_interrupted_run

    path = _stored_at(output)
    if path.is_file():
        with file_of_interrupted_run(path):
            stored = msgspec.json.decode(path.read_bytes(), type=_StoredText)
        if stored.arguments == arguments:
            return stored.tokens
    tokens = write()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"arguments": arguments, "tokens": tokens}), encoding="utf-8")
    return tokens


def _stored_at(output: Path) -> Path:
    return output.with_name(output.name + ".own.json")
