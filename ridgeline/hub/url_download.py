"""Download a GGUF file by its address.

Resumed with a Range request; verified by size and, where known, SHA-256.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

import httpx

from ridgeline.errors import DownloadFailed
from ridgeline.hub.cache import record_sha256
from ridgeline.hub.names import ModelUrl
from ridgeline.hub.progress import DownloadMeter
from ridgeline.hub.verify import sha256_of
from ridgeline.records.progress import Observer

_TIMEOUT_S = 30.0
_AGAIN = "run the command again: it continues where it stopped"


def download_url(model: ModelUrl, target: Path, observer: Observer) -> None:
    """Fetch the file to `target`, whole or not at all. Raises DownloadFailed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with partial.open("ab") as sink:
        _lock(sink, model)
        try:
            _receive(model, sink, partial, observer)
        except httpx.HTTPError as error:
            raise DownloadFailed(
                "the download failed",
                value=f"{model.url}: {str(error) or type(error).__name__}",
                fix=f"check the network and the address; {_AGAIN}",
            ) from None
        record_sha256(target, _check_content(model, partial))
        partial.replace(target)
        _tag_file(partial).unlink(missing_ok=True)


def _lock(sink: IO[bytes], model: ModelUrl) -> None:
    try:
        fcntl.flock(sink, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DownloadFailed(
            "another process is downloading this file", value=model.url, fix="wait for it"
        ) from None


def _receive(model: ModelUrl, sink: IO[bytes], partial: Path, observer: Observer) -> None:
    """Append what is missing. Starts from scratch if the ETag says that the file has changed."""
    have, tag_file = sink.tell(), _tag_file(partial)
    headers = {"Accept-Encoding": "identity"}
    if have and tag_file.is_file():
        tag = tag_file.read_text("ascii", "replace")  # a damaged one matches no file
        headers |= {"Range": f"bytes={have}-", "If-Range": tag.replace("\ufffd", "?")}
    client = httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S)
    with client, client.stream("GET", model.url, headers=headers) as reply:
        if reply.status_code not in (200, 206):
            raise _refusal(model, reply)
        if reply.status_code == 200:
            sink.truncate(0)
            have = 0
        if reply.headers.get("ETag", "").startswith('"'):  # a weak tag must not resume
            tag_file.write_text(reply.headers["ETag"], "utf-8")
        length = reply.headers.get("Content-Length")
        total = have + int(length) if length else None
        detail = f"{total / 1e6:,.0f} MB" if total else ""
        meter = DownloadMeter(observer, f"downloading {model.file_name}", total, detail)
        meter.skip(have)
        for chunk in reply.iter_bytes(1 << 20):
            sink.write(chunk)
            meter.add(len(chunk))
        meter.finish()


def _tag_file(partial: Path) -> Path:
    """Holds the ETag of the file that was downloaded in part."""
    return partial.with_name(partial.name + ".etag")


def _refusal(model: ModelUrl, reply: httpx.Response) -> DownloadFailed:
    after = reply.headers.get("Retry-After")
    return DownloadFailed(
        "the server does not deliver this address",
        value=f"{model.url}: status {reply.status_code}",
        limit=f"again in {after} s" if after else None,
        fix="check the address and whether it needs a login" if not after else _AGAIN,
    )


def _check_content(model: ModelUrl, partial: Path) -> str:
    """The SHA-256 of the file. Raises DownloadFailed, and removes it, where it is another file."""
    with partial.open("rb") as stream:
        magic = stream.read(4)
    problem, value, limit, found = "", "", "", sha256_of(partial)
    if magic != b"GGUF":
        problem, value, limit = "is not a GGUF file", f"it begins with {magic!r}", "b'GGUF'"
    elif model.sha256 not in (None, found):
        problem, value, limit = "has another content", f"SHA-256 {found}", str(model.sha256)
    if problem:
        partial.unlink()
        _tag_file(partial).unlink(missing_ok=True)
        raise DownloadFailed(
            f"the file at {model.url} {problem}, and was removed",
            value=value,
            limit=limit,
            fix="check the address in a browser",
        )
    return found
