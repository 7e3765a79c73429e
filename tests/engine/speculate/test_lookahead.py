"""Lookahead: what the rows of a step teach, on a model that is a table of successors."""

from __future__ import annotations

from ridgeline.engine.sampling.verify.exact_match import accept_matching
from ridgeline.engine.scheduler.plan import Run, SamplePoint
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.lookahead import MAX_GRAMS, LookaheadDrafter
from ridgeline.records import Sampling

AT = SamplePoint(Sampling(), 0, 0, 1)


def contexts(tokens: list[int], seq_id: int = 0) -> DraftContext:
    return DraftContext(seq_id, tokens, 1, "", Sampling(), 0, 99)


def after(text: tuple[int, ...]) -> int:
    """The model: the next token follows from the last two."""
    return (3 * text[-1] + 5 * text[-2] + 1) % 11


def step(drafter: LookaheadDrafter, tokens: list[int], depth: int) -> int:
    """One verified step; how many drafts were accepted."""
    drafts = drafter.look(contexts(tokens), depth).tokens
    assert len(drafts) <= depth
    fed = (tokens[-1], *drafts)
    text = tuple(tokens[:-1])
    chosen = [(after(text + fed[: i + 1]), None) for i in range(len(fed))]
    run = Run(0, len(tokens) - 1, fed, (0,), AT, num_drafts=len(drafts))
    drafter.watch(run, chosen)
    kept = accept_matching(drafts, chosen)
    tokens += [token for token, _ in kept]
    return len(kept) - 1


def test_periodic_text_is_learned_and_drafted() -> None:
    tokens, plain = [3, 4], [3, 4]
    drafter = LookaheadDrafter()
    accepted = sum(step(drafter, tokens, 6) for _ in range(60))
    while len(plain) < len(tokens):
        plain.append(after(tuple(plain)))
    assert tokens == plain
    assert accepted > 40, "a text with a period is soon known"


def test_rejected_rows_become_the_next_drafts() -> None:
    """Rows behind the first refused one become the next guesses, one place further on."""
    drafter = LookaheadDrafter()
    drafter.look(contexts([1, 2]), 3)
    run = Run(0, 1, (2, 50, 51, 52), (0,), AT, num_drafts=3)
    drafter.watch(run, [(50, None), (60, None), (61, None), (62, None)])
    assert drafter.look(contexts([1, 2, 50, 60]), 3).tokens == (61, 62)


def test_agreeing_runs_are_joined_into_longer_ngrams() -> None:
    drafter = LookaheadDrafter()
    drafter.look(contexts([1, 2]), 4)
    run = Run(0, 1, (2, 9, 20, 21, 22), (0,), AT, num_drafts=4)
    drafter.watch(run, [(8, None), (7, None), (21, None), (22, None), (23, None)])
    found = drafter.look(contexts([1, 2, 20]), 6)
    assert found.tokens[:3] == (21, 22, 23), "said after 20, and each fed as it was said"
    assert found.kinds[0] > drafter.look(contexts([1, 2, 9]), 6).kinds[0]
    assert list(found.kinds) == sorted(found.kinds, reverse=True), "the further, the vaguer"


def test_ngram_pool_is_bounded_and_freed_with_its_sequence() -> None:
    drafter = LookaheadDrafter()
    drafter.look(contexts([1]), 1)
    for token in range(2 * MAX_GRAMS):
        run = Run(0, 0, (token,), (0,), AT)
        drafter.watch(run, [(token + 1, None)])
    assert len(drafter._pools[0].grams) == MAX_GRAMS
    assert drafter.look(contexts([1, 2 * MAX_GRAMS - 2]), 2).tokens[0] == 2 * MAX_GRAMS - 1
    drafter.forget(0, [], "")
    assert not drafter._pools
    drafter.watch(Run(0, 0, (5,), (0,), AT), [(6, None)])
    assert not drafter._pools, "not configured"
