"""A hub on loopback that speaks the Hugging Face Hub's protocol, with faults on request.

Small files are served by the hub itself; weights are redirected to its CDN, a second server, which
answers ranges.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_loopback"
LARGE_SUFFIXES = (".safetensors", ".gguf", ".bin")


@dataclass
class Repository:
    """Files by name, and what goes wrong when they are fetched.

    `gated`: needs TOKEN. `too_many`: number of requests answered with 429 first, with this
    `retry_after`. `cut_after`: bytes after which the first transfer of weights breaks. `damaged`:
    the CDN sends other bytes than announced. `broken`: status of every transfer of weights.
    """

    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    private: bool = False
    too_many: int = 0
    retry_after: str = "1"
    cut_after: int | None = None
    damaged: bool = False
    broken: int | None = None


@dataclass
class HubState:
    """The repositories by name, and the requests that came: (method, path, Range)."""

    repositories: dict[str, Repository]
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    url: str = ""
    cdn_url: str = ""

    def downloads(self) -> list[tuple[str, str | None]]:
        """File and Range of every transfer of weights."""
        return [(path, r) for method, path, r in self.requests if path.startswith("/cdn/")]


@contextmanager
def loopback_hub(**repositories: Repository) -> Iterator[HubState]:
    """A running hub; a repository's name is given with `__` for its slash."""
    state = HubState({name.replace("__", "/"): repo for name, repo in repositories.items()})

    class Handler(HubHandler):
        hub = state

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    state.url, state.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield state
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


class HubHandler(BaseHTTPRequestHandler):
    """One request to the hub of the class attribute `hub`."""

    hub: HubState
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            revision = parts[5] if len(parts) > 4 and parts[4] == "revision" else "main"
            self._describe("/".join(parts[2:4]), revision)
        elif parts[0] == "cdn":
            self._transfer("/".join(parts[1:3]), "/".join(parts[3:]))
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._answer(404, {})

    def _repository(self, name: str) -> Repository | None:
        """The repository, after its refusals; None where one was sent."""
        repo = self.hub.repositories.get(name)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not has_token):
            self._answer(401, {"X-Error-Code": "RepoNotFound"})
        elif repo.gated and not has_token:
            status = 403 if self.headers.get("Authorization") else 401
            self._answer(status, {"X-Error-Code": "GatedRepo"})
        elif self.hub.refused[name] < repo.too_many:
            self.hub.refused[name] += 1
            self._answer(429, {"Retry-After": repo.retry_after})
        else:
            return repo
        return None

    def _describe(self, name: str, revision: str) -> None:
        repo = self._repository(name)
        if repo is None:
            return
        if revision not in ("main", repo.commit):
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
            return
        body = {"id": name, "sha": repo.commit, "siblings": [*map(_sibling, repo.files.items())]}
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _resolve(self, name: str, commit: str, file: str) -> None:
        repo = self._repository(name)
        if repo is None:
            return
        if file not in repo.files or commit != repo.commit:
            self._answer(404, {"X-Error-Code": "EntryNotFound"})
            return
        content = repo.files[file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(file, content)}"'}
        if not file.endswith(LARGE_SUFFIXES):
            self._answer(200, headers, content)
            return
        headers |= {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(content))}
        self._answer(302, headers | {"Location": f"{self.hub.cdn_url}/cdn/{name}/{file}"})

    def _transfer(self, name: str, file: str) -> None:
        """The CDN: no token reaches it, and ranges are answered."""
        assert "Authorization" not in self.headers
        repo = self.hub.repositories[name]
        content = repo.files[file]
        if repo.broken is not None:
            self._answer(repo.broken, {})
            return
        if repo.damaged:
            content = bytes(len(content))
        begin, status, headers = 0, 200, {"ETag": f'"{_etag(file, repo.files[file])}"'}
        wanted = self.headers.get("Range")
        if wanted is not None:
            begin, status = int(wanted.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        cut, repo.cut_after = repo.cut_after, None
        self._answer(status, headers, content[begin:], cut)

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None
    ) -> None:
        """`cut`: number of bytes of the body after which the connection is closed."""
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


def _etag(name: str, content: bytes) -> str:
    if name.endswith(LARGE_SUFFIXES):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sibling(item: tuple[str, bytes]) -> dict[str, object]:
    name, content = item
    row: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
    if name.endswith(LARGE_SUFFIXES):
        row["lfs"] = {"sha256": _etag(name, content), "size": len(content), "pointerSize": 130}
    return row
