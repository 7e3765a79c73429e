"""Every layout computes what one process computes, in the exactness class that it declares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.scheduler.kv.block_tables import UnusedTables
from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.errors import CannotRun
from ridgeline.modelspec.shard import ParallelSizes
from ridgeline.records import Sampling
from tests.conformance.tiny_models import VOCAB
from tests.engine.parallel.emulated import (
    Checkpoint,
    EmulatedRanks,
    ThreadExchanges,
    config_of,
    one_process,
)

pytestmark = pytest.mark.slow

GREEDY = SamplePoint(Sampling(temperature=0.0), 0, 0, 0, is_argmax=True)
SAMPLED = SamplePoint(Sampling(temperature=1.0, logprobs=2, top_k=20), 7, 0, 0)
SAMPLES = (GREEDY, SAMPLED)
PROMPTS = ([3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 38, 32, 7], [11, 4, 60])
TP2, PP2, EP2 = (ParallelSizes(**{name: 2}) for name in ("tensor", "pipeline", "expert"))
TP2_EP2 = ParallelSizes(tensor=2, expert=2)
TP2_SP = ParallelSizes(tensor=2, sequence=True)
TP2_PP2 = ParallelSizes(tensor=2, pipeline=2)
PP3, TP4 = ParallelSizes(pipeline=3), ParallelSizes(tensor=4)
DENSE = (
    *("llama", "llama-bias", "llama-tied-mha", "qwen2", "qwen3", "gemma3", "gemma2", "phi3"),
    "ministral3",
)

EXPERTS = ("mixtral", "qwen2-moe", "glm4-moe", "gpt-oss")
LATENT = ("deepseek-v2", "deepseek-v3", "mistral4")


def run(runner: TorchRunner) -> tuple[list[tuple[int, ...]], Tensor]:
    """Tokens of a prefill in two chunks and some decode steps; logits of a whole text."""
    first, second = PROMPTS
    tables = UnusedTables(runner.cache.layout, 2)
    tokens: list[tuple[int, ...]] = []
    blocks = [tables.of(i) for i in (0, 1)]
    runner.run(StepPlan(0, (Run(0, 0, tuple(first[:9]), sample=None, **blocks[0]),)))
    runs = (
        Run(0, 9, tuple(first[9:]), sample=GREEDY, **blocks[0]),
        Run(1, 0, tuple(second), sample=SAMPLED, state_slot=1, **blocks[1]),
    )
    lengths = [len(first), len(second)]
    for step in range(1, 5):
        outputs = runner.run(StepPlan(step, runs)).outputs
        tokens += [own.tokens for own in outputs]
        runs = tuple(
            Run(i, lengths[i], outputs[i].tokens, sample=SAMPLES[i], state_slot=i, **blocks[i])
            for i in (0, 1)
        )
        lengths = [length + 1 for length in lengths]
    return tokens, runner.logits(first)


def compare(folder: Path, sizes: ParallelSizes, *, bits: bool, quantization: str | None) -> None:
    config = config_of(folder, sizes, quantization)
    tokens, logits_TV = run(one_process(config))
    assert logits_TV.shape == (len(PROMPTS[0]), VOCAB)
    with EmulatedRanks(config) as ranks:
        own_tokens, own_TV = run(ranks.runner)
    if bits:
        assert torch.equal(own_TV, logits_TV)
    else:
        assert torch.allclose(own_TV, logits_TV, rtol=1e-4, atol=2e-4)
    assert own_tokens == tokens


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS, *LATENT, "qwen3.5"])
def test_stages_change_no_bit(name: str, checkpoint: Checkpoint) -> None:
    compare(checkpoint(name), PP2, bits=True, quantization=None)


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS, *LATENT])
def test_split_heads_and_widths_agree_up_to_rounding(name: str, checkpoint: Checkpoint) -> None:
    compare(checkpoint(name), TP2, bits=False, quantization=None)


@pytest.mark.parametrize("name", [*EXPERTS, *LATENT, "qwen3-next"])
def test_whole_experts_on_ranks_change_no_bit(name: str, checkpoint: Checkpoint) -> None:
    compare(checkpoint(name), EP2, bits=True, quantization=None)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_int8_weights_split_over_ranks_change_no_bit(name: str, checkpoint: Checkpoint) -> None:
    compare(checkpoint(name), TP2, bits=True, quantization="int8")


def test_int8_rows_of_a_long_text_are_rounded_as_by_one_process() -> None:
    """A scale that is rounded twice moves one row in some hundreds to another code."""
    config = config_of("demo", TP2, quantization="int8", max_model_len=640)
    text = [(i * i * 7 + 11 * i) % 4000 for i in range(600)]
    alone = one_process(msgspec.structs.replace(config, sizes=ParallelSizes())).logits(text)
    with EmulatedRanks(config) as ranks:
        assert torch.equal(ranks.runner.logits(text), alone)


@pytest.mark.parametrize(
    ("name", "sizes", "quantization"),
    [
        *((name, TP2_SP, None) for name in (*DENSE, *EXPERTS, *LATENT, "cohere")),
        ("llama", TP2_SP, "int8"),
        ("llama", ParallelSizes(tensor=4, sequence=True), None),
        ("llama", ParallelSizes(tensor=2, pipeline=2, sequence=True), None),
        ("qwen2-moe", ParallelSizes(tensor=2, expert=2, sequence=True), None),
        ("glm4-moe", ParallelSizes(tensor=2, expert=2, sequence=True), "int8"),
    ],
)
def test_norms_of_a_part_of_the_rows_change_no_bit(
    name: str,
    sizes: ParallelSizes,
    quantization: str | None,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[tuple[int, int]] = []  # rows that a rank keeps of a sum, and all of its rows
    sum_rows = ThreadExchanges.sum_rows

    def note_rows(group: ThreadExchanges, part: Tensor, counts: Sequence[int]) -> Tensor:
        own = sum_rows(group, part, counts)
        kept.append((len(own), len(part)))
        return own

    monkeypatch.setattr(ThreadExchanges, "sum_rows", note_rows)
    config = config_of(checkpoint(name), sizes, quantization)
    whole = msgspec.structs.replace(config, sizes=msgspec.structs.replace(sizes, sequence=False))
    with EmulatedRanks(whole) as ranks:
        tokens, logits_TV = run(ranks.runner)
    assert not kept
    with EmulatedRanks(config) as ranks:
        own_tokens, own_TV = run(ranks.runner)
    assert any(own < rows for own, rows in kept)
    assert torch.equal(own_TV, logits_TV)
    assert own_tokens == tokens


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", TP2_PP2),
        ("llama", PP3),
        ("llama", TP4),  # two ranks for each key head
        ("mixtral", TP2_EP2),
        ("deepseek-v3", TP2_EP2),
        ("gemma3", TP2_PP2),
    ],
)
def test_layouts_combine(name: str, sizes: ParallelSizes, checkpoint: Checkpoint) -> None:
    compare(checkpoint(name), sizes, bits=sizes.tensor == 1, quantization=None)


@pytest.mark.parametrize(
    ("name", "sizes", "quantization", "word"),
    [
        ("olmo2", TP2, None, "over all heads"),
        ("qwen3.5", TP2, None, "delta net"),
        ("llama", EP2, None, "no experts"),
        ("llama", ParallelSizes(pipeline=4), None, "stages"),
        ("llama", ParallelSizes(tensor=3), None, "key heads"),
        ("mixtral", TP2, "int8", "--expert-parallel-size"),
        ("mixtral", ParallelSizes(tensor=2, expert=4), None, "not the 2 ranks"),
        ("llama", ParallelSizes(pipeline=2, sequence=True), None, "--tensor-parallel-size"),
    ],
)
def test_layout_that_does_not_suit_the_model_is_refused(
    name: str,
    sizes: ParallelSizes,
    quantization: str | None,
    word: str,
    checkpoint: Checkpoint,
) -> None:
    with pytest.raises(CannotRun, match=word):
        EmulatedRanks(config_of(checkpoint(name), sizes, quantization))


def test_ranks_hold_a_part_of_the_weights(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    with EmulatedRanks(config_of(folder, ParallelSizes())) as one:
        whole = one.models[0].decoder.nbytes
    with EmulatedRanks(config_of(folder, TP2)) as two:
        parts: Sequence[int] = [model.decoder.nbytes for model in two.models]
    assert max(parts) < 0.75 * whole
