"""Trees of drafts: read, cut, walked and judged; the target's distribution stays what it is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.engine.sampling import sample
from ridgeline.engine.sampling.uniform import uniform
from ridgeline.engine.sampling.verify import rejection_sampling
from ridgeline.engine.sampling.verify.rejection_sampling import (
    TreeDraws,
    TreePath,
    accept_tree,
    draw,
    draw_distinct,
    uniform_numbers,
)
from ridgeline.engine.sampling.verify.verifier import DraftDistributions, Verifier
from ridgeline.engine.scheduler.plan import (
    DraftBranch,
    Run,
    SamplePoint,
    draft_paths,
    sample_points,
)
from ridgeline.engine.speculate.token_tree import TokenTree, parse_tree
from ridgeline.errors import BadInput
from ridgeline.records import Sampling
from tests.engine.speculate.test_rejection import (
    LENGTH,
    Toy,
    finish,
    p_value,
    pick,
    table,
    whole,
)

pytestmark = pytest.mark.slow

TREES = {
    "two siblings": "[(0,), (1,)]",
    "wide, then narrow": "[(0,), (0, 0), (0, 1), (1,), (1, 0), (2,)]",
    "a chain and a twig": "[(0,), (0, 0), (1,)]",
}


NO = 1e300  # a number that refuses whatever could be drawn


# -- what a tree is


def test_first_leaf_of_a_parsed_tree_is_the_trunk() -> None:
    found = parse_tree(" [(1,), (0, 1), (0,), (0, 0, 0), (0,0), ]")
    assert found.leaves == ((0, 0, 0), (0, 1), (1,))
    assert (found.depth, found.widths, found.size) == (3, [2, 2, 1], 5)


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("", "not a list"),
        ("[]", "not a list"),
        ("[(0,), x]", "not a list"),
        ("[(-1,)]", "not a list"),
        ("[(0, 0)]", "add (0,)"),
        ("[(0,), (2,)]", "add (1,)"),
        ("[(0,), (1, 0)]", "add (1,)"),
        ("[(0,), (1,), (1, 1)]", "add (1, 0)"),
        (f"[{', '.join(f'({i},)' for i in range(11))}]", "too wide"),
        (
            f"[{', '.join(f'({i},), ({i}, 0), ({i}, 1), ({i}, 2), ({i}, 3)' for i in range(9))}]",
            "32",
        ),
    ],
)
def test_malformed_trees_are_refused(text: str, about: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_tree(text)
    assert about in str(error.value)


def test_tree_is_cut_where_slots_or_drafts_run_out() -> None:
    found = parse_tree("[(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)]")
    assert found.within(9, [2, 2, 1]) == found.leaves
    assert found.within(2, [2, 2, 1]) == ((0, 0), (0, 1), (1, 0))
    assert found.within(1, [2, 2, 1]) == ((0,), (1,))
    assert found.within(9, [1, 1, 1]) == ((0, 0, 0),)
    assert found.within(9, [2, 0, 0]) == ((0,), (1,))
    assert found.within(0, [2, 2, 1]) == found.within(3, [0, 0, 0]) == ()


# -- judged: by enumeration


def q_rows(toy: Toy, text: tuple[int, ...], depth: int) -> Tensor:
    """What a place's guesses are drawn from: whatever they follow."""
    return torch.stack([toy.q((*text, *[0] * i)) for i in range(depth)])


def apart(q_V: Tensor, width: int) -> dict[tuple[int, ...], float]:
    """Every order of `width` different tokens, and its chance."""
    found: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(q_V)), width):
        chance, left = 1.0, 1.0
        for token in order:
            chance *= float(q_V[token]) / left if left > 1e-12 else 0.0
            left -= float(q_V[token])
        if chance > 0:
            found[order] = chance
    return found


def step(toy: Toy, shape: TokenTree, text: tuple[int, ...]) -> Counter[tuple[int, ...]]:
    """Probability of every output of one step, exactly."""
    q_KV, found = q_rows(toy, text, shape.depth), Counter[tuple[int, ...]]()
    every = [apart(q, w).items() for q, w in zip(q_KV, shape.widths, strict=True)]
    for own in itertools.product(*every):
        places = TreeDraws([order for order, _ in own], q_KV)
        chance = float(np.prod([share for _, share in own]))
        for answers, share in answered(toy, shape, text, places, []):
            node, weight_V = judged(toy, shape, text, places, answers)
            for token, weight in enumerate((weight_V / weight_V.sum()).tolist()):
                found[(*text, *places.tokens_of(node), token)] += chance * share * weight
    return found


def judged(
    toy: Toy, shape: TokenTree, text: tuple[int, ...], places: TreeDraws, accept: Sequence[float]
) -> tuple[TreePath, Tensor]:
    return accept_tree(
        shape.leaves, lambda node: toy.p((*text, *places.tokens_of(node))), places, accept
    )


def answered(
    toy: Toy, shape: TokenTree, text: tuple[int, ...], places: TreeDraws, answers: list[float]
) -> list[tuple[list[float], float]]:
    """Every way in which the children that are asked may answer (-1: yes, NO: no), and its chance,
    which is found from outside."""
    try:
        judged(toy, shape, text, places, answers)
    except StopIteration:
        pass
    else:
        return [(answers, 1.0)]
    kept, rest, low, high = answers.count(-1.0), [NO] * shape.size, 0.0, 1.0
    for _ in range(45):
        middle = (low + high) / 2
        node, _ = judged(toy, shape, text, places, [*answers, middle, *rest])
        low, high = (middle, high) if len(node) > kept else (low, middle)
    yes = 0.0 if low < 1e-9 else 1.0 if high > 1 - 1e-9 else low
    return [
        (found, share * chance)
        for answer, chance in ((-1.0, yes), (NO, 1 - yes))
        if chance > 0
        for found, share in answered(toy, shape, text, places, [*answers, answer])
    ]


def off_by(toy: Toy, shape: TokenTree) -> float:
    """The largest error of a probability of the first `LENGTH` tokens."""
    found = whole(cache(lambda text: step(toy, shape, text)))
    return max(abs(found[text] - chance) for text, chance in toy.truth().items())


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("seed", "likeness"), [(0, 0.0), (1, 0.7)])
def test_distribution_is_kept_by_enumeration(name: str, seed: int, likeness: float) -> None:
    assert off_by(Toy(seed, 3, likeness), parse_tree(TREES[name])) < 1e-9


def test_planted_bug_in_the_walk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual forgotten: the second child is judged, and the last token drawn, by p itself."""
    monkeypatch.setattr(rejection_sampling, "residual", lambda p_V, q_V, weight=1.0: p_V)
    assert off_by(Toy(0, 3, 0.0), parse_tree(TREES["two siblings"])) > 1e-2


# -- by draws, with the engine's own numbers, through the verifier


def play(toy: Toy, shape: TokenTree, seed: int) -> tuple[int, ...]:
    """The first tokens of one request, step by step, as the engine draws and verifies them."""
    text: tuple[int, ...] = ()
    while len(text) < LENGTH:
        q_KV, drawn = q_rows(toy, text, shape.depth), DraftDistributions()
        left = iter(uniform_numbers(seed, len(text), shape.size, rejection_sampling.DRAFT))
        draws = [
            draw_distinct(q_V, list(itertools.islice(left, width)))
            for q_V, width in zip(q_KV, shape.widths, strict=True)
        ]
        places = TreeDraws(draws, q_KV)
        leaves = shape.within(9, [len(own) for own in draws])
        drawn.record_tree(0, places)
        run = run_of([places.tokens_of(leaf) for leaf in leaves], WARM, seed, len(text))
        every = draft_paths(run)
        rows = [
            [toy.p((*text, *path.drafts[:i])) for i in range(path.max_outputs)] for path in every
        ]
        logits_SV = torch.stack(list(itertools.chain(*rows))).log()
        at = [sample_point for path in every for sample_point in sample_points(path)]
        [taken] = Verifier("standard", drawn).accept_trees(logits_SV, [run], at)
        tokens = tuple(token for token, _ in taken.choices)
        assert tokens[:-1] == every[taken.path].drafts[: len(tokens) - 1]
        text += tokens
    return text[:LENGTH]


WARM, GREEDY = Sampling(temperature=1.0), Sampling(temperature=0.0, logprobs=1)


def run_of(
    chains: Sequence[tuple[int, ...]], sampling: Sampling, seed: int = 1, index: int = 7
) -> Run:
    at = SamplePoint(sampling, seed, index, 3)
    branches = tuple(DraftBranch(chain, (0, 1)) for chain in chains[1:])
    return Run(0, 9, (1, *chains[0]), (0,), at, num_drafts=len(chains[0]), branches=branches)


def test_distribution_is_kept_over_seeded_draws() -> None:
    toy, shape = Toy(7, 3, 0.5), parse_tree(TREES["wide, then narrow"])
    texts = Counter(play(toy, shape, seed) for seed in range(1_500))
    assert p_value(toy, texts) > 1e-3


# -- a million draws, many at a time: the same rule in array form, first shown to be the same


def many(toy: Toy, shape: TokenTree, num: int, bug: str = "") -> Counter[tuple[int, ...]]:
    """One step from nothing, then plain draws, for `num` requests at once."""
    rng = np.random.default_rng(99)
    q = [np.tile(row.numpy(), (num, 1)) for row in q_rows(toy, (), shape.depth)]
    draws = [pick_apart(own, width, rng) for own, width in zip(q, shape.widths, strict=True)]
    accept = rng.random((num, shape.size))
    ranks, weight = judge(toy, shape, draws, q, accept, bug)
    depths = (ranks >= 0).sum(1)
    text = np.full((num, shape.depth + 1), -1)
    fresh, at = pick(weight, rng.random(num)), np.arange(num)
    for i in range(shape.depth):
        text[:, i] = np.where(depths > i, draws[i][at, np.maximum(ranks[:, i], 0)], -1)
    text[at, depths] = fresh
    if text.shape[1] < LENGTH:
        text = np.column_stack([text, np.full((num, LENGTH - text.shape[1]), -1)])
    return finish(toy, text, depths + 1, rng)


def pick_apart(q: np.ndarray, width: int, rng: np.random.Generator) -> np.ndarray:
    q, at, found = q.copy(), np.arange(len(q)), []
    for _ in range(width):
        found.append(pick(q, rng.random(len(q))))
        q[at, found[-1]] = 0.0
    return np.column_stack(found)


def judge(
    toy: Toy,
    shape: TokenTree,
    draws: Sequence[np.ndarray],
    q: Sequence[np.ndarray],
    accept: np.ndarray,
    bug: str = "",
) -> tuple[np.ndarray, np.ndarray]:
    """The ranks on the way to where each ends (-1 behind it), and the weights of the next token."""
    num = len(accept)
    at, ranks = np.arange(num), np.full((num, shape.depth), -1)
    text, asked = np.zeros((num, 0), dtype=np.int64), np.zeros(num, dtype=np.int64)
    going, weight = np.ones(num, dtype=bool), np.zeros((num, toy.vocab))
    for place in range(shape.depth):
        p, left = table(toy.p, toy.vocab, text), q[place].copy()
        waits = going.copy()
        for rank in range(shape.widths[place]):
            nodes = {leaf[:place] for leaf in shape.leaves if leaf[place : place + 1] == (rank,)}
            here = [tuple(row) in nodes for row in ranks[:, :place].tolist()]
            tried = waits & np.array(here)
            x = draws[place][:, rank]
            yes = tried & (accept[at, np.minimum(asked, shape.size - 1)] * left[at, x] < p[at, x])
            asked += tried
            ranks[yes, place] = rank
            waits &= ~yes
            no = tried & ~yes
            rest = p if bug == "residual forgotten" else np.maximum(p - left, 0)
            p = np.where(no[:, None], rest / np.maximum(rest.sum(1, keepdims=True), 1e-300), p)
            if bug != "put back":
                left[no, x[no]] = 0.0
                left[no] /= np.maximum(left[no].sum(1, keepdims=True), 1e-300)
        weight = np.where((going & waits)[:, None], p, weight)
        going &= ~waits
        chosen = draws[place][at, np.maximum(ranks[:, place], 0)]
        text = np.column_stack([text, np.where(going, chosen, 0)])
    return ranks, np.where(going[:, None], table(toy.p, toy.vocab, text), weight)


@pytest.mark.parametrize("name", TREES)
def test_array_form_equals_the_scalar_rule(name: str) -> None:
    toy, shape, rng = Toy(3, 4, 0.5), parse_tree(TREES[name]), np.random.default_rng(1)
    q_KV = q_rows(toy, (), shape.depth)
    for _ in range(100):
        draws = [rng.permutation(4)[:width].tolist() for width in shape.widths]
        accept = rng.random(shape.size)
        node, weight_V = judged(toy, shape, (), TreeDraws(draws, q_KV), list(accept))
        ranks, weight = judge(
            toy,
            shape,
            [np.array([own]) for own in draws],
            list(q_KV.numpy()[:, None]),
            accept[None],
        )
        assert tuple(rank for rank in ranks[0].tolist() if rank >= 0) == node
        assert np.allclose(weight_V.numpy(), weight[0])


def test_distribution_is_kept_over_a_million_draws() -> None:
    toy = Toy(21, 4, 0.3)
    shape = parse_tree(TREES["wide, then narrow"])
    assert p_value(toy, many(toy, shape, 1_000_000)) > 1e-3


@pytest.mark.parametrize("bug", ["residual forgotten", "put back"])
def test_planted_bugs_are_caught(bug: str) -> None:
    toy, shape = Toy(1, 6, 0.5), parse_tree("[(0,), (1,), (2,)]")
    assert p_value(toy, many(toy, shape, 100_000)) > 1e-3
    assert p_value(toy, many(toy, shape, 100_000, bug)) < 1e-6


# -- walked


def test_walk_follows_the_target_model() -> None:
    """Greedy: the second branch is right for two tokens, then the model says its own."""
    chains = [(4, 4), (2, 0), (2, 1, 3)]
    run = run_of(chains, GREEDY)
    says = {(): 2, (2,): 1, (2, 1): 0, (4,): 3, (2, 0): 3, (4, 4): 3, (2, 1, 3): 1}
    every = draft_paths(run)
    heads = [path.drafts[:i] for path in every for i in range(path.max_outputs)]
    logits_SV = torch.full((len(heads), 5), -1.0)
    for row, head in enumerate(heads):
        logits_SV[row, says[head]] = 1.0
    at = [sample_point for path in every for sample_point in sample_points(path)]
    [taken] = Verifier().accept_trees(logits_SV, [run], at)
    assert taken.path == 2 and [token for token, _ in taken.choices] == [2, 1, 0]
    logprob_entries = [logprobs for _, logprobs in taken.choices]
    assert [
        logprob_entry.token for logprob_entry in logprob_entries if logprob_entry is not None
    ] == [2, 1, 0]
    [named] = Verifier().accept_argmax_trees(logits_SV.argmax(1).tolist(), [run])
    assert named.path == 2 and [token for token, _ in named.choices] == [2, 1, 0]


def test_seeded_tokens_do_not_depend_on_the_tree() -> None:
    """Random logits by text, random trees: always the tokens of plain decoding."""
    rng = np.random.default_rng(4)
    seeded = Sampling(temperature=0.9, seed=5)

    def logits(head: tuple[int, ...]) -> Tensor:
        own = np.random.default_rng([11, *head, len(head)])
        return torch.tensor(own.normal(size=5) * 2, dtype=torch.float32)

    lengths = Counter[int]()
    for turn in range(200):
        chains = [tuple(map(int, rng.integers(0, 3, rng.integers(1, 4)))) for _ in range(4)]
        run = run_of(chains, seeded, seed=turn)
        every = draft_paths(run)
        heads = [path.drafts[:i] for path in every for i in range(path.max_outputs)]
        at = [sample_point for path in every for sample_point in sample_points(path)]
        [taken] = Verifier().accept_trees(torch.stack([logits(h) for h in heads]), [run], at)
        given = tuple(token for token, _ in taken.choices)
        plain: tuple[int, ...] = ()
        for i in range(len(given)):
            [(token, _)] = sample(logits(plain)[None], [at_index(run, i)])
            plain += (token,)
        assert given == plain
        lengths[len(given)] += 1
        assert given[:-1] == every[taken.path].drafts[: len(given) - 1]
        assert not any(path.drafts[: len(given)] == given for path in every)
    assert lengths[1] > 10 and lengths[2] > 10


def at_index(run: Run, i: int) -> SamplePoint:
    assert run.sample is not None
    return SamplePoint(run.sample.sampling, run.sample.seed, run.sample.index + i, 3)


def test_random_numbers_of_a_step_are_distinct() -> None:
    found = (
        uniform_numbers(5, 7, 12)
        + uniform_numbers(5, 7, 12, rejection_sampling.DRAFT)
        + [uniform(5, 7)]
    )
    assert len(set(found)) == len(found)
    assert draw_distinct(torch.tensor([0.5, 0.0, 0.5]), [0.1, 0.1, 0.1]) == [0, 2]
    assert draw(torch.tensor([0.0, 1.0]), 0.999) == 1
