"""Equal tokens: what a change may do to answers if it claims none, on servers that round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.optimize.external.server_deployment import AnswerMargins
from ridgeline.optimize.output.number_format import exactness_line
from ridgeline.optimize.result import Exactness
from ridgeline.optimize.trial_checks import CandidateChecks

PROMPTS = ((1,), (2,), (3,))
Answer = Callable[[int, int], tuple[int, ...]]


class Server:
    """`answer(prompt, place among those sent together)`; two best tokens `gap` nats apart."""

    def __init__(self, answer: Answer, gap: float = 0.9, variation: float = 0.0) -> None:
        self.answer, self.gap, self.variation = answer, gap, variation
        self.num_calls = 0

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        self.num_calls += 1
        return [self.answer(prompt[0], i) for i, prompt in enumerate(prompts)]

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        return self.gap

    def margin_variation(self) -> float:
        return self.variation if self.num_calls > 1 else 0.0


def compared(incumbent: Server, candidate: Server) -> Exactness:
    environment: Any = SimpleNamespace(check_prompts=PROMPTS, near_tie=0.1, evaluation=None)
    runner: Any = SimpleNamespace(report=lambda text: None, budget=None)
    checks = CandidateChecks(environment, runner)
    return asyncio.run(checks.same_tokens(incumbent, candidate))  # type: ignore[arg-type]


def steady(prompt: int, place: int) -> tuple[int, ...]:
    return (prompt, 5, 6, 7)


def by_batch(prompt: int, place: int) -> tuple[int, ...]:
    """Where a prompt stands among those that are sent together decides its third token."""
    return (prompt, 5, 6 + place, 7)


def test_equal_tokens_are_the_same() -> None:
    incumbent = Server(steady)
    found = compared(incumbent, Server(steady))
    assert found.same and found.near_ties == found.num_unstable == 0
    assert incumbent.num_calls == 1


def test_near_tie_may_swap() -> None:
    incumbent = Server(steady, gap=0.05)
    found = compared(incumbent, Server(lambda prompt, place: (prompt, 5, 6, 8)))
    assert found.same and found.near_ties == 3 and incumbent.num_calls == 1


def test_change_of_tokens_on_a_server_that_repeats_itself_is_not_exact() -> None:
    found = compared(Server(steady), Server(lambda prompt, place: (prompt, 5, 9, 7)))
    assert not found.same and found.num_unstable == 0
    assert "token 3 of a continuation differs where the two best tokens are 0.9" in found.detail


def test_tokens_that_the_server_generates_in_another_batch_are_the_same() -> None:
    """All backwards: the first prompt is in the last place then."""
    found = compared(Server(by_batch), Server(lambda prompt, place: by_batch(prompt, 2 - place)))
    assert found.same and found.num_unstable == 2
    assert "2 where the baseline's own answers vary" in exactness_line(found)


def test_tokens_that_a_varying_server_never_generates_are_not_exact() -> None:
    found = compared(Server(by_batch), Server(lambda prompt, place: (prompt, 5, 60, 7)))
    assert not found.same and found.num_unstable == 0


def test_tokens_after_a_place_where_the_server_varies_are_still_compared() -> None:
    found = compared(Server(by_batch), Server(lambda prompt, place: (prompt, 5, 6 + place, 99)))
    assert not found.same and "token 4 of" in found.detail


@pytest.mark.parametrize("changed", [0, 1])
def test_change_before_the_place_where_the_server_varies_is_not_exact(changed: int) -> None:
    def answer(prompt: int, place: int) -> tuple[int, ...]:
        tokens = [prompt, 5, 6, 7]
        tokens[changed] = 99
        return tuple(tokens)

    found = compared(Server(by_batch), Server(answer))
    assert not found.same and f"token {changed + 1} of" in found.detail


def test_tokens_closer_than_the_margins_of_the_server_vary_are_the_same() -> None:
    """A few answers cannot show every token that rounding leads to, but how far it reaches."""

    def other(prompt: int, place: int) -> tuple[int, ...]:
        return (prompt, 5, 9, 7)

    found = compared(Server(steady, gap=0.13, variation=0.2), Server(other))
    assert found.same and found.num_unstable == 3
    assert exactness_line(found).endswith("own answers vary (margins by up to 0.2 nats))")
    found = compared(Server(steady, gap=0.3, variation=0.2), Server(other))
    assert not found.same
    assert "0.3 nats apart; the baseline's own vary by up to 0.2 nats" in found.detail


def test_gap_is_that_of_the_answer_that_is_named() -> None:
    """A server that varies is asked the same prompt again, with other margins."""
    answers = AnswerMargins()
    answers.add((1,), (4, 5), [0.1, 0.2])
    answers.add((1,), (4, 6), [0.1, 0.7])
    assert answers.margin((1,), (4, 5), 1) == 0.2
    assert answers.margin((1,), (4, 6), 1) == 0.7
    assert answers.margin((1,), (4, 6), 2) == 0.0
    assert answers.margin((2,), (4, 6), 0) == 0.0


def test_variation_is_measured_up_to_the_first_token_that_differs() -> None:
    answers = AnswerMargins()
    answers.add((1,), (4, 5, 6), [0.5, 0.25, 0.125])
    assert answers.variation == 0.0
    answers.add((2,), (4, 5, 6), [5.0, 5.0, 5.0])  # another prompt
    assert answers.variation == 0.0
    answers.add((1,), (4, 5, 6), [0.5, 0.375, 0.125])
    assert answers.variation == 0.125
    answers.add((1,), (4, 7, 6), [0.5, 0.25, 9.0])  # two tokens changed places
    assert answers.variation == 0.375 + 0.25


def test_variation_is_that_of_tokens_with_a_close_rival() -> None:
    answers = AnswerMargins()
    answers.add((1,), (4, 5, 6), [12.0, 0.5, 1.5])
    answers.add((1,), (4, 5, 6), [14.0, 0.625, 1.5])
    assert answers.variation == 0.125


@pytest.mark.parametrize("margins", [[], [float("inf"), float("inf")]])
def test_servers_without_margins_have_no_variation(margins: list[float]) -> None:
    answers = AnswerMargins()
    answers.add((1,), (4, 5), margins)
    answers.add((1,), (4, 6), margins)
    assert answers.variation == 0.0
