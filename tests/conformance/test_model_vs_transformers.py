"""Every family gives the logits and greedy tokens of transformers, however it is cut and
batched."""

from __future__ import annotations

import copy
import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.layers.native import NativeForward
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import has_states
from ridgeline.modelspec.rewrite import within_context
from tests.conformance.tiny_models import (
    FAMILIES,
    VOCAB,
    Loaded,
    Story,
    advance,
    load_ours,
    make_model,
)

pytestmark = pytest.mark.slow

ABS_TOL = 1e-4  # of log-probabilities; typically 1e-6 is reached
TIE_GAP = 1e-4  # greedy tokens may differ only where the two best are nearer than this
# transformers' own two forms of a delta net, chunked and token by token, differ by up to 5e-4 here;
# ours differ by up to 4e-4 from its chunked one where a token is fed alone
RECURRENT_TOL = 1e-3
ROUNDING = 3  # our error may be as many times that of transformers in float32, if that is larger


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, Loaded, Path]:
    """(transformers' model, ours) of one family."""
    directory = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param, directory)
    return model, load_ours(directory), directory


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """transformers' logits_TV, one token at a time beyond 16: as a growing sequence sees them."""
    with torch.inference_mode():
        rope = model.config.get_text_config().rope_parameters
        if rope.get("rope_type") != "dynamic":
            return model(torch.tensor([tokens]), use_cache=False).logits[0]
        kept = {cache_argument(model): transformers.DynamicCache(config=model.config)}
        pieces = [tokens[:16], *([token] for token in tokens[16:])]
        rows = [model(torch.tensor([piece]), use_cache=True, **kept).logits[0] for piece in pieces]
        return torch.cat(rows)


def cache_argument(model: Any) -> str:
    """What transformers calls its cache: `cache` from 5.24 on."""
    known = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), dim=-1)


def scattered(rng: random.Random, count: int, num_blocks: int) -> tuple[int, ...]:
    return tuple(rng.sample(range(num_blocks), count))


def cut(rng: random.Random, total: int) -> list[int]:
    sizes = []
    while total:
        sizes.append(rng.randint(1, min(total, 17)))
        total -= sizes[-1]
    return sizes


def tolerance(ours: Loaded) -> float:
    """Of log-probabilities, and of ties."""
    return RECURRENT_TOL if has_states(ours.runner.decoder.spec) else ABS_TOL


def exact_log_softmax(model: Any, tokens: list[int]) -> tuple[Tensor, float]:
    """transformers' log-probabilities in float64, and how far its own in float32 are from them.

    Random weights make some models sensitive to rounding, which no implementation can help.
    """
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # the others have no float64
    exact = log_softmax(reference_logits(wide, tokens))
    rounded = log_softmax(reference_logits(model, tokens))
    return exact, float((rounded - exact).abs().max())


def check_greedy(name: str, reference: Tensor, story: Story, tie_gap: float = TIE_GAP) -> None:
    """Every sampled token is the reference's best; a flip must be a near tie, and is printed."""
    best = torch.topk(reference, 2, dim=-1)
    for position in range(story.num_prompt, len(story.tokens)):
        values, tokens = best.values[position - 1], best.indices[position - 1].tolist()
        if story.tokens[position] == tokens[0]:
            continue
        gap = float(values[0] - values[1])
        print(f"{name}: token {position} is {story.tokens[position]}, best {tokens}, gap {gap:.2e}")
        assert story.tokens[position] == tokens[1] and gap < tie_gap


def test_logits_equal_transformers(pair: tuple[Any, Loaded, Path]) -> None:
    model, ours, directory = pair
    rng = random.Random(directory.name)
    tokens = [rng.randrange(VOCAB) for _ in range(61)]
    reference, rounding = exact_log_softmax(model, tokens)
    assert float(reference.std()) > 0.5, "the model says nothing; the test would pass on anything"
    assert rounding < RECURRENT_TOL, "the model says nothing about an implementation in float32"
    for chunks in ([61], [60, 1], cut(rng, 61), [1] * 61):
        got = ours.paged_logits(tokens, chunks, scattered(rng, 13, ours.num_blocks))
        limit = max(tolerance(ours) if 1 in chunks else ABS_TOL, ROUNDING * rounding)
        assert float((log_softmax(got) - reference).abs().max()) < limit, chunks
    whole = log_softmax(ours.runner.logits(tokens))
    assert float((whole - reference).abs().max()) < max(ABS_TOL, ROUNDING * rounding)


def test_greedy_tokens_in_mixed_plans(pair: tuple[Any, Loaded, Path]) -> None:
    """Three prompts of odd lengths, chunked differently, started at different steps, decoded
    together."""
    model, ours, directory = pair
    rng = random.Random(directory.name)
    pool = scattered(rng, 45, ours.num_blocks)
    # longrope: beyond the trained length of 32, where transformers too uses the long factors
    lengths = (33, 37, 45) if "longrope" in directory.name else (5, 14, 31)
    stories = [
        Story(i, [rng.randrange(VOCAB) for _ in range(length)], pool[15 * i : 15 * i + 15], length)
        for i, length in enumerate(lengths)
    ]
    step = 0
    while any(len(story.tokens) < story.num_prompt + 24 for story in stories):
        running = [s for i, s in enumerate(stories) if step >= 3 * i]
        running = [s for s in running if len(s.tokens) < s.num_prompt + 24]
        advance(ours, running, [rng.choice((1, 4, 7, 40)) for _ in running])
        step += 1
    for story in stories:
        reference = log_softmax(reference_logits(model, story.tokens))
        check_greedy(directory.name, reference, story, tolerance(ours))
        assert story.logprobs is not None
        for offset, got in enumerate(story.logprobs):
            row = reference[story.num_prompt + offset - 1]
            assert got.token == story.tokens[story.num_prompt + offset]
            assert abs(got.logprob - float(row[got.token])) < tolerance(ours)


@pytest.mark.parametrize("context", [32, 96])
def test_longrope_factors_follow_the_engines_context(tmp_path: Path, context: int) -> None:
    """Short factors for a context within the trained length, long ones beyond, as transformers does
    for a sequence of that length."""
    model = make_model("phi3-longrope", tmp_path)
    ours = load_ours(tmp_path, max_model_len=context)
    tokens = [random.Random(7).randrange(VOCAB) for _ in range(context)]
    got = log_softmax(ours.runner.logits(tokens))
    reference = log_softmax(reference_logits(model, tokens))
    assert float((got - reference).abs().max()) < ABS_TOL


def test_a_context_without_scaled_queries_runs_natively(tmp_path: Path) -> None:
    """Ministral 3 scales queries beyond the trained context alone."""
    model, spec = make_model("ministral3", tmp_path), load_spec(str(tmp_path))
    floor = spec.layers[0].attention.rope.query_floor
    assert floor is not None and within_context(spec, floor + 1) == spec
    unscaled = within_context(spec, floor)
    decoder = load_decoder(
        str(tmp_path), unscaled, device="cpu", compute_dtype=torch.float32, max_model_len=floor
    )
    assert isinstance(decoder.forward, NativeForward)
    tokens = [random.Random(9).randrange(VOCAB) for _ in range(floor)]
    got = log_softmax(TorchRunner(decoder, None, None).logits(tokens))
    reference = log_softmax(reference_logits(model, tokens))
    assert float((got - reference).abs().max()) < ABS_TOL
