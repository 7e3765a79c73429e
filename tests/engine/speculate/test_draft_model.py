"""The draft model: drafts are what it would say itself; what cannot draft is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ridgeline import Engine, Sampling
from ridgeline.config.settings import Settings, settings_from
from ridgeline.engine.build import assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.draft_model import DraftModelDrafter
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.errors import BadInput, BadModel, CannotRun
from ridgeline.modelspec.checkpoints.locate import model_path

GREEDY = Sampling(temperature=0.0, max_tokens=64, ignore_eos=True)
TEXT = "def add(a, b):\n    return a + b\n\nclass Point:\n    def __init__(self, x, y):\n"


def asked(**config: object) -> Settings:
    return settings_from(
        {
            "speculative_config": {
                "method": "draft_model",
                "model": "demo-draft",
                "num_speculative_tokens": 3,
                **config,
            },
            "model": "demo",
            "kv_cache_memory_bytes": 16 << 20,
            "num_threads": 1,
        }
    )


@pytest.fixture(scope="module")
def drafter() -> DraftModelDrafter:
    scheduler = assemble(resolve(asked())).scheduler
    found = scheduler.draft_scheduler._proposer._drafter  # type: ignore[attr-defined]
    assert isinstance(found, DraftModelDrafter)
    return found


@pytest.fixture(scope="module")
def own() -> Iterator[Engine]:
    with Engine.open("demo-draft", kv_cache_memory_bytes=16 << 20, num_threads=1) as engine:
        yield engine


def contexts(tokens: list[int], seq_id: int = 0, sampling: Sampling = GREEDY) -> DraftContext:
    return DraftContext(seq_id, tokens, 1, "", sampling, 5, 99)


def test_drafts_equal_greedy_decoding_of_the_draft_model(
    drafter: DraftModelDrafter, own: Engine
) -> None:
    """Two sequences side by side, over steps in which drafts are accepted, cut and refused."""
    prompts = [own.tokenizer.encode(TEXT), own.tokenizer.encode(TEXT[5:40])]
    rng = torch.Generator().manual_seed(1)
    texts = [list(prompt) for prompt in prompts]
    for depths in ((3, 5), (1, 0), (4, 2), (7, 7)):
        found = drafter.draft([contexts(t, i) for i, t in enumerate(texts)], depths)
        for text, depth, drafts in zip(texts, depths, found, strict=True):
            short = Sampling(temperature=0.0, max_tokens=max(depth, 1), ignore_eos=True)
            [expected] = own.generate([text], short)
            assert drafts == expected.tokens[:depth]
            kept = int(torch.randint(0, depth + 1, (1,), generator=rng))
            text += [*drafts[:kept], 77 + kept]
    for seq_id in (0, 1):
        drafter.forget(seq_id, [], "")
    assert drafter._pool.num_owned == 0 and not drafter._readers


def test_sampled_drafts_carry_their_distribution(drafter: DraftModelDrafter) -> None:
    warm = Sampling(temperature=1.2, top_k=20)
    tokens = list(range(5, 40))
    [drafts] = drafter.draft([contexts(tokens, 3, warm)], [4])
    _, rows = drafter._drawn._rows[3]
    assert rows.shape == (4, 4096) and torch.allclose(rows.sum(1), torch.ones(4).double())
    assert all(row[token] > 0 for row, token in zip(rows, drafts, strict=True))
    assert bool(((rows > 0).sum(1) <= 20).all())
    [again] = drafter.draft([contexts(tokens, 3, warm)], [4])
    assert again == drafts
    drafter.draft([contexts(tokens, 3, Sampling(seed=4))], [4])
    assert not drafter._drawn._rows, "requests with a seed are walked"
    drafter.forget(3, [], "")


def test_a_long_prompt_is_read_in_pieces(drafter: DraftModelDrafter, own: Engine) -> None:
    tokens = [(i * 37) % 4000 + 5 for i in range(1100)]
    [drafts] = drafter.draft([contexts(tokens, 8)], [3])
    [expected] = own.generate([tokens], Sampling(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert drafts == expected.tokens
    drafter.forget(8, [], "")


def test_nothing_is_drafted_without_free_blocks(drafter: DraftModelDrafter) -> None:
    pool, drafter._pool = drafter._pool, type(drafter._pool)(2, 16)
    assert drafter.draft([contexts(list(range(9, 60)), 9)], [3]) == [()]
    drafter.forget(9, [], "")
    drafter._pool = pool


@pytest.mark.slow
def test_unseeded_answers_are_sampled_and_verified() -> None:
    """They run to their length, and drafts of a good drafter are accepted."""
    with Engine.from_settings(asked(num_speculative_tokens=4)) as engine:
        warm = Sampling(temperature=0.3, max_tokens=40, ignore_eos=True, logprobs=1)
        found = engine.generate([TEXT, TEXT[:30], TEXT[9:]], warm)
        assert all(len(each.tokens) == 40 for each in found)
        assert all(len(each.answers[0].logprobs) == 40 for each in found)
        assert engine.counters()["spec_decode_num_accepted_tokens"] > 5


def test_draft_model_is_counted_in_the_memory_budget() -> None:
    plain, drafting = resolve(Settings(model="demo")), resolve(asked())
    assert drafting.speculative_config is not None
    assert drafting.speculative_config.kv_bytes_per_token == 512
    per_token = plain.kv_cache_memory_bytes / plain.num_blocks / 16
    assert drafting.num_blocks == (16 << 20) // int(16 * (per_token + 512))


def test_draft_model_is_quantised_independently() -> None:
    found = resolve(asked(quantization="bf16")).speculative_config
    assert found is not None and found.quantization == "bf16"


def test_draft_model_larger_than_its_target_is_refused() -> None:
    with pytest.raises(CannotRun, match="not smaller"):
        resolve(asked(model="demo"))


@pytest.mark.parametrize("config", [{"model": "no-such-folder"}, {"model": None}])
def test_missing_files_are_refused(config: dict[str, object]) -> None:
    with pytest.raises((BadModel, BadInput)):
        resolve(asked(**config))


def test_a_key_of_another_method_is_refused() -> None:
    with pytest.raises(BadInput, match="means nothing"):
        resolve(asked(prompt_lookup_max=3))


def test_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Same size, same names of files, two tokens swapped."""
    folder = tmp_path / "other"
    shutil.copytree(model_path("demo-draft"), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    a, b = list(vocab)[700], list(vocab)[701]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(content))
    assert load_tokenizer(str(folder)).encode("x")
    with pytest.raises(CannotRun, match="tokenizer is not the target's"):
        assemble(resolve(asked(model=str(folder))))
