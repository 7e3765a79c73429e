"""Windows cut out of texts begin with BOS where the model's tokenizer adds it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.compress.calibration import (
    read_text,
    split_windows,
    tokens_of,
)
from ridgeline.compress.calibration import windows as calibration_windows
from ridgeline.compress.recipe import QuantizeRecipe, check
from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization import bos_tokens, load_tokenizer
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.optimize.quality import make_tasks
from ridgeline.workflows.evaluate.heldout_text import heldout_windows
from ridgeline.workflows.evaluate.lm_eval import LmEvalOptions, run_lm_eval

BOS = 5


@pytest.fixture(scope="module", params=["bos", "bos and eos", "neither"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model whose tokenizer adds token 5 before, and token 6 after a text."""
    path = tmp_path_factory.mktemp("model")
    shutil.copytree(model_path("demo"), path, dirs_exist_ok=True)
    tokenizer: dict[str, Any] = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    texts = {index: text for text, index in tokenizer["model"]["vocab"].items()}
    before = {"SpecialToken": {"id": texts[BOS], "type_id": 0}}
    after = {"SpecialToken": {"id": texts[BOS + 1], "type_id": 0}}
    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    single = {"bos": [before, text], "bos and eos": [before, text, after], "neither": [text]}
    ends = {texts[i]: {"id": texts[i], "ids": [i], "tokens": [texts[i]]} for i in (BOS, BOS + 1)}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single[request.param],
        "pair": single[request.param],
        "special_tokens": ends,
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(path)


def test_bos_is_what_the_tokenizer_puts_before_a_text(model: str) -> None:
    whole = load_tokenizer(model).encode("a")
    assert bos_tokens(load_tokenizer(model)) == ([BOS] if whole[0] == BOS else [])


def test_heldout_windows_begin_with_bos_and_contain_no_end(model: str) -> None:
    tokenizer = load_tokenizer(model)
    found, bos = heldout_windows(tokenizer, 64), bos_tokens(tokenizer)
    assert len(found) > 100 and {len(window) for window in found} == {64}
    assert all(list(window[: len(bos)]) == bos for window in found)
    plain = heldout_windows(load_tokenizer("demo"), 64 - len(bos))
    assert [window[len(bos) :] for window in found] == list(plain)


def test_questions_begin_with_bos(model: str) -> None:
    tokenizer = load_tokenizer(model)
    bos = bos_tokens(tokenizer)
    for task in make_tasks(tokenizer.encode):
        assert all(list(task.item(i).prompt[: len(bos)]) == bos for i in range(3))


def test_calibration_windows_begin_with_bos(model: str) -> None:
    recipe, text = check(QuantizeRecipe(method="gptq", window_tokens=32)), read_text(None)
    size, bos = load_spec(model).vocab_size, bos_tokens(load_tokenizer(model))
    split = split_windows(model, text, recipe, size)
    for window in (*calibration_windows(model, text, recipe, size), *split.learnt, *split.held):
        assert len(window) == 32 and window[: len(bos)] == bos
    tokenized = tokens_of(model, text)
    assert tokenized.window(7, 16) == [*bos, *tokenized.tokens[7 : 23 - len(bos)]]


def test_lm_eval_adds_bos_as_the_tokenizer_does(model: str, tmp_path: Path) -> None:
    """A stand-in for the program that writes down its arguments."""
    script, log = tmp_path / "lm-eval", tmp_path / "arguments"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(log)!r}, 'w').write(' '.join(sys.argv))\n"
    )
    script.chmod(0o755)
    with Engine.open(model, max_num_seqs=2) as engine:
        run_lm_eval(LmEvalOptions("task", program=str(script)), engine, model)
        has_bos = bool(bos_tokens(engine.tokenizer))
    assert ("add_bos_token=True" in log.read_text()) == has_bos
