"""Workloads: determinism, documented shapes, files, and rejection of malformed strings."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import BadInput
from ridgeline.measure.workload import ChatPrompt, LoadRequest, parse_workload, plain_chat
from ridgeline.measure.workload.base import StopsEarly

EMBEDDED = ("chat", "code", "chat-and-code")


def sample(text, n=60, seed=0):
    return list(parse_workload(text).sample(n, seed))


def text_of(request):
    return plain_chat(request.prompt) if isinstance(request.prompt, ChatPrompt) else request.prompt


@pytest.mark.parametrize("name", [*EMBEDDED, "synthetic:input=32,output=8,cv=0.5,prefix=4"])
def test_a_sample_is_a_function_of_its_seed(name):
    assert sample(name, seed=3) == sample(name, seed=3)
    assert not {text_of(r) for r in sample(name, seed=3)} & {
        text_of(r) for r in sample(name, seed=4)
    }
    ids = [r.id for r in sample(name)]
    assert len(set(ids)) == len(ids)
    assert parse_workload(name).name == name


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_lengths_are_in_their_documented_range(name):
    requests = sample(name, 300)
    characters = [len(text_of(r)) for r in requests]
    assert min(characters) > 50 * 3  # about 3.3 characters per token
    assert max(characters) < 700 * 3.5
    assert all(16 <= r.max_tokens <= 128 for r in requests)
    assert all(r.ignore_eos for r in requests)


def test_chat_shares_its_system_prompt_and_code_its_headers():
    chats = [r.prompt for r in sample("chat")]
    assert len({chat.messages[0] for chat in chats}) == 1
    assert {len(chat.messages) for chat in chats} == {2, 4, 6}
    assert all(chat.messages[-1].role == "user" for chat in chats)
    headers = [r.prompt.split("\n\n# edit ")[0] for r in sample("code", 200)]
    counts = sorted((headers.count(h) for h in set(headers)), reverse=True)
    assert len(counts) == 8
    assert counts[0] > 3 * counts[-1]  # popular files are popular


def test_the_mix_has_half_of_each_kind():
    kinds = [r.kind for r in sample("chat-and-code", 400)]
    assert 0.4 < kinds.count("chat") / 400 < 0.6
    assert set(kinds) == {"chat", "code"}


def test_synthetic_lengths_prefix_and_variation():
    fixed = sample("synthetic:input=32,output=8,prefix=16")
    assert {len(r.prompt) for r in fixed} == {32}
    assert len({r.prompt[:16] for r in fixed}) == 1
    assert len({r.prompt[16:] for r in fixed}) == len(fixed)
    varied = sample("synthetic:input=200,output=50,cv=0.5", 3000)
    lengths = [len(r.prompt) for r in varied]
    assert statistics.fmean(lengths) == pytest.approx(200, rel=0.03)
    assert statistics.pstdev(lengths) / 200 == pytest.approx(0.5, rel=0.1)
    assert all(16 <= token < 2048 for token in varied[0].prompt)


@given(st.integers(1, 500), st.integers(1, 500), st.floats(0, 2), st.integers(17, 10**5))
def test_synthetic_names_read_back(num_input, num_output, cv, vocab):
    text = f"synthetic:input={num_input},output={num_output},cv={cv!r},vocab={vocab}"
    workload = parse_workload(text)
    assert parse_workload(workload.name) == workload


@pytest.mark.parametrize(
    "text",
    [
        "chatty",
        "chat:8",
        "synthetic:input",
        "synthetic:input=x",
        "synthetic:input=0",
        "synthetic:input=8,output=0",
        "synthetic:input=8,prefix=9",
        "synthetic:input=100000000000",
        "synthetic:output=100000000000",
        "synthetic:input=9000,prefix=9000,groups=9000",
        "synthetic:groups=100000000000",
        "synthetic:cv=1e300",
        "synthetic:cv=-1",
        "synthetic:cv=nan",
        "synthetic:size=8",
        "synthetic:input=8,input=9",
        "synthetic:vocab=3",
        "nowhere/missing.jsonl",
        "",
    ],
)
def test_malformed_workloads_are_refused(text):
    with pytest.raises(BadInput):
        parse_workload(text)


def test_a_near_miss_is_suggested():
    with pytest.raises(BadInput, match="did you mean chat-and-code"):
        parse_workload("chat_and_code")


def write(tmp_path, *rows):
    path = tmp_path / "load.jsonl"
    path.write_text(
        "\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows)
    )
    return str(path)


def test_the_three_forms_of_lines(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "a\u2028b", "output_tokens": 5, "kind": "odd", "tenant": "t"},
        {"prompt": [1, 2, 3], "output_tokens": 6},
        "",
        {
            "custom_id": "x",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 7,
            },
        },
    )
    requests = {r.max_tokens: r for r in parse_workload(path).sample(3, 0)}
    assert requests[5].prompt == "a\u2028b"
    assert (requests[5].kind, requests[5].tenant) == ("odd", "t")
    assert requests[6].prompt == (1, 2, 3)
    assert isinstance(requests[7].prompt, ChatPrompt)
    assert requests[7].id.startswith("x-")


def test_file_is_read_to_its_end_before_repeating(tmp_path):
    path = write(tmp_path, *[{"prompt": f"p{i}", "output_tokens": 1} for i in range(5)])
    texts = [r.prompt for r in parse_workload(path).sample(10, 1)]
    assert sorted(texts[:5]) == sorted(texts[5:]) == [f"p{i}" for i in range(5)]
    assert texts[:5] != [r.prompt for r in parse_workload(path).sample(5, 2)]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        {"prompt": "a"},
        {"prompt": "", "output_tokens": 1},
        {"prompt": [], "output_tokens": 1},
        {"prompt": [1, -2], "output_tokens": 1},
        {"prompt": [True], "output_tokens": 1},
        {"prompt": 3, "output_tokens": 1},
        {"output_tokens": 1},
        {"prompt": "a", "output_tokens": 0},
        {"prompt": "a", "output_tokens": "9"},
        {"prompt": "a", "output_tokens": True},
        {"prompt": "a", "output_tokens": 1, "kind": 3},
        {"messages": [], "output_tokens": 1},
        {"messages": [{"role": "wizard", "content": "a"}], "output_tokens": 1},
        {"messages": [{"role": "user"}], "output_tokens": 1},
        {"body": "x"},
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = write(tmp_path, {"prompt": "fine", "output_tokens": 1}, line)
    with pytest.raises(BadInput, match=r"load\.jsonl:2"):
        parse_workload(path)


def test_an_empty_file_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(BadInput, match="no lines"):
        parse_workload(write(tmp_path))
    (tmp_path / "load.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="cannot read"):
        parse_workload(str(tmp_path / "load.jsonl"))


def test_stops_early_only_lifts_the_fixed_length():
    early = StopsEarly(parse_workload("chat"))
    (a,), (b,) = early.sample(1, 0), parse_workload("chat").sample(1, 0)
    assert (a.prompt, a.max_tokens) == (b.prompt, b.max_tokens)
    assert not a.ignore_eos


@pytest.mark.parametrize("fields", [{"prompt": ""}, {"prompt": ChatPrompt(())}, {"max_tokens": 0}])
def test_contradictory_request_is_rejected(fields):
    with pytest.raises(BadInput):
        LoadRequest(**{"id": "r", "kind": "text", "prompt": "a", "max_tokens": 1, **fields})
