"""Chats that a model writes itself, to train drafters on."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.config.improve import TrainDrafterOptions
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.records.progress import silent
from ridgeline.workflows import own_text
from ridgeline.workflows.own_text import OwnChats, user_turn
from ridgeline.workflows.train_drafter import check_options


def test_user_turn_is_the_template_around_a_message() -> None:
    tokenizer = load_tokenizer("demo")
    before, after = user_turn(tokenizer)
    text = tokenizer.encode("Why?", add_special_tokens=False)
    assert [*before, *text, *after] == tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why?"}]
    )


def test_chats_hold_template_message_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "MESSAGE_TOKENS", 12)
    monkeypatch.setattr(own_text, "ANSWER_TOKENS", 8)
    tokenizer, output = load_tokenizer("demo"), tmp_path / "drafter"
    chats = OwnChats("demo", 3, seed=0)
    tokens = chats.generate(tokenizer, output, silent)
    before, after = user_turn(tokenizer)
    assert tokens[: len(before)] == before
    assert len(before) + len(after) < len(tokens) <= 3 * (len(before) + 24 + len(after) + 8)
    assert chats.generate(tokenizer, output, silent) == tokens, "as an interrupted run reads them"
    own_text.forget_own_text(output)
    assert not list(tmp_path.iterdir())


def test_own_tokens_need_a_text_to_continue(tmp_path: Path) -> None:
    options = TrainDrafterOptions(chat_prompts=10, own_tokens=100)
    with pytest.raises(BadInput, match="--own-tokens 100"):
        check_options(tmp_path / "x", options)
    assert check_options(tmp_path / "x", TrainDrafterOptions(chat_prompts=10)) == ""
