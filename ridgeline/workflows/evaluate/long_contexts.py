"""Long contexts for what changes the KV cache, and an engine that answers them through its cache.

`Engine.logprobs_of`, by which other changes are judged, runs without the KV cache: it does not see
what was evicted or rounded there.
"""

from __future__ import annotations

from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization import Tokenizer
from ridgeline.errors import CannotRun
from ridgeline.optimize.quality.recall import RecallTexts
from ridgeline.optimize.quality.served_text import ScoredToken
from ridgeline.records import Sampling
from ridgeline.workflows.evaluate.heldout_text import heldout_pieces, heldout_texts

SHORTEST, LONGEST = 256, 2048  # tokens of the longest context
FACTS = 200  # tokens of two facts, two questions and the output
SPARE = 0.8  # of the model's context, because text is measured in characters
CHARS_PER_TOKEN = 4.0  # where there is no tokenizer
SAMPLE_CHARS = 20_000
MAX_TEXTS = 512
TOP_LOGPROBS = 20


def context_tokens(longest_prompt: int, max_model_len: int) -> int:
    """Tokens of the longest context: as long as the workload's prompts, within the model's."""
    wanted = min(max(longest_prompt, SHORTEST), LONGEST)
    return max(1, min(wanted, int(SPARE * (max_model_len - FACTS))))


def recall_texts(tokenizer: Tokenizer | None, longest: int) -> RecallTexts:
    """Questions in contexts of a quarter, half and the whole of `longest` tokens."""
    prose = heldout_texts()["prose"]
    chars = _chars_per_token(tokenizer, prose)
    return RecallTexts(prose, tuple(int(longest * share * chars) for share in (0.25, 0.5, 1.0)))


def texts_to_continue(tokenizer: Tokenizer | None, longest: int) -> tuple[str, ...]:
    """Held-out texts of about `longest` tokens, their kinds alternating."""
    fewest = min(_chars_per_token(tokenizer, text) for text in heldout_texts().values())
    return heldout_pieces(max(1, int(longest * fewest)), MAX_TEXTS)


def _chars_per_token(tokenizer: Tokenizer | None, text: str) -> float:
    if tokenizer is None:
        return CHARS_PER_TOKEN
    sample = text[:SAMPLE_CHARS]
    return len(sample) / len(tokenizer.encode(sample, add_special_tokens=False))


class EngineContexts:
    """An engine that continues texts and answers questions as it serves requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def continues_output(self) -> bool:
        """The engine takes output that it is to continue."""
        return True

    def score_text(self, text: str) -> list[ScoredToken]:
        """Raises CannotRun: the log-probabilities of a prompt come before anything is evicted."""
        raise CannotRun("the tokens of a prompt do not show what the cache loses")

    def continuation(self, text: str, num_tokens: int) -> list[ScoredToken]:
        """The greedy continuation, with the likeliest tokens at every step."""
        sampling = Sampling(
            temperature=0.0, max_tokens=num_tokens, logprobs=TOP_LOGPROBS, ignore_eos=True
        )
        rows = self._engine.generate([text], sampling)[0].answers[0].logprobs
        return [
            ScoredToken(
                token=str(row.token),
                logprob=row.logprob,
                top={str(token): logprob for token, logprob in row.top},
            )
            for row in rows
        ]

    def answer(self, text: str, max_tokens: int) -> tuple[list[str], list[float]]:
        """Token texts of the greedy continuation, and nats between the best two of each."""
        decode = self._engine.tokenizer.decode
        rows = self.continuation(text, max_tokens)
        gaps = [sorted(row.top.values(), reverse=True) for row in rows]
        return [decode([int(row.token)]) for row in rows], [best[0] - best[1] for best in gaps]

    def complete(self, prompt: str, written: str, max_tokens: int) -> str:
        """The greedy output after `written`."""
        engine = self._engine
        begun = engine.tokenizer.encode(written, add_special_tokens=False) if written else ()
        sampling = Sampling(temperature=0.0, max_tokens=len(begun) + max_tokens)
        [completion] = engine.generate([prompt], sampling, resumed=[begun])
        return engine.tokenizer.decode(completion.tokens[len(begun) :])
