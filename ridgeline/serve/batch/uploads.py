"""`multipart/form-data` as it arrives: the file is written to the store, fields are kept in memory.

Only the current piece of the file is held in memory. A body that is too large is refused while it
arrives, and the incomplete file is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, cast

import msgspec
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from ridgeline.serve.batch.files import CHUNK_BYTES, Upload
from ridgeline.serve.batch.records import MAX_FILE_BYTES, StoredFile
from ridgeline.serve.batch.schemas import EXPIRY_LIMITS_S
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.bodies.routing import refuse_compressed
from ridgeline.serve.errors import ApiError, ClientDisconnected

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_FORM_BYTES = 64 * 1024  # headers, boundaries and fields of the form
_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16


class _FormPart(msgspec.Struct):
    """The current part of the form."""

    header: bytes = b""
    headers: dict[bytes, bytes] = {}
    name: str = ""
    filename: str | None = None
    value: bytes = b""


class UploadForm:
    """Callbacks of the parser: `fields`, and pieces of the file until `take_data`."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.pieces: list[bytes] = []
        self.is_complete = False
        self._part, self._num_parts = _FormPart(), 0

    def take_data(self) -> bytes:
        """The bytes of the file that arrived since the last call."""
        data, self.pieces = b"".join(self.pieces), []
        return data

    def on_part_begin(self) -> None:
        self._part, self._num_parts = _FormPart(), self._num_parts + 1
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
        self._part.filename = self.filename = _clean_filename(filename or b"")

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
        self.is_complete = True

    def parser(self, content_type: str | None) -> MultipartParser:
        """A parser with these callbacks; ApiError if the request is not a form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "the request is not multipart/form-data with a boundary")
        names = [name for name in dir(self) if name.startswith("on_")]
        callbacks = {name: getattr(self, name) for name in names}
        try:
            return MultipartParser(boundary, cast("MultipartCallbacks", callbacks))
        except FormParserError as error:
            raise ApiError(400, f"the form cannot be read: {error}") from None


async def receive_file(
    request: Request, store: BatchStore, now_s: float, tenant: str = ""
) -> StoredFile:
    """Store the file of `POST /v1/files`; ApiError 400, 413 or 415 if it cannot be accepted."""
    refuse_compressed(request.headers.get("content-encoding", ""))
    await asyncio.to_thread(check_room, store)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_FILE_BYTES + _FORM_BYTES:
        raise _too_large()
    form = UploadForm()
    parser = form.parser(request.headers.get("content-type"))
    upload = await asyncio.to_thread(store.files.begin, tenant)
    try:
        await _write(request, form, parser, upload, store)
        expires_at = _validate_form(form, int(now_s))
        purpose, name = form.fields["purpose"], form.filename or "file"
        return await asyncio.to_thread(upload.finish, name, purpose, expires_at)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(upload.drop))
        raise


async def _write(
    request: Request, form: UploadForm, parser: MultipartParser, upload: Upload, store: BatchStore
) -> None:
    buffer, size = bytearray(), 0
    async for chunk in _body(request):
        try:
            parser.write(chunk)
        except FormParserError as error:
            raise ApiError(400, f"the form cannot be read: {error}") from None
        piece = form.take_data()
        buffer += piece
        size += len(piece)
        if size > MAX_FILE_BYTES:
            raise _too_large()
        if len(buffer) >= CHUNK_BYTES:
            await asyncio.to_thread(upload.write, bytes(buffer))
            buffer.clear()
            await asyncio.to_thread(check_room, store)
    await asyncio.to_thread(upload.write, bytes(buffer))


async def _body(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        raise ClientDisconnected from None


def _validate_form(form: UploadForm, now_s: int) -> int | None:
    """When the file expires, if it does; ApiError 400 for the first error of the form."""
    for message, param in _form_errors(form):
        raise ApiError(400, message, param=param)
    seconds = form.fields.get("expires_after[seconds]")
    return None if seconds is None else now_s + int(seconds)


def _form_errors(form: UploadForm) -> Iterator[tuple[str, str | None]]:
    if not form.is_complete:
        yield "the form ends before its closing boundary", None
    if form.filename is None:
        yield "the form has no file; fix: send one part named file", "file"
    if form.fields.get("purpose") != "batch":
        yield "purpose must be batch: this server keeps files for batches only", "purpose"
    seconds, anchor = (form.fields.get(f"expires_after[{key}]") for key in ("seconds", "anchor"))
    if seconds is None and anchor is None:
        return
    min_s, max_s = EXPIRY_LIMITS_S
    is_number = (
        seconds is not None and seconds.isascii() and seconds.isdecimal() and len(seconds) < 9
    )
    if anchor != "created_at" or not is_number or not min_s <= int(seconds or 0) <= max_s:
        limit = f"limit: anchor created_at and {min_s} to {max_s} seconds"
        yield f"expires_after cannot be read; {limit}", "expires_after"


def check_room(store: BatchStore) -> None:
    """ApiError 413 if the store is full."""
    if store.is_full:
        limit = f"limit: {store.max_bytes:.0f} bytes (--batch-store-max-bytes)"
        raise ApiError(413, f"the batch store is full; {limit}; fix: delete files", param="file")


def _too_large() -> ApiError:
    return ApiError(413, f"the file is too large; limit: {MAX_FILE_BYTES} bytes", param="file")


def _clean_filename(name: bytes) -> str:
    """A file name without folders and control characters, of limited length."""
    text = name.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in text if c.isprintable())[:255] or "file"
