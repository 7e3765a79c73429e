"""With a KV cache in INT4 a request yields the same tokens however it is computed.

Texts cross the ends of several groups of 32 tokens, which are coded when they are full. A flip is
allowed, and printed, only where rounding explains it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from ridgeline.records import Request, Sampling
from tests.invariants.serving import Model, Schedule, check, serve

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0.0, max_tokens=14, ignore_eos=True)
SEEDED = Sampling(temperature=1.2, top_p=0.95, seed=7, max_tokens=14, ignore_eos=True)
SIZE = 32


@pytest.fixture(scope="module", params=["torch", "native"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Model.load("demo", request.param, None, "int4")
    torch.set_num_threads(before)


def some_requests(sampling: Sampling | None = None, shared: int = 34) -> list[Request]:
    """Prompts of 35, 59 and 46 tokens that share their first ones."""
    head = [(i * i * 7 + 11 * i) % 60 + 3 for i in range(shared)]
    chosen = [GREEDY, SEEDED, GREEDY] if sampling is None else [sampling] * 3
    return [
        Request(
            id=f"request{i}",
            prompt=tuple(head + [(j * 13 + 7 * i) % 60 + 3 for j in range(length)]),
            sampling=each,
            arrival_s=0.0,
        )
        for i, (length, each) in enumerate(zip((1, 25, 12), chosen, strict=True))
    ]


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(block_size=SIZE, arrives=(0, 2, 5)),
        Schedule(block_size=SIZE, max_num_batched_tokens=3),
        Schedule(block_size=SIZE, max_num_batched_tokens=40),
        Schedule(block_size=SIZE, drafts="prophet", depth=5),
        Schedule(block_size=SIZE, drafts="self", depth=4, prefix=True, arrives=(0, 1, 2)),
        Schedule(block_size=SIZE, drafts="ngram", depth=4, max_num_batched_tokens=9),
    ],
    ids=["batched", "chunks-of-3", "chunks-of-40", "drafts", "self-drafts", "ngram"],
)
def test_schedules_give_the_tokens_of_single_requests(model: Model, schedule: Schedule) -> None:
    requests = some_requests()
    [served] = serve(model, requests, schedule)
    check(model, requests, served)


def test_warm_prefix_cache_gives_the_tokens_of_a_cold_one(model: Model) -> None:
    requests = some_requests()
    schedule = Schedule(block_size=SIZE, prefix=True, rounds=2, arrives=(0, 3, 6))
    cold, warm = serve(model, requests, schedule)
    assert 0 < cold.hit_tokens < warm.hit_tokens
    check(model, requests, cold)
    check(model, requests, warm)


def test_preempted_requests_give_the_tokens_of_single_ones(model: Model) -> None:
    """Background requests lose their slots to a later one and resume."""
    requests = some_requests()
    requests = [
        msgspec.structs.replace(request, background=i < 2) for i, request in enumerate(requests)
    ]
    schedule = Schedule(block_size=SIZE, max_num_seqs=2, prefix=True, arrives=(0, 0, 4))
    [served] = serve(model, requests, schedule)
    assert served.num_preempted
    check(model, requests, served)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_forked_choices_equal_single_requests(model: Model, sampling: Sampling) -> None:
    """The group that is being filled is shared, then copied with its recent rows."""
    requests = some_requests(msgspec.structs.replace(sampling, n=3))[:1]
    [served] = serve(model, requests, Schedule(block_size=SIZE))
    assert served.num_forked >= 1
    check(model, requests, served)
