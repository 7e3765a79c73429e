"""Drafters that were trained: heads and layer against plain readings of them, files that are
refused, states that follow the steps, and answers that are those of plain decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from ridgeline import Engine, Sampling
from ridgeline.compress.drafter_training.students import EagleStudent, MedusaStudent, Teacher
from ridgeline.compress.drafter_training.train_drafter import (
    DrafterRecipe,
    load_teacher,
    make_student,
)
from ridgeline.config.settings import settings_from
from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.build import assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.sampling.verify.verifier import DraftDistributions
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.plan import Run, SamplePoint
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.checkpoint import CONFIG, write_drafter
from ridgeline.engine.speculate.drafters.eagle import EagleDrafter, EagleLayer
from ridgeline.engine.speculate.drafters.hidden_states import HiddenStates
from ridgeline.engine.speculate.drafters.medusa import MedusaDrafter, MedusaHeads
from ridgeline.errors import BadInput, BadModel, UserError
from ridgeline.records import Request

GREEDY = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
KINDS = ("medusa", "eagle")
TREE = "[(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)]"


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return load_teacher("demo")


@pytest.fixture(scope="module")
def folders(teacher: Teacher, tmp_path_factory: Any) -> dict[str, Path]:
    """One untrained drafter of each kind: it guesses badly, and now and then well."""
    found = {}
    for kind in KINDS:
        student, config = make_student(teacher, DrafterRecipe(kind=kind, num_heads=3))
        found[kind] = tmp_path_factory.mktemp(kind)
        write_drafter(found[kind], config, student.tensors())
    return found


def asked(kind: str, folder: Path | str, **config: object) -> dict[str, Any]:
    config = {"num_speculative_tokens": 3, **config}
    return {
        "speculative_config": {"method": kind, "model": str(folder), **config},
        "model": "demo",
        "kv_cache_memory_bytes": 16 << 20,
        "num_threads": 1,
    }


def contexts(tokens: list[int], seq_id: int = 0, sampling: Sampling = GREEDY) -> DraftContext:
    return DraftContext(seq_id, tokens, 1, "", sampling, 5, 99)


def text(count: int, salt: int = 0) -> list[int]:
    return [(i * i * 31 + 17 * i + 101 * salt) % 4000 + 5 for i in range(count)]


def test_medusa_heads_equal_the_trained_model(teacher: Teacher) -> None:
    student = MedusaStudent(teacher, 3)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        student.weight_KCC.normal_(std=0.1, generator=random)
        student.bias_KC.normal_(generator=random)
    tokens = text(30)
    batch = teacher(torch.tensor([tokens]))
    states = HiddenStates(window=1)
    h_TC = batch.h_BLC[0]
    states.observe([Run(0, 0, tuple(tokens), (), None)], [0], h_TC)
    heads = MedusaHeads(student.weight_KCC.detach(), student.bias_KC.detach())
    drafter = MedusaDrafter(heads, teacher.decoder, states, drawn=DraftDistributions(), draws=False)
    [drafts] = drafter.draft([contexts([*tokens, 9])], [5])
    expected = []
    for w_CC, b_C in zip(student.weight_KCC, student.bias_KC, strict=True):
        z_C = h_TC[-1] + F.silu(w_CC @ h_TC[-1] + b_C)
        expected.append(int((teacher.head_VC @ z_C).argmax()))
    assert drafts == tuple(expected)
    assert drafter.draft([contexts(tokens)], [3]) == [()], "states of another place"
    drafter.forget(0, tokens, "")
    assert drafter.draft([contexts([*tokens, 9])], [3]) == [()]


def make_eagle(teacher: Teacher, num_blocks: int = 40) -> tuple[EagleStudent, EagleDrafter]:
    student, _ = make_student(teacher, DrafterRecipe(kind="eagle", seed=4))
    assert isinstance(student, EagleStudent)
    tensors = {name: tensor.detach() for name, tensor in student.tensors().items()}
    layer = EagleLayer(student.shape, tensors, teacher.decoder, 512)
    cache = KvCache.allocate(layer.spec, num_blocks, 4, torch.float32, "cpu")
    attention = build_attention("torch", layer.spec, cache)
    pool, states = BlockPool(num_blocks, 4), HiddenStates(window=64)
    return student, EagleDrafter(
        layer, attention, pool, states, drawn=DraftDistributions(), draws=False
    )


@torch.no_grad()
def slow_drafts(student: EagleStudent, tokens: list[int], depth: int) -> tuple[int, ...]:
    """Each pass over the whole text: states of the target where they are known, the layer's own
    behind, keys as they were written."""
    batch = student.teacher(torch.tensor([tokens[:-1]]))
    own, states, past = list(tokens[1:]), batch.h_BLC, []
    drafts: list[int] = []
    for _ in range(depth):
        own_BL = torch.tensor([own])
        e_BLC = F.rms_norm(
            F.embedding(own_BL, student.teacher.embed_VC).float(), (256,), None, 1e-6
        )
        f_BLC, _ = student._layer(torch.cat((e_BLC, states), -1), past)
        states = torch.cat((states, f_BLC[:, -1:]), 1)
        drafts.append(int(student.teacher.logits(f_BLC[:, -1], student.teacher.head_VC).argmax()))
        own.append(drafts[-1])
    return tuple(drafts)


@pytest.mark.slow
def test_eagle_layer_equals_the_trained_model(teacher: Teacher) -> None:
    """Two sequences side by side, over steps in which drafts are accepted and refused."""
    student, drafter = make_eagle(teacher)
    texts = [text(21), text(9, salt=1)]
    seen = [0, 0]
    for kept in ((2, 0), (1, 3), (0, 1)):
        for i, tokens in enumerate(texts):
            h_TC = teacher(torch.tensor([tokens[:-1]])).h_BLC[0]
            run = Run(i, seen[i], tuple(tokens[seen[i] : -1]), (), None)
            drafter._states.observe([run], [0], h_TC[seen[i] :])
            seen[i] = len(tokens) - 1
        found = drafter.draft([contexts(t, i) for i, t in enumerate(texts)], [3, 4])
        for tokens, drafts, depth, num in zip(texts, found, (3, 4), kept, strict=True):
            assert drafts == slow_drafts(student, tokens, depth)
            tokens += [*drafts[:num], 77]
    for seq_id in (0, 1):
        drafter.forget(seq_id, [], "")
    assert not drafter._readers and drafter._pool.num_owned == 0


def test_eagle_drafts_nothing_without_states_or_blocks(teacher: Teacher) -> None:
    _, drafter = make_eagle(teacher, num_blocks=2)
    assert drafter.draft([contexts(text(5))], [3]) == [()]
    tokens = text(30)
    drafter._states.observe(
        [Run(0, 0, tuple(tokens[:-1]), (), None)], [0], teacher(torch.tensor([tokens])).h_BLC[0]
    )
    assert drafter.draft([contexts(tokens)], [3]) == [()]


def test_states_follow_the_accepted_tokens() -> None:
    """Rows of rejected drafts are not recorded; a gap starts a new record; the window bounds it."""
    at = SamplePoint(GREEDY, 0, 0, 1)
    states = HiddenStates(window=4)
    rows = torch.arange(20.0)[:, None]
    states.observe([Run(1, 0, (5, 6), (), None), Run(2, 0, (5,), (), at)], [0, 1], rows[:3])
    assert states.of(1, 3) is not None and states.of(1, 2) is None
    states.observe([Run(2, 1, (7, 8, 9), (), at, num_drafts=2)], [2], rows[3:6])
    start, found = states.of(2, 4) or (0, rows)
    assert start == 0 and found.flatten().tolist() == [2, 3, 4]
    states.use_up(2)
    assert states.of(2, 4) is None
    states.observe([Run(2, 3, (9,), (), at)], [1], rows[6:7])
    start, found = states.of(2, 5) or (0, rows)
    assert start == 3 and found.flatten().tolist() == [6]
    states.observe([Run(2, 9, (9,), (), at)], [1], rows[7:8])
    assert (states.of(2, 11) or (0,))[0] == 9
    states.observe([Run(3, 0, tuple(range(11)), (), None)], [0], rows[:11])
    start, found = states.of(3, 12) or (0, rows)
    assert start == 7 and found.flatten().tolist() == [7, 8, 9, 10]
    states.forget(3)
    assert states.of(3, 12) is None


def test_states_kept_for_later_are_those_of_the_latest_rows() -> None:
    """Whenever they are asked for, and whatever was put aside by then, they are the latest rows:
    against a list that keeps everything."""
    rng, at = random.Random(5), SamplePoint(GREEDY, 0, 0, 1)
    for window in (1, 3, 100):
        states, all_rows, value = HiddenStates(window), {0: [0.0], 1: [1.0]}, 2.0
        states.observe(
            [Run(i, 0, (5,), (), at) for i in (0, 1)], [1, 1], torch.tensor([[0.0], [1]])
        )
        for _ in range(150):
            runs, given, rows = [], [], []
            for seq_id in (0, 1):
                drafts, kept = rng.randrange(3), rng.randrange(3)
                start = len(all_rows[seq_id])
                runs.append(Run(seq_id, start, (9,) * (1 + drafts), (), at, num_drafts=drafts))
                given.append(1 + min(kept, drafts))
                fed = [value + i for i in range(1 + drafts)]
                value, rows = value + len(fed), [*rows, *fed]
                all_rows[seq_id] += fed[: given[-1]]
            states.observe(runs, given, torch.tensor(rows)[:, None])
            if rng.random() < 0.1:
                for seq_id, known in all_rows.items():
                    start, found = states.of(seq_id, len(known) + 1) or (0, torch.empty(0))
                    assert len(found) >= min(window, len(known)), "as many as the window"
                    assert found.flatten().tolist() == known[start:]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine.open("demo", kv_cache_memory_bytes=16 << 20, num_threads=1) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "medusa, a tree"])
@pytest.mark.parametrize("extra", [{}, {"quantization": "int8", "max_num_batched_tokens": 24}])
def test_answers_are_those_of_plain_decoding(
    plain: Engine, folders: dict[str, Path], kind: str, extra: dict[str, Any]
) -> None:
    """Greedy, seeded with penalties, with stop strings; cut into chunks, over few blocks."""
    prompts = ["def add(a, b):\n    return a + b\n", "import os\n" * 9, "class A:\n", "for i in"]
    warm = Sampling(temperature=0.7, seed=3, max_tokens=40, repetition_penalty=1.1, ignore_eos=True)
    stop = Sampling(temperature=0.0, max_tokens=40, stop=("(",), ignore_eos=True)
    samplings = [GREEDY, warm, stop, GREEDY]
    name, _, tree = kind.partition(", ")
    config = {"speculative_token_tree": TREE} if tree else {}
    with Engine.from_settings(
        settings_from({**asked(name, folders[name], **config), **extra})
    ) as fast:
        found = fast.generate(prompts * 2, samplings * 2)
        drafted = fast.counters()["spec_decode_num_draft_tokens"]
    if extra:
        quantised = {"model": "demo", "kv_cache_memory_bytes": 16 << 20, "num_threads": 1, **extra}
        with Engine.from_settings(settings_from(quantised)) as slow:
            expected = slow.generate(prompts * 2, samplings * 2)
    else:
        expected = plain.generate(prompts * 2, samplings * 2)
    assert [each.text for each in found] == [each.text for each in expected]
    assert drafted > 100


@pytest.mark.slow
@pytest.mark.parametrize("tree", [{}, {"speculative_token_tree": TREE}])
def test_masked_rows_report_raw_log_probabilities(
    plain: Engine, folders: dict[str, Path], tree: dict[str, str]
) -> None:
    """Whichever path of a tree is taken, together with unmasked runs."""
    few = tuple(range(100, 400))
    masked = Sampling(temperature=0.0, max_tokens=30, logprobs=2, allowed_token_ids=few)
    free = Sampling(temperature=0.0, max_tokens=30, logprobs=2, ignore_eos=True)
    prompts = ["import os\n" * 9, "for i in", "class A:\n", "def f(x):\n"]
    settings = asked("medusa", folders["medusa"], **tree)
    with Engine.from_settings(settings_from(settings)) as engine:
        found = engine.generate(prompts, [masked, free, masked, masked])
        assert engine.counters()["spec_decode_num_accepted_tokens"]
    for each, prompt in zip(found, prompts, strict=True):
        (answer,), tokens = each.answers, plain.tokenizer.encode(prompt)
        raw_TV = plain.logprobs_of([*tokens, *answer.tokens])[len(tokens) - 1 :]
        for token, logprob, raw_V in zip(answer.tokens, answer.logprobs, raw_TV, strict=False):
            assert logprob.logprob == pytest.approx(float(raw_V[token]), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_answers_have_full_length_at_any_depth(folders: dict[str, Path], kind: str) -> None:
    settings = asked(kind, folders[kind], num_speculative_tokens=None)
    with Engine.from_settings(settings_from(settings)) as engine:
        warm = Sampling(temperature=0.9, max_tokens=30, ignore_eos=True, logprobs=1)
        found = engine.generate(["import os\n", "def f(x):\n"], warm)
    assert all(len(each.tokens) == 30 for each in found)
    with Engine.from_settings(settings_from(asked(kind, folders[kind]))) as engine:
        found = engine.generate(["import os\n", "def f(x):\n"], warm)
        assert engine.counters()["spec_decode_num_draft_tokens"] > 50
    assert all(len(each.tokens) == 30 for each in found)


@pytest.mark.slow
def test_trees_of_sampled_drafts_are_accepted(folders: dict[str, Path]) -> None:
    """No request has a seed: the children of each node are drawn and judged; a repeated prompt hits
    what the first one published."""
    settings = asked("medusa", folders["medusa"], speculative_token_tree=TREE)
    warm = Sampling(temperature=0.9, max_tokens=60, ignore_eos=True, logprobs=1, n=2)
    with Engine.from_settings(settings_from(settings)) as engine:
        for _ in range(2):
            found = engine.generate(["import os\n" * 9, "def f(x):\n"], warm)
            assert all(len(each.tokens) == 60 for each in found)
        counters = engine.counters()
        assert counters["spec_decode_num_draft_tokens"] > 200
        assert counters["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"speculative_token_tree": "(0,)"}, "not a list of nodes"),
        ({"speculative_token_tree": "[(0,), (0, 0, 0)]"}, "hangs in the air"),
        ({"speculative_token_tree": TREE, "num_speculative_tokens": 2}, "does not fit"),
        (
            {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]"},
            "does not fit",
        ),
    ],
)
def test_impossible_trees_are_refused(
    folders: dict[str, Path], config: dict[str, Any], match: str
) -> None:
    config = {"num_speculative_tokens": None, **config}
    with pytest.raises(BadInput, match=match):
        resolve(settings_from(asked("medusa", folders["medusa"], **config)))


def test_only_medusa_supports_trees(folders: dict[str, Path]) -> None:
    with pytest.raises(BadInput, match="means nothing"):
        resolve(settings_from(asked("eagle", folders["eagle"], speculative_token_tree=TREE)))


def test_request_cancelled_within_a_step_frees_its_branches(
    folders: dict[str, Path],
) -> None:
    settings = asked("medusa", folders["medusa"], speculative_token_tree=TREE)
    parts = assemble(resolve(settings_from(settings)))
    parts.scheduler.add(Request(id="0", prompt=tuple(text(21)), sampling=GREEDY, arrival_s=0.0))
    for step in range(2):
        plan = parts.scheduler.plan(float(step))
        parts.scheduler.commit(plan, parts.runner.run(plan), step + 0.5)
    plan = parts.scheduler.plan(2.0)
    [run] = plan.runs
    assert len(run.branches) == 2 and plan.copies
    result = parts.runner.run(plan)
    parts.scheduler.cancel("0", 2.25)
    parts.scheduler.commit(plan, result, 2.5)
    assert parts.scheduler.pool.num_owned == 0


def test_drafters_are_counted_in_the_memory_budget(folders: dict[str, Path]) -> None:
    eagle = resolve(settings_from(asked("eagle", folders["eagle"]))).speculative_config
    medusa = resolve(settings_from(asked("medusa", folders["medusa"]))).speculative_config
    assert eagle is not None and medusa is not None
    assert eagle.kv_bytes_per_token == 2 * 2 * 64 * 4 and medusa.kv_bytes_per_token == 0
    assert medusa.weight_bytes == 4 * 3 * (256 * 256 + 256)


@pytest.mark.parametrize("kind", KINDS)
def test_mismatched_drafters_are_refused(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    config = json.loads((folders[kind] / CONFIG).read_text())
    weights = (folders[kind] / "model.safetensors").read_bytes()

    def refused(change: dict[str, Any], match: str, content: bytes = weights) -> None:
        (tmp_path / CONFIG).write_text(json.dumps(config | change))
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=match):
            assemble(resolve(settings_from(asked(kind, tmp_path))))

    refused({"hidden_size": 512}, "for another model")
    refused({"vocab_size": 5000}, "for another model")
    refused({"target": "0" * 16}, "another model of the same sizes")
    refused({"kind": "other"}, "another kind")
    refused({"surprise": 1}, "cannot be read")
    refused({}, "safetensors", weights[:-9])
    refused({"num_heads": 4, "layer": config["layer"] | {"head_dim": 32}}, "drafter's")


def test_missing_files_and_unknown_keys_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(BadModel, match=r"drafter\.json is missing"):
        resolve(settings_from(asked("medusa", "no-such-folder")))
    with pytest.raises(BadInput, match="needs a trained drafter"):
        resolve(settings_from({"model": "demo", "speculative_config": {"method": "eagle"}}))
    with pytest.raises(BadInput, match="fewer heads"):
        resolve(settings_from(asked("medusa", folders["medusa"], num_speculative_tokens=9)))
    with pytest.raises(BadInput, match="means nothing"):
        resolve(settings_from(asked("eagle", folders["eagle"], quantization="int8")))


def test_cancelled_request_frees_the_drafters_state(folders: dict[str, Path]) -> None:
    parts = assemble(resolve(settings_from(asked("eagle", folders["eagle"]))))
    for i in range(3):
        prompt = tuple(text(20, salt=i))
        parts.scheduler.add(Request(id=f"{i}", prompt=prompt, sampling=GREEDY, arrival_s=0.0))
    for step in range(5):
        plan = parts.scheduler.plan(float(step))
        parts.scheduler.commit(plan, parts.runner.run(plan), step + 0.5)
    drafter: Any = parts.scheduler.draft_scheduler._proposer._drafter  # type: ignore[attr-defined]
    assert len(drafter._readers) == 3 and drafter._pool.num_owned > 0
    for i in range(3):
        parts.scheduler.cancel(f"{i}")
    assert not drafter._readers and not drafter._states._trails
    assert drafter._pool.num_owned == 0 and msgspec.to_builtins(parts.scheduler.totals)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_context_too_short_to_measure_drafts_on_opens(
    folders: dict[str, Path], kind: str
) -> None:
    """Automatic depth asks what drafts cost; where they cannot be measured nothing is drafted."""
    config = asked(kind, folders[kind])
    del config["speculative_config"]["num_speculative_tokens"]
    with Engine.open(max_model_len=8, **config) as engine:
        answer = engine.generate([[5, 6, 7]], GREEDY)[0]
    with Engine.open("demo", max_model_len=8, num_threads=1) as plain:
        assert plain.generate([[5, 6, 7]], GREEDY)[0].answers == answer.answers
