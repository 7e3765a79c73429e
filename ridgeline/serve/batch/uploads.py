"""`multipart/form-data` as it streams in: the file goes to the store, the fields stay small.

Nothing is held but the piece at hand; a body that is too large is refused while it comes, and what
was written of it is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from ridgeline.serve.batch.files import CHUNK_BYTES, Upload
from ridgeline.serve.batch.records import MAX_FILE_BYTES, StoredFile
from ridgeline.serve.batch.store import Store
from ridgeline.serve.errors import ApiError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_FRAME_BYTES = 64 * 1024  # headers, boundaries and fields around the file
_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16
_EXPIRY = (3600, 2_592_000)


class _Part(msgspec.Struct):
    """One part of the form while it comes."""

    header: bytes = b""
    headers: dict[bytes, bytes] = {}
    name: str = ""
    filename: str | None = None
    value: bytes = b""


class Form:
    """The parser's callbacks: small fields in `fields`, the file's pieces in `pieces`."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.pieces: list[bytes] = []
        self.ended = False
        self._part, self._num_parts = _Part(), 0

    def take(self) -> bytes:
        """The bytes of the file that came since the last call."""
        data, self.pieces = b"".join(self.pieces), []
        return data

    def on_part_begin(self) -> None:
        self._part, self._num_parts = _Part(), self._num_parts + 1
        if self._num_parts > _MAX_PARTS:
            raise ApiError(400, f"the form has too many parts; limit: {_MAX_PARTS}")

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        name = self._part.header.lower()
        headers = self._part.headers
        self._part.headers = {**headers, name: headers.get(name, b"") + data[start:end]}

    def on_header_end(self) -> None:
        self._part.header = b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._part.headers.get(b"content-disposition", b""))
        self._part.name = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename")
        if self._part.name != "file":
            return
        if self.filename is not None:
            raise ApiError(400, "the form has two files; fix: send one", param="file")
        self._part.filename = self.filename = _clean(filename or b"")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.filename is not None:
            self.pieces.append(data[start:end])
            return
        self._part.value += data[start:end]
        if len(self._part.value) > _MAX_FIELD_BYTES:
            limit = f"limit: {_MAX_FIELD_BYTES} bytes"
            raise ApiError(400, f"a form field is too long; {limit}", param=self._part.name[:64])

    def on_part_end(self) -> None:
        if self._part.filename is None:
            self.fields[self._part.name] = self._part.value.decode("utf-8", "replace")

    def on_end(self) -> None:
        self.ended = True

    def parser(self, content_type: str | None) -> MultipartParser:
        """A parser that calls back here; ApiError where the request is no form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "the request is not multipart/form-data with a boundary")
        names = [name for name in dir(self) if name.startswith("on_")]
        callbacks = {name: getattr(self, name) for name in names}
        return MultipartParser(boundary, cast("MultipartCallbacks", callbacks))


async def receive_file(
    request: Request, store: Store, now_s: float, tenant: str = ""
) -> StoredFile:
    """Store the uploaded file of `POST /v1/files`; ApiError 400 or 413 where it cannot be taken."""
    await asyncio.to_thread(check_room, store)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_FILE_BYTES + _FRAME_BYTES:
        raise _too_large()
    form = Form()
    parser = form.parser(request.headers.get("content-type"))
    upload = await asyncio.to_thread(store.files.begin, tenant)
    try:
        await _write(request, form, parser, upload, store)
        expires_at = _check(form, int(now_s))
        purpose, name = form.fields["purpose"], form.filename or "file"
        return await asyncio.to_thread(upload.finish, name, purpose, expires_at)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(upload.drop))
        raise


async def _write(
    request: Request, form: Form, parser: MultipartParser, upload: Upload, store: Store
) -> None:
    held, size = bytearray(), 0
    async for chunk in request.stream():
        try:
            parser.write(chunk)
        except FormParserError as error:
            raise ApiError(400, f"the form cannot be read: {error}") from None
        piece = form.take()
        held += piece
        size += len(piece)
        if size > MAX_FILE_BYTES:
            raise _too_large()
        if len(held) >= CHUNK_BYTES:
            await asyncio.to_thread(upload.write, bytes(held))
            held.clear()
            await asyncio.to_thread(check_room, store)
    await asyncio.to_thread(upload.write, bytes(held))


def _check(form: Form, now_s: int) -> int | None:
    """When the file is to expire, if it is; ApiError where the form lacks something."""
    for complaint, param in _complaints(form):
        raise ApiError(400, complaint, param=param)
    seconds = form.fields.get("expires_after[seconds]")
    return None if seconds is None else now_s + int(seconds)


def _complaints(form: Form) -> Iterator[tuple[str, str | None]]:
    if not form.ended:
        yield "the form is cut off before its closing boundary", None
    if form.filename is None:
        yield "the form has no file; fix: send one part named file", "file"
    if form.fields.get("purpose") != "batch":
        yield "purpose must be batch: this server keeps files for batches only", "purpose"
    seconds, anchor = (form.fields.get(f"expires_after[{key}]") for key in ("seconds", "anchor"))
    if seconds is None and anchor is None:
        return
    low, high = _EXPIRY
    whole = seconds is not None and seconds.isascii() and seconds.isdecimal() and len(seconds) < 9
    if anchor != "created_at" or not whole or not low <= int(seconds or 0) <= high:
        limit = f"limit: anchor created_at and {low} to {high} seconds"
        yield f"expires_after is not understood; {limit}", "expires_after"


def check_room(store: Store) -> None:
    """ApiError 413 where the store holds as much as it may."""
    if store.is_full:
        limit = f"limit: {store.max_bytes:.0f} bytes (--batch-store-max-bytes)"
        raise ApiError(413, f"the batch store is full; {limit}; fix: delete files", param="file")


def _too_large() -> ApiError:
    return ApiError(413, f"the file is too large; limit: {MAX_FILE_BYTES} bytes", param="file")


def _clean(name: bytes) -> str:
    """A file name that is only a name: no folders, no control characters, not too long."""
    text = name.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in text if c.isprintable())[:255] or "file"
