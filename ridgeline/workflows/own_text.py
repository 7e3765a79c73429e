"""Text that a model writes itself, to train others on: continuations of pieces of a given text."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from ridgeline.records import Sampling
from ridgeline.records.progress import Message, Observer

PROMPT_TOKENS, ANSWER_TOKENS = 32, 224


def num_generated(num_tokens: int) -> int:
    """Tokens of as many whole texts, prompts included, as `num_tokens` need."""
    return _num_texts(num_tokens) * (PROMPT_TOKENS + ANSWER_TOKENS)


def _num_texts(num_tokens: int) -> int:
    return -(-num_tokens // (PROMPT_TOKENS + ANSWER_TOKENS))


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
        path = _stored_at(output)
        arguments = {"model": self.model, "own_tokens": self.num_tokens, "seed": self.seed}
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored.get("arguments") == arguments:
                return list(stored["tokens"])
        observer(Message(text=f"{self.model} generates {_num_texts(self.num_tokens)} texts"))
        tokens = self._generate(given)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"arguments": arguments, "tokens": tokens}), encoding="utf-8")
        return tokens

    def forget(self, output: Path) -> None:
        """Remove the stored text, once the training is complete."""
        _stored_at(output).unlink(missing_ok=True)

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


def _stored_at(output: Path) -> Path:
    return output.with_name(output.name + ".own.json")
