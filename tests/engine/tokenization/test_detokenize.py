"""Pieces join to the text of the whole, and never hold half a character."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ridgeline.engine.tokenization import HfTokenizer, load_tokenizer
from ridgeline.engine.tokenization.chat import NoChatTemplate
from ridgeline.engine.tokenization.detokenize import ByteDetokenizer, Detokenizer, PrefixDetokenizer

DEMO = load_tokenizer("demo")
HARD = "naïve 你好，世界 👩‍👩‍👧‍👦🏳️‍🌈 \t\r\n\0 Ω≈ç√ \u200b é\u0301 \ufffd end"
TEXTS = st.text(max_size=40) | st.text(
    st.sampled_from("aé你👩🏽\u200d\ufe0f\ufffd \n"), max_size=40
)


def sentencepiece() -> HfTokenizer:
    """A tokenizer in the manner of Llama 2: ▁ for spaces, bytes for what the vocabulary lacks."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcé你",
        "▁a",
        "ab",
    ]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(
        vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    inner = tokenizers.Tokenizer(model)
    normal, decode = tokenizers.normalizers, tokenizers.decoders
    inner.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
    inner.decoder = decode.Sequence(
        [decode.Replace("▁", " "), decode.ByteFallback(), decode.Fuse(), decode.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>"])
    return HfTokenizer(inner, NoChatTemplate())


PIECES = sentencepiece()


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXTS)
@example(HARD)
def test_text_survives_the_round_trip_piece_by_piece(text: str) -> None:
    tokens = DEMO.encode(text, add_special_tokens=False)
    found = pieces(DEMO.detokenizer([]), tokens)
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4100) | st.integers(0, 300), max_size=30), st.booleans())
def test_pieces_of_arbitrary_tokens_join_to_the_full_decode(tokens: list[int], skip: bool) -> None:
    """Sampling at a high temperature makes bytes that are no UTF-8, special tokens, unknown ids."""
    found = pieces(DEMO.detokenizer([], skip_special_tokens=skip), tokens)
    assert "".join(found) == DEMO.decode(tokens, skip_special_tokens=skip)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXTS, TEXTS)
@example("a", " b 👩‍👩‍👧‍👦 你")
@example("\x800000\x80\x80\U00010000\U00010000\x800\x80\x80", "0")
@example("\ufffd\x80\ufffd\x80\ufffd", "0")
def test_sentencepiece_output_continues_its_prompt(prompt: str, answer: str) -> None:
    """With the prompt's tail as context the space at the border survives."""
    answer = answer.replace("\ufffd", "")
    prompt_tokens, tokens = PIECES.encode(prompt), PIECES.encode("a" + answer)[1:]
    found = pieces(PIECES.detokenizer(prompt_tokens), tokens)
    whole, before = PIECES.decode(prompt_tokens + tokens), PIECES.decode(prompt_tokens)
    assert before + "".join(found) == whole
    assert not any("\ufffd" in piece for piece in found)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXTS)
@example(HARD)
def test_bytes_of_tokens_join_to_those_of_the_text(text: str) -> None:
    """Each on its own, parts of characters and blanks at the beginning of words among them."""
    for tokenizer, before in ((DEMO, ""), (PIECES, " ")):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.bytes_of(token) for token in tokens)
        assert joined == (before + text if tokens else "").encode()
    begin = PIECES.encode("<s>")[-1]
    assert PIECES.bytes_of(begin) == b""
    assert PIECES.bytes_of(begin, skip_special_tokens=False) == b"<s>"


def test_a_character_comes_whole_with_its_last_byte() -> None:
    tokens = PIECES.encode("👩")[1:]
    assert len(tokens) == 4
    assert pieces(PIECES.detokenizer([]), tokens) == ["", "", "", "👩", ""]


def test_half_a_character_at_the_end_is_flushed() -> None:
    tokens = PIECES.encode("👩")[1:3]
    assert "".join(pieces(PIECES.detokenizer([]), tokens)) == PIECES.decode(tokens) == "\ufffd" * 2


def test_invalid_bytes_are_not_held_back_forever() -> None:
    token = PIECES.inner.token_to_id("<0x80>")
    detokenizer = PIECES.detokenizer([])
    found = [detokenizer.push(token) for _ in range(100)]
    assert "\ufffd" in "".join(found)


def test_decoder_is_chosen_by_the_vocabulary() -> None:
    assert isinstance(DEMO.detokenizer([]), ByteDetokenizer)
    assert isinstance(PIECES.detokenizer([]), PrefixDetokenizer)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_only_on_request(skip: bool) -> None:
    tokens = [*DEMO.encode("hi"), 0, *DEMO.encode(" there")]
    text = "".join(pieces(DEMO.detokenizer([], skip_special_tokens=skip), tokens))
    assert text == ("hi there" if skip else "hi<|endoftext|> there")
