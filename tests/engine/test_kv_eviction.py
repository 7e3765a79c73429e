"""KV eviction through the engine: the option, the field of a request, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.config.settings import Settings, settings_from
from ridgeline.engine.engine import Engine
from ridgeline.engine.eviction.evictor import KvEvictor
from ridgeline.engine.eviction.requirements import check_kv_eviction, why_no_eviction
from ridgeline.engine.scheduler.kv.eviction import KvCompaction
from ridgeline.engine.speculate.config import ResolvedSpeculation
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.records import Failed, KvEviction, Sampling
from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.sampling_params import completion_sampling
from ridgeline.serve.openai.schemas import CompletionRequest
from tests.conformance.tiny_models import make_model

STREAMING = KvEviction(method="streaming", budget=32)
GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = [3 + i * i % 61 for i in range(70)]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "streaming"}, "needs a budget"),
        ({"method": "streaming", "budget": 0}, "out of range"),
        ({"method": "streaming", "budget": 1.5}, "out of range"),
        ({"method": "streaming", "budget": 64, "window": 8}, "window means nothing"),
        ({"method": "h2o", "budget": 64, "sinks": 8}, "sinks means nothing"),
        ({"method": "full", "budget": 64}, "budget means nothing"),
        ({"method": "snapkv", "budget": 64, "pooling": 4}, "must be odd"),
        ({"method": "lru", "budget": 64}, "Invalid enum value"),
        ({"method": "streaming", "budget": 64, "size": 1}, "unknown field"),
    ],
)
def test_invalid_config_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        settings_from({"kv_eviction_config": config})
    body = CompletionRequest(prompt="a", kv_eviction=config)
    with pytest.raises(ApiError, match=words) as error:
        completion_sampling(body)
    assert (error.value.status_code, error.value.param) == (400, "kv_eviction")


def test_request_field_becomes_part_of_the_sampling() -> None:
    body = CompletionRequest(prompt="a", kv_eviction={"method": "streaming", "budget": 0.5})
    assert completion_sampling(body).kv_eviction == KvEviction(method="streaming", budget=0.5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama", path, max_position_embeddings=128)
    return path


def test_config_applies_to_requests_without_a_policy(llama: Path) -> None:
    settings = Settings(model=str(llama), max_num_seqs=2)
    config = msgspec.structs.replace(settings, kv_eviction_config=STREAMING)
    own = msgspec.structs.replace(GREEDY, kv_eviction=STREAMING)
    full = msgspec.structs.replace(GREEDY, kv_eviction=KvEviction(method="full"))
    with Engine.from_settings(settings) as plain, Engine.from_settings(config) as evicting:
        [kept] = plain.generate([PROMPT], GREEDY)
        [evicted] = plain.generate([PROMPT], own)
        both = evicting.generate([PROMPT, PROMPT], [GREEDY, full])
        assert [own.answers for own in both] == [evicted.answers, kept.answers]
        assert kept.answers != evicted.answers
        assert evicting.info.settings["kv_eviction_config"] == STREAMING.as_dict()
        assert "lossy" in evicting.info.derivations["kv_eviction_config"]


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next", "deepseek-v3"])
def test_models_that_cannot_evict_say_why(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    settings = Settings(model=str(tmp_path), kv_eviction_config=STREAMING)
    with pytest.raises(CannotRun, match="KV eviction by streaming cannot run here: "):
        Engine.from_settings(settings)
    plain = msgspec.structs.replace(settings, kv_eviction_config=None)
    with Engine.from_settings(plain) as engine, pytest.raises(CannotRun):
        engine.generate([PROMPT[:5]], msgspec.structs.replace(GREEDY, kv_eviction=STREAMING))


def test_drafter_that_reads_the_evicted_blocks_is_refused(llama: Path) -> None:
    spec = load_spec(str(llama))
    drafts = ResolvedSpeculation(method="self", num_speculative_tokens=2, automatic=False)
    [reason] = why_no_eviction(STREAMING, spec, drafts)
    assert "speculation by self reads the blocks that are evicted" in reason
    lookup = msgspec.structs.replace(drafts, method="ngram")
    assert not why_no_eviction(STREAMING, spec, lookup)


def test_heavy_hitters_refuse_drafts_and_predictions(llama: Path) -> None:
    spec, heavy = load_spec(str(llama)), KvEviction(method="h2o", budget=64)
    drafts = ResolvedSpeculation(method="ngram", num_speculative_tokens=2, automatic=False)
    for reasons in (
        why_no_eviction(heavy, spec, drafts),
        why_no_eviction(heavy, spec, None, has_prediction=True),
    ):
        assert reasons == ("queries of rejected drafts would count as attention",)
    assert not why_no_eviction(heavy, spec, None)
    with pytest.raises(CannotRun, match="leave KV eviction or the prediction out"):
        check_kv_eviction(heavy, spec, None, has_prediction=True)
    with pytest.raises(CannotRun, match="leave KV eviction or beam search out"):
        check_kv_eviction(heavy, spec, None, has_beams=True)


@pytest.mark.parametrize("method", ["snapkv", "adakv", "h2o"])
@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_scored_methods_move_the_rows_of_every_format(
    llama: Path, method: str, kv_dtype: str
) -> None:
    """A budget of all but a block gives an answer; one of everything, the full cache's."""
    window = {} if method == "h2o" else {"window": 8}
    whole = KvEviction(method=method, budget=128, **window)  # type: ignore[arg-type]
    tight = KvEviction(method=method, budget=48, **window)  # type: ignore[arg-type]
    samplings = [msgspec.structs.replace(GREEDY, kv_eviction=own) for own in (None, whole, tight)]
    settings = Settings(model=str(llama), kv_cache_dtype=kv_dtype)  # type: ignore[arg-type]
    with Engine.from_settings(settings) as engine:
        kept, same, evicted = engine.generate([PROMPT] * 3, samplings)
    assert kept.answers == same.answers
    assert len(evicted.answers[0].tokens) == GREEDY.max_tokens


async def test_failed_eviction_ends_its_request_and_forgets_the_cache(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks whose content is not known are read neither by a sequence nor by a prefix hit."""

    def fail(evictor: KvEvictor, compactions: Sequence[KvCompaction]) -> None:
        if compactions:
            raise MemoryError("no memory left")

    policy = KvEviction(method="snapkv", budget=32, window=8)
    evicting = msgspec.structs.replace(GREEDY, kv_eviction=policy)
    with Engine.from_settings(Settings(model=str(llama))) as engine:
        expected = engine.generate([PROMPT] * 2, [GREEDY, evicting])
        with monkeypatch.context() as patched:
            patched.setattr(KvEvictor, "compact", fail)
            events = [event async for event in engine.stream(PROMPT, evicting)]
        assert isinstance(events[-1], Failed) and "no memory left" in events[-1].error
        found = engine.generate([PROMPT] * 2, [GREEDY, evicting])
        assert [own.answers for own in found] == [own.answers for own in expected]
        assert [own.usage.cached_tokens for own in found] == [0, 0] and engine.is_healthy()
