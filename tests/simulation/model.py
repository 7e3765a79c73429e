"""A model whose KV cache holds hashes of the whole text before each position.

The next token is a function of the hash that the run finds in its block table, the seed and the
output index. If a block is lost, shared, reused or not copied, or a token is fed twice or out of
order, then the answer differs from the one that `expected_tokens` computes from the prompt alone.
The model also remembers what it has written for each choice, and notices in the same step if it is
fed, or finds in the cache, anything else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ridgeline.engine.adapters.registry import NoAdapters, RunAdapters
from ridgeline.engine.scheduler import sequence as scheduled
from ridgeline.engine.scheduler.kv.prefix_cache import PrefixCache, block_digest, root_digest
from ridgeline.engine.scheduler.plan import NoTokenError, Run, RunOutput, StepPlan, StepResult
from ridgeline.records import TokenLogprobs

_MASK = (1 << 61) - 1
_ROOT = 0x9E3779B97F4A7C15 & _MASK


def mix(state: int, value: int) -> int:
    """A new state from a state and a value."""
    state = (state ^ (value + 0x7F4A7C15)) * 0x5851F42D4C957F2D & _MASK
    return (state ^ (state >> 29)) * 0x14057B7EF767814F & _MASK


def state_after(tokens: Sequence[int], state: int = _ROOT) -> int:
    for token in tokens:
        state = mix(state, token)
    return state


def root_of(salt: int, adapter: int) -> int:
    """The state before the first token: of a model, told apart by `salt`, and of an adapter."""
    return mix(mix(_ROOT, salt), adapter) if salt or adapter else _ROOT


class Vocabulary:
    """Tokens that are written as printable ASCII, whose texts can simply be joined."""

    def __init__(self, texts: dict[int, str], eos: int) -> None:
        self.texts, self.tokens, self.eos = texts, sorted(texts), eos

    def next_token(self, state: int, seed: int, index: int) -> int:
        draw = mix(mix(state, seed & _MASK), index)
        return self.eos if draw % 41 == 0 else self.tokens[draw % len(self.tokens)]


@dataclass
class Faults:
    """What goes wrong in a step. `poisoned`: prompts with this token fail in every step; `late`:
    a run is not sampled in this step, as if its grammar was not ready.
    """

    step: float = 0.0
    nan: float = 0.0
    memory: float = 0.0
    panic: float = 0.0
    slow: float = 0.0
    late: float = 0.0
    poisoned: int = -1
    num_injected: int = field(default=0, init=False)
    num_nan: int = field(default=0, init=False)


class PanicException(BaseException):
    """As the panics of Rust libraries: none of Exception."""


class ChoiceText:
    """A choice as the model knows it: its prompt, what it resumes, and what it wrote since.

    `states` are the hashes after each token, `digests` those of the full blocks of `size` tokens.
    """

    def __init__(self, seq: scheduled.Sequence, root: int, size: int) -> None:
        self.num_prompt, self.root, self._size = seq.num_prompt, root, size
        self.tokens, self.states, self.digests = list[int](), list[int](), list[bytes]()
        self._root_digest = self._last_digest = root_digest(seq.request.cache_scope)
        for token in (*seq.request.prompt, *seq.request.resumed_tokens(seq.index)):
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.states.append(mix(self.state_before(len(self.states)), token))
        if len(self.tokens) % self._size == 0:
            self._last_digest = block_digest(self._last_digest, self.tokens[-self._size :])
            self.digests.append(self._last_digest)

    def drop_last(self) -> None:
        """Forget the last token, which will be written again."""
        self.tokens.pop()
        self.states.pop()
        if len(self.tokens) % self._size == self._size - 1:
            self.digests.pop()
            parents = self.digests or [self._root_digest]
            self._last_digest = parents[-1]

    def state_before(self, position: int) -> int:
        return self.states[position - 1] if position else self.root


class HashRunner:
    """Computes plans. `sleep` lets time pass; `rng` decides how much, and which faults happen.

    `find_sequence` gives the running sequence with an id, from whose request the text is known.
    """

    find_sequence: Callable[[int], scheduled.Sequence | None]

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_blocks: int,
        block_size: int,
        *,
        sleep: Callable[[float], None],
        rng: random.Random,
        faults: Faults,
        salt: int = 0,
        adapters: RunAdapters | None = None,
    ) -> None:
        self._vocabulary, self._size, self._sleep = vocabulary, block_size, sleep
        self._rng, self._faults = rng, faults
        self._salt, self._adapters = salt, adapters or NoAdapters()
        self._slots = [[0] * block_size for _ in range(num_blocks)]  # states
        self._digests: list[bytes | None] = [None] * num_blocks  # of the full ones
        self._texts: dict[tuple[int, int], ChoiceText] = {}  # by the request's number and choice
        self._sampled: list[tuple[scheduled.Sequence, ChoiceText]] = []  # in the last step
        self.violations: list[str] = []

    def run(self, plan: StepPlan) -> StepResult:
        if plan.runs:
            self._sleep(self._rng.uniform(0.001, 0.01))
            if self._rng.random() < self._faults.slow:
                self._sleep(self._rng.uniform(0.5, 3.0))
        sources = [(list(self._slots[source]), self._digests[source]) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, sources, strict=True):
            self._slots[target], self._digests[target] = content
        self._raise_fault(plan)
        self._adapters.begin(plan.runs)
        return StepResult(tuple([self._compute(run) for run in plan.runs]))

    def _raise_fault(self, plan: StepPlan) -> None:
        faults, draw = self._faults, self._rng.random()
        if any(faults.poisoned in run.tokens for run in plan.runs):
            raise RuntimeError("a poisoned prompt")
        if not plan.runs:
            return
        for chance, error in (
            (faults.step, RuntimeError("the device was lost for a moment")),
            (faults.memory, MemoryError()),
            (faults.panic, PanicException("unwrap on a None value")),
        ):
            if draw < chance:
                faults.num_injected += 1
                raise error
            draw -= chance
        if draw < faults.nan and len(plan.runs) == 1 and plan.runs[0].sample is not None:
            faults.num_nan += 1
            raise NoTokenError("NaN")

    def _compute(self, run: Run) -> RunOutput:
        seq = self.find_sequence(run.seq_id)
        if seq is None:
            self._report(run, "runs without being served")
            return RunOutput()
        text = self._text_of(seq, run)
        self._check_stored(run, text)
        state = self._write(run, text)
        prompt_logprobs = self._prompt_logprobs(run)
        if run.sample is None:
            return RunOutput(prompt_logprobs=prompt_logprobs)
        if self._rng.random() < self._faults.late:
            return RunOutput(prompt_logprobs=prompt_logprobs, is_late=True)
        point = run.sample
        if text.num_prompt + point.index != len(text.tokens) or state != text.states[-1]:
            self._report(run, f"samples token {point.index} of another text")
        token = self._vocabulary.next_token(state, point.seed, point.index)
        text.append(token)
        self._sampled.append((seq, text))
        wants = point.sampling.logprobs is not None
        logprobs = (TokenLogprobs(token, -1.0, 1, ((token, -1.0),)),) if wants else ()
        return RunOutput((token,), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _text_of(self, seq: scheduled.Sequence, run: Run) -> ChoiceText:
        key, root = (seq.group.serial, seq.index), root_of(self._salt, run.adapter)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = ChoiceText(seq, root, self._size)
        if text.root != root:
            self._report(run, "runs with another adapter than before")
        return text

    def _check_stored(self, run: Run, text: ChoiceText) -> None:
        """The cache must hold the choice's own text before the run."""
        for begin in range(0, run.start, self._size):
            end = min(begin + self._size, run.start)
            stored = self._slots[run.blocks[begin // self._size]][: end - begin]
            if stored != text.states[begin:end]:
                self._report(run, f"reads a wrong text within positions {begin} to {end - 1}")

    def _write(self, run: Run, text: ChoiceText) -> int:
        """Store the run's tokens, and return the state after them."""
        if list(run.tokens) != text.tokens[run.start : run.start + len(run.tokens)]:
            self._report(run, f"is fed a wrong text from position {run.start} on")
        state = text.state_before(run.start)
        for position, token in enumerate(run.tokens, start=run.start):
            state = mix(state, token)
            place, offset = divmod(position, self._size)
            block = run.blocks[place]
            self._slots[block][offset] = state
            is_full = offset == self._size - 1 and place < len(text.digests)
            self._digests[block] = text.digests[place] if is_full else None
        return state

    def _report(self, run: Run, what: str) -> None:
        self.violations.append(f"sequence {run.seq_id} {what}")

    def end_step(self) -> None:
        """Forget the step's tokens that were not taken, of sequences preempted in its commit.

        Where a request's first token makes room for its other choices, another sequence of the
        same step may lose its blocks, and with them this step.
        """
        for seq, text in self._sampled:
            if seq.state is scheduled.State.WAITING and len(seq.tokens) == len(text.tokens) - 1:
                text.drop_last()
        self._sampled.clear()

    def check_cache(self, cache: PrefixCache) -> None:
        """Each published block must hold the text under whose digest it is found."""
        for block, (_, digest) in cache._entry_of.items():
            assert self._digests[block] == digest, f"block {block} is published as another text"

    def _prompt_logprobs(self, run: Run) -> tuple[TokenLogprobs, ...]:
        if run.prompt_logprobs is None:
            return ()
        last = () if run.next_prompt_token is None else (run.next_prompt_token,)
        return tuple(TokenLogprobs(token, -1.0, 1, ()) for token in (*run.tokens[1:], *last))

    def describe_graphs(self) -> str:
        return "no CUDA graphs"

    def graph_counters(self) -> dict[str, float]:
        return {}

    def state_pieces(self, tokens: Sequence[int], piece_tokens: int) -> Iterator[torch.Tensor]:
        """For embeddings: one number that depends on the text."""
        for start in range(0, len(tokens), piece_tokens):
            num_rows = min(piece_tokens, len(tokens) - start)
            self._sleep(0.0005 * num_rows)
            yield torch.full((num_rows, 1), float(state_after(tokens) % 1000))


class NoMasks:
    """Grammars are not enforced; one that contains `reject` is refused."""

    def prepare(self, structured: object) -> None:
        from ridgeline.errors import BadInput

        if "reject" in str(structured):
            raise BadInput("the grammar cannot be compiled")


def expected_tokens(
    vocabulary: Vocabulary, prompt: Sequence[int], seed: int, max_tokens: int, root: int = _ROOT
) -> list[int]:
    """The answer if the request is served alone, with its end-of-sequence token, if any."""
    state, tokens = state_after(prompt, root), list[int]()
    while len(tokens) < max_tokens and (not tokens or tokens[-1] != vocabulary.eos):
        token = vocabulary.next_token(state, seed, len(tokens))
        tokens.append(token)
        state = mix(state, token)
    return tokens
