"""Reads `tokenizer.model`, a SentencePiece model: its pieces and the settings that text depends on.

The file is a protocol buffer (sentencepiece_model.proto of google/sentencepiece). Only the fields
that decide on token ids are decoded, so that neither sentencepiece nor protobuf is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ridgeline.errors import BadModel

FILE = "tokenizer.model"
MAX_BYTES = 50_000_000
UNIGRAM, BYTE_PAIRS = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Value = int | bytes


class Piece(msgspec.Struct, frozen=True):
    """A token; `type` is one of NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED and BYTE."""

    text: str
    score: float
    type: int


class SentencePieceModel(msgspec.Struct, frozen=True, kw_only=True):
    """The pieces by token id, and how text is normalised before it is cut into them.

    `charsmap`: SentencePiece's compiled table of replacements, empty for none. `bos` and `eos` are
    token ids, None where the model has none.
    """

    pieces: tuple[Piece, ...]
    kind: int
    byte_fallback: bool
    unk: int
    bos: int | None
    eos: int | None
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Decode the file. Raises BadModel where it is not a SentencePiece model."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise BadModel("the file is too large", value=str(file), limit=f"{MAX_BYTES} bytes")
        return _model(file.read_bytes())
    except OSError as error:
        raise BadModel("cannot read the file", value=str(file), fix=str(error)) from None
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise BadModel(
            "the file is not a SentencePiece model", value=str(file), fix=str(error)
        ) from None


def _model(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_blob(value)))
        elif number == 2:
            trainer |= dict(_fields(_blob(value)))
        elif number == 3:
            normalizer |= dict(_fields(_blob(value)))
    if not pieces:
        raise ValueError("it holds no pieces")
    count = len(pieces)
    unk = _signed(trainer.get(40, 0))
    if not 0 <= unk < count or pieces[unk].type != UNKNOWN:
        raise ValueError(f"its unknown token {unk} is not a piece of that type")
    return SentencePieceModel(
        pieces=tuple(pieces),
        kind=_signed(trainer.get(3, UNIGRAM)),
        byte_fallback=bool(trainer.get(35, 0)),
        unk=unk,
        bos=_token(trainer.get(41, 1), count),
        eos=_token(trainer.get(42, 2), count),
        charsmap=_blob(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
        whitespace_as_suffix=bool(trainer.get(24, 0)),
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _blob(fields.get(2, bytes(4))))
    return Piece(_blob(fields.get(1, b"")).decode(), score, _signed(fields.get(3, NORMAL)))


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message: whole numbers as int, everything else as its bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire_type == _BYTES:
            length, at = _varint(data, at)
        elif wire_type in (_FIXED64, _FIXED32):
            length = 8 if wire_type == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire_type} at byte {at}")
        if at + length > len(data):
            raise ValueError(f"it ends within field {number}")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError(f"a number without an end at byte {at}")


def _blob(value: Value) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value


def _signed(value: Value) -> int:
    """An int32, which is written as a 64-bit two's complement."""
    if not isinstance(value, int):
        raise ValueError("bytes in place of a number")
    return value - (1 << 64) if value >= 1 << 63 else value


def _token(value: Value, count: int) -> int | None:
    token = _signed(value)
    return token if 0 <= token < count else None
