"""Every way to evict keys and values gives the tokens of the dense reference, whatever is batched.

Fresh random prompts for each seed, on random models: served together in blocks of 4, in chunks,
with prefix hits, preemption and drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.model.decoder import Decoder
from ridgeline.records import KvEviction, Request, Sampling
from tests.conformance.dense_eviction import logits_of
from tests.conformance.tiny_models import make_model
from tests.invariants.serving import CONTEXT, SLACK, Model, Schedule, Served, serve

BLOCK = 4
POLICIES = {
    "streaming": KvEviction(method="streaming", budget=20, sinks=3),
    "streaming-share": KvEviction(method="streaming", budget=0.4, sinks=0),
    "snapkv": KvEviction(method="snapkv", budget=22, window=6, pooling=3),
    "snapkv-share": KvEviction(method="snapkv", budget=0.5, window=9, pooling=1),
    "adakv": KvEviction(method="adakv", budget=21, window=6, pooling=3),
    "adakv-short-window": KvEviction(method="adakv", budget=0.6, window=2, pooling=1),
    "h2o": KvEviction(method="h2o", budget=19),
}
CASES = [
    *(("llama", backend, name) for backend in ("native", "torch", "tables") for name in POLICIES),
    *(("llama-tied-mha", "native", name) for name in ("streaming-share", "adakv", "h2o")),
    *(("qwen3", "torch", name) for name in ("streaming", "snapkv-share", "adakv-short-window")),
]
TIE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def load(one_thread: None, tmp_path_factory: Any) -> Callable[[str], Model]:
    @cache
    def load_family(family: str) -> Model:
        path = tmp_path_factory.mktemp(family)
        make_model(family, path, max_position_embeddings=CONTEXT)
        return Model.load(str(path), "native")

    return load_family


def with_backend(model: Model, backend: str) -> Model:
    """The model on another attention backend; with "torch", its layers run in torch as well."""
    if backend == "native":
        return model
    if backend != "torch":
        return replace(model, attention=backend)
    body, head = model.decoder.body, model.decoder.lm_head
    decoder = Decoder(body, layer_backend_of("torch")(body), head, 0)
    return replace(model, attention=backend, decoder=decoder)


def make_requests(rng: random.Random, policies: list[KvEviction | None]) -> list[Request]:
    """A request for each policy, greedy; some prompts begin alike."""
    head = [rng.randint(3, 62) for _ in range(24)]
    requests = []
    for i, policy in enumerate(policies):
        own = [rng.randint(3, 62) for _ in range(rng.randint(1, 40))]
        prompt = head[: rng.choice((0, 24))] + own
        sampling = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True, kv_eviction=policy)
        requests.append(Request(id=f"{i}", prompt=tuple(prompt), sampling=sampling, arrival_s=0.0))
    return requests


def check_against_dense(model: Model, requests: list[Request], served: Served) -> None:
    """Every token is the largest logit of the dense reference, up to rounding."""
    for request in requests:
        policy = request.sampling.kv_eviction or KvEviction(method="full")
        for index in range(request.sampling.n):
            output = served.answers[request.id, index]
            assert len(output) == request.sampling.max_tokens
            logits_SV, closest = logits_of(model.decoder, policy, request.prompt, output, BLOCK)
            if closest < TIE:
                print(f"{request.id}: two keys are as good as each other but for {closest:.1e}")
                continue
            chosen_S = logits_SV.gather(1, torch.tensor(output)[:, None])[:, 0]
            short_S = logits_SV.amax(1) - chosen_S
            assert short_S.max() < SLACK, (policy, short_S)


@pytest.mark.parametrize(("family", "backend", "name"), CASES)
def test_evicted_cache_gives_the_tokens_of_a_dense_mask(
    load: Callable[[str], Model], family: str, backend: str, name: str
) -> None:
    rng = random.Random(f"{name} {backend} {random.random()}")
    model = with_backend(load(family), backend)
    requests = make_requests(rng, [POLICIES[name], None])
    schedule = Schedule(
        max_num_batched_tokens=rng.choice((7, 30, 512)),
        prefix=rng.random() < 0.5,
        arrives=(0, rng.randint(0, 9)),
    )
    [served] = serve(model, requests, schedule)
    check_against_dense(model, requests, served)


SLOW = ("adakv", "adakv-short-window", "h2o")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in POLICIES],
)
def test_eviction_gives_equal_tokens_under_any_schedule(
    load: Callable[[str], Model], name: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    check_tight_schedule(load("llama"), name, seed)


@pytest.mark.parametrize("seed", [15, 56])
def test_last_sequence_waits_for_the_blocks_that_its_eviction_empties(
    load: Callable[[str], Model], seed: int
) -> None:
    """With these seeds a sequence that runs alone needs blocks which its own plan still reads."""
    check_tight_schedule(load("llama"), "adakv-short-window", seed)


def check_tight_schedule(loaded: Model, name: str, seed: int) -> None:
    """Evicting in a small pool with prefix hits, preemption and drafts changes no token."""
    rng = random.Random(seed)
    policies = [POLICIES[name], None, POLICIES[name], POLICIES["streaming"]]
    requests = make_requests(rng, policies)
    requests[0] = msgspec.structs.replace(
        requests[0], sampling=msgspec.structs.replace(requests[0].sampling, n=3)
    )
    small = Schedule(
        num_blocks=24,
        max_num_batched_tokens=rng.choice((9, 64)),
        prefix=True,
        rounds=2,
        drafts="" if name == "h2o" else "ngram",
    )
    first, second = serve(loaded, requests, small)
    [roomy] = serve(loaded, requests, Schedule(num_blocks=600))
    assert first.answers == second.answers == roomy.answers


@pytest.mark.parametrize("name", POLICIES)
def test_budget_of_the_whole_context_changes_no_token(
    load: Callable[[str], Model], name: str
) -> None:
    loaded = load("llama")
    whole = msgspec.structs.replace(POLICIES[name], budget=CONTEXT)
    rng = random.Random()
    kept = make_requests(rng, [None, None])
    evicting = [
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, kv_eviction=whole)
        )
        for request in kept
    ]
    assert serve(loaded, evicting, Schedule()) == serve(loaded, kept, Schedule())
