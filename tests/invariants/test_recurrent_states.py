"""Models with gated delta nets give the same tokens however they are served.

Alone = batched = chunked = preempted and resumed = forked, and a slot never shows what another
sequence left in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ridgeline.api.improve import quantize
from ridgeline.config.settings import Settings, Speculative
from ridgeline.engine.attention.states import STATE_VERSIONS, StateCache
from ridgeline.engine.config import resolve
from ridgeline.engine.engine import Engine
from ridgeline.engine.model.delta_rule import chunked, recurrent, recurrent_into
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import decode_work, kv_bytes_per_token, state_bytes
from ridgeline.records import Sampling
from tests.conformance.tiny_models import make_model
from tests.invariants.serving import CONTEXT, Model, Schedule, check, serve
from tests.invariants.test_metamorphic import (
    GREEDY,
    PENALISED,
    SEEDED,
    make_request,
    some_requests,
    tokens,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("qwen3.5-dense")
    make_model("qwen3.5", path, max_position_embeddings=CONTEXT)
    return path


@pytest.fixture(scope="module", params=["torch", "native"])
def model(directory: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Model.load(str(directory), request.param)
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(arrives=(0, 2, 2, 5, 9)),
        Schedule(max_num_batched_tokens=1),
        Schedule(max_num_batched_tokens=3),
        Schedule(max_num_batched_tokens=16, rounds=2, prefix=True),
        Schedule(policy="static", chunked=False, max_num_seqs=2, arrives=(0, 0, 1, 4, 4)),
    ],
)
def test_any_batching_gives_the_tokens_of_single_requests(model: Model, schedule: Schedule) -> None:
    requests = some_requests()
    for served in serve(model, requests, schedule):
        assert served.hit_tokens == 0, "states cannot be shared"
        check(model, requests, served)


def test_preempted_sequences_compute_their_states_again(model: Model) -> None:
    requests = some_requests()
    [served] = serve(model, requests, Schedule(num_blocks=13, block_size=4))
    assert served.num_preempted
    check(model, requests, served)


def test_background_sequences_lose_their_slot_and_resume(model: Model) -> None:
    requests = [
        msgspec.structs.replace(request, background=i < 3)
        for i, request in enumerate(some_requests())
    ]
    [served] = serve(model, requests, Schedule(max_num_seqs=2, arrives=(0, 0, 0, 4, 6)))
    assert served.num_preempted >= 2
    check(model, requests, served)


@pytest.mark.parametrize("num_blocks", [200, 16])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED])
def test_forked_choices_compute_the_prompt_themselves(
    model: Model, sampling: Sampling, num_blocks: int
) -> None:
    many = msgspec.structs.replace(sampling, n=4)
    requests = [
        make_request("forked", tokens(13), many),
        make_request("other", tokens(6, salt=5), GREEDY),
    ]
    [served] = serve(model, requests, Schedule(num_blocks=num_blocks))
    check(model, requests, served)
    distinct = {tuple(served.answers["forked", i]) for i in range(4)}
    assert (len(distinct) == 1) == sampling.greedy


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
def test_all_forms_of_the_delta_rule_agree(length: int) -> None:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(3, length, 8), normal(3, length, 8)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v, state = normal(3, length, 5), normal(3, 8, 5)
    g, beta = -normal(3, length).abs(), torch.sigmoid(normal(3, length))
    found, last = chunked(q, k, v, g, beta, state)
    one, outputs = state.unsqueeze(0), []
    before, after = state.clone(), torch.empty_like(state)
    for t in range(length):
        step = [x[:, t].unsqueeze(0) for x in (q, k, v, g, beta)]
        out, one = recurrent(*step, one)
        outputs.append(out[0])
        after = before if t % 3 == 2 else after  # one state may be both
        into = recurrent_into(before, after, *(x[0] for x in step[:3]), g[:, t].exp(), beta[:, t])
        assert torch.allclose(into, out[0], atol=1e-10)
        assert torch.allclose(after, one[0], atol=1e-10)
        before, after = after, torch.empty_like(state)
    assert torch.allclose(found, torch.stack(outputs, 1), atol=1e-10)
    assert torch.allclose(last, one[0], atol=1e-10)


def test_a_failed_step_can_be_repeated_and_a_lost_state_is_an_error(directory: Path) -> None:
    states = StateCache(load_spec(str(directory)), 2, "cpu")
    first = Run(0, 0, (1, 2, 3), (), None, state_slot=1)
    second = Run(0, 3, (4,), (), None, state_slot=1)
    for run in (first, first):
        [prompt] = states.begin([run]).prompts
        assert prompt.new.tolist() == [0]
    for run in (second, second):
        decodes = states.begin([run]).decodes
        assert decodes is not None and not len(decodes.new)
        (read, slots), (written, _) = decodes.read, decodes.write
        assert (read.tolist(), written.tolist(), slots.tolist()) == ([0], [1], [1])
    with pytest.raises(CannotRun, match="lost"):
        states.begin([Run(0, 7, (5,), (), None, state_slot=1)])
    with pytest.raises(CannotRun, match="lost"):
        states.begin([Run(1, 3, (5,), (), None, state_slot=0)])
    with pytest.raises(CannotRun, match="drafts"):
        states.begin([Run(0, 4, (5, 6), (), None, num_drafts=1, state_slot=1)])


def test_a_slot_does_not_show_what_it_held_before(directory: Path) -> None:
    """The same prompt gives the same tokens after hundreds of others, with one slot."""
    rng = random.Random(3)
    greedy = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Engine.open(str(directory), dtype="float32", max_num_seqs=1) as engine:
        prompt = [rng.randrange(67) for _ in range(20)]
        [before] = engine.generate([prompt], greedy)
        engine.generate([[rng.randrange(67) for _ in range(n)] for n in range(1, 30)], greedy)
        [after] = engine.generate([prompt], greedy)
    assert before.tokens == after.tokens


def test_memory_of_states_is_budgeted_and_explained(directory: Path) -> None:
    spec = load_spec(str(directory))
    each = 4 * 3 * (4 * 6 * 10 + (2 * 2 * 6 + 4 * 10) * 3)
    assert state_bytes(spec) == each
    assert kv_bytes_per_token(spec) == 2 * 2 * 16 * 4  # of one layer
    resolved = resolve(Settings(model=str(directory), max_num_seqs=3))
    assert "no prefix hits" in resolved.derivations["enable_prefix_caching"]
    assert f"{STATE_VERSIONS * each / 1024:.1f} KiB" in resolved.derivations["max_num_seqs"]
    work, longer = decode_work(spec, 2, 10), decode_work(spec, 2, 20)
    assert work.kv_read_bytes == 2 * (each + 11 * kv_bytes_per_token(spec))
    assert longer.kv_read_bytes - work.kv_read_bytes == 2 * 10 * kv_bytes_per_token(spec)


def test_speculation_is_refused_with_the_reason(directory: Path) -> None:
    speculative = Speculative(method="ngram", num_speculative_tokens=2)
    with pytest.raises(CannotRun, match="recurrent"):
        resolve(Settings(model=str(directory), speculative_config=speculative))


def test_weights_can_be_packed_while_loading_and_not_by_quantize(
    directory: Path, tmp_path: Path
) -> None:
    greedy = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Engine.open(str(directory), quantization="int8", max_num_seqs=2) as engine:
        [answer] = engine.generate([tokens(12)], greedy)
    assert len(answer.tokens) == 8
    with pytest.raises(CannotRun, match="delta nets"):
        quantize(str(directory), str(tmp_path / "out"), method="rtn")
