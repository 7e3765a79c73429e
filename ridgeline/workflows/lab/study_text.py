"""The prompts of a case study, and the text that distributions are compared on."""

from __future__ import annotations

import random

from ridgeline.config.load import LabOptions
from ridgeline.engine.tokenization import NoTokenizer, load_tokenizer
from ridgeline.workflows.evaluate.heldout_text import heldout_windows
from ridgeline.workflows.lab.open_stage import StageWork

NUM_WINDOWS, WINDOW_TOKENS = 4, 128
MAX_WINDOW_VALUES = 1 << 25
"""Log-probabilities of all windows that are held in memory for the first stage."""


def study_work(options: LabOptions, model: str, vocab_size: int) -> tuple[StageWork, str]:
    """Prompts and windows, and what they are: held-out text, or random tokens without a tokenizer.

    Windows of code, prose and chats cycle, as do prompts: real text, since drafts are looked up in
    it.
    """
    length = max(2, min(WINDOW_TOKENS, MAX_WINDOW_VALUES // NUM_WINDOWS // vocab_size))
    tokenizer = load_tokenizer(model)
    if isinstance(tokenizer, NoTokenizer):
        text = "random tokens, since the model has no tokenizer"
        windows = _random(NUM_WINDOWS, length, vocab_size, 1)
        prompts = _random(options.max_concurrency, options.input_len, vocab_size, 2)
    else:
        text = "held-out text: code, prose and chats"
        windows = heldout_windows(tokenizer, length)[:NUM_WINDOWS]
        pieces = heldout_windows(tokenizer, options.input_len, seed=1)
        prompts = tuple(pieces[i % len(pieces)] for i in range(options.max_concurrency))
    return StageWork(prompts=prompts, output_len=options.output_len, windows=windows), text


def _random(count: int, length: int, vocab_size: int, seed: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(length)) for _ in range(count))
