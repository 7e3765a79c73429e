"""Recorded loads, conversations, ramps and replays."""

from __future__ import annotations

import json
import random
import statistics

import pytest

from ridgeline.config.load import BenchOptions
from ridgeline.errors import BadInput
from ridgeline.measure.bench_options import arrivals_of
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.workload import ChatPrompt, LoadRequest, parse_workload
from ridgeline.measure.workload.arrivals import (
    Closed,
    Ramp,
    RecordedArrivals,
    parse_arrivals,
    ramp_exp,
    replay,
)
from ridgeline.measure.workload.presets import PRESETS

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,0
"""
BURSTGPT = """Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,ChatGPT,472,18,490,Conversation log
45,2,ChatGPT,1087,0,1087,Conversation log
118,3,GPT-4,417,276,693,Conversation log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 3000, "input_length": 1100, "output_length": 6, "hash_ids": [7, 9, 10]}
"""
TALK = [
    {"from": "human", "value": "What is a tensor?"},
    {"from": "gpt", "value": "x" * 41},
    {"from": "human", "value": "And a scalar?"},
    {"from": "gpt", "value": "y" * 8},
]


def test_azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    load = parse_workload(f"azure:{path}")
    assert load.at_s[1] - load.at_s[0] == pytest.approx(4.314579)
    first, second, again = load.sample(3, 0)
    assert (len(first.prompt), first.max_tokens) == (374, 44)
    assert (len(second.prompt), second.max_tokens) == (396, 109)
    assert len(again.prompt) == 374 and again.prompt != first.prompt
    assert parse_workload(load.name).rows == load.rows


def test_burstgpt_leaves_failures_out(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    load = parse_workload(f"burstgpt:{path}")
    assert [(row.at_s, row.num_input, row.num_output) for row in load.rows] == [
        (5.0, 472, 18),
        (118.0, 417, 276),
    ]


def test_mooncake_shares_what_the_hashes_share(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(MOONCAKE)
    first, second = parse_workload(f"mooncake:{path}").sample(2, 0)
    assert (len(first.prompt), len(second.prompt)) == (600, 1100)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:600] != second.prompt[512:600]
    other = next(parse_workload(f"mooncake:{path}").sample(1, 9))
    assert other.prompt == first.prompt  # blocks belong to the trace and not to the seed


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("azure", "TIMESTAMP,ContextTokens\n1,2\n"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,3,4\n"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n"),
        *(
            ("azure", f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,{count},4\n")
            for count in ("1e400", "nan", "-3", "99999999999")
        ),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n5,7\n"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\ninf,7,8\n"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n5,7," + "8" * 200_000 + "\n"),
        ("mooncake", '{"timestamp": 0, "input_length": 99999999999, "output_length": 1}'),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,x,3\n"),
        ("mooncake", '{"timestamp": 1}\n'),
        ("sharegpt", "[]"),
        ("sharegpt", "{"),
    ],
)
def test_other_files_are_not_read_as_traces(tmp_path, kind, text):
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(BadInput):
        parse_workload(f"{kind}:{path}")


def test_conversation_continues_with_the_received_answers(in_virtual_time, scripted, tmp_path):
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"id": "a", "conversations": TALK}]))
    load = parse_workload(f"conversations:{path}")
    target = scripted(prefill_s=0.1, step_s=0.01)
    run = in_virtual_time(run_load(target, load, Closed(1), LoadOptions(num_requests=1)))
    first, second = target.served
    assert (first.max_tokens, second.max_tokens) == (11, 2)
    assert [m.role for m in second.prompt.messages] == ["user", "assistant", "user"]
    assert second.prompt.messages[1].content == "a" + "b" * 10
    assert second.prompt.messages[2].content == "And a scalar?"
    assert second.id == f"{first.id}/turn-2"
    before, after = run.requests
    assert after.scheduled_s == pytest.approx(before.finished_s + 1.0)  # the think time
    single = next(parse_workload(f"sharegpt:{path}").sample(1, 0))
    assert single.turns == () and isinstance(single.prompt, ChatPrompt)


def test_a_failed_turn_ends_its_conversation(in_virtual_time, scripted, tmp_path):
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"id": "a", "conversations": TALK}]))
    target = scripted(fail=lambda request: "no")
    load = parse_workload(f"conversations:{path}")
    run = in_virtual_time(run_load(target, load, Closed(1), LoadOptions(num_requests=2)))
    assert len(run.requests) == len(target.served) == 2


def test_token_ids_cannot_become_a_conversation():
    from ridgeline.measure.workload import UserTurn

    request = LoadRequest(
        id="a", kind="k", prompt=(1, 2), max_tokens=3, turns=(UserTurn("and then?", 4),)
    )
    with pytest.raises(BadInput, match="token ids"):
        request.next_turn("so")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_lengths_that_they_document(name):
    shape = PRESETS[name]
    sample = list(parse_workload(name).sample(200, 1))
    mean = statistics.fmean(len(request.prompt) for request in sample)
    assert 0.75 * shape.input < mean < 1.35 * shape.input
    heads = {request.prompt[: shape.prefix] for request in sample}
    assert len(heads) == (min(shape.groups, 200) if shape.prefix else 1)
    shorter = next(parse_workload(f"{name}:output=7,cv=0").sample(1, 0))
    assert shorter.max_tokens == 7


@pytest.mark.parametrize("ramp", [Ramp(1.0, 16.0, 60.0), ramp_exp(1.0, 16.0, 60.0)])
def test_a_ramp_has_its_rates(ramp):
    """Expected counts from the definition, by a fine sum of the rate over time."""

    def rate(t):
        if t >= ramp.over_s:
            return ramp.high
        share = t / ramp.over_s
        return ramp.low * (ramp.high / ramp.low) ** share if ramp.exponential else 1 + 15 * share

    step_s, count = 1e-3, 0.0
    for i in range(80_000):
        count += rate((i + 0.5) * step_s) * step_s
        if i % 16_000 == 15_999:
            assert ramp.time_of(count) == pytest.approx((i + 1) * step_s, abs=2e-3)
    assert parse_arrivals(ramp.label) == ramp


def test_a_ramp_is_a_poisson_process():
    """By the counts of its first 60 s over many seeds: mean and variance are both 510."""
    ramp = Ramp(1.0, 16.0, 60.0)
    counts = []
    for seed in range(300):
        due, count = ramp.start(seed), 0
        due.next(0.0, 0)
        while due.next(0.0, 0) < 60.0:
            count += 1
        counts.append(count)
    assert statistics.fmean(counts) == pytest.approx(510, rel=0.02)
    assert statistics.variance(counts) == pytest.approx(510, rel=0.3)


def test_replay_keeps_the_arrival_times(in_virtual_time, scripted, tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    options = BenchOptions(workload=f"burstgpt:{path}", replay_speed=2.0)
    arrivals = arrivals_of(options)
    assert isinstance(arrivals, RecordedArrivals) and arrivals.at_s == (0.0, 56.5)
    load = parse_workload(options.workload)
    run = in_virtual_time(run_load(scripted(), load, arrivals, LoadOptions(num_requests=9)))
    assert [r.scheduled_s for r in run.requests] == [0.0, 56.5]  # the trace ends: so does the load
    with pytest.raises(BadInput, match="recorded arrival times"):
        arrivals_of(BenchOptions(replay_speed=2.0))
    with pytest.raises(BadInput, match="positive"):
        replay((1.0,), 0.0)


def test_ramp_flags():
    ramp = {"ramp_up_start_rps": 1.0, "ramp_up_end_rps": 3.0}
    arrivals = arrivals_of(BenchOptions(ramp_up_strategy="linear", num_prompts=20, **ramp))
    assert arrivals == Ramp(1.0, 3.0, 10.0)
    grown = arrivals_of(BenchOptions(ramp_up_strategy="exponential", num_prompts=20, **ramp))
    assert grown.expected == pytest.approx(20)
    for bad in ({"ramp_up_strategy": "linear"}, {"ramp_up_strategy": "cubic", **ramp}):
        with pytest.raises(BadInput, match="ramp needs"):
            arrivals_of(BenchOptions(**bad))
    with pytest.raises(BadInput, match="cannot be combined"):
        arrivals_of(BenchOptions(request_rate=3.0, ramp_up_strategy="linear", **ramp))


def test_random_prompts_do_not_repeat():
    rng = random.Random(0)
    seeds = rng.sample(range(1000), 3)
    prompts = {next(parse_workload("rag").sample(1, seed)).prompt for seed in seeds}
    assert len(prompts) == 3
