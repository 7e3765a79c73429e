"""The pages of another server over a twin: metrics under its names, and its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

_HIDDEN = ("/", "/ridgeline/config")  # would make clients take it for Ridgeline's own server
_SUFFIXES = ("", "_bucket", "_sum", "_count")


def rename_metrics(page: str, names: Mapping[str, str]) -> str:
    """A metrics page under other names; without names, its lines of vLLM. Its marks remain."""
    return "".join(f"{line}\n" for line in _renamed(page.split("\n"), names))


def _renamed(lines: list[str], names: Mapping[str, str]) -> Iterator[str]:
    theirs = {ours + end: their + end for their, ours in names.items() for end in _SUFFIXES}
    for line in lines:
        words = line.split(" ", 3)
        name = words[2] if line.startswith("#") and len(words) > 2 else line.partition("{")[0]
        name = name.partition(" ")[0]
        if name.startswith(("ridgeline_twin", "process_")) or (
            not names and name.startswith("vllm:")
        ):
            yield line
        elif name in theirs:
            yield line.replace(name, theirs[name], 1)


class ServerPages:
    """Serves `pages` (path → body) before the app; hides Ridgeline's own pages and `hidden`."""

    def __init__(
        self,
        app: ASGIApp,
        pages: Mapping[str, Callable[[], bytes]],
        hidden: Sequence[str] = (),
    ) -> None:
        self._app, self._pages = app, pages
        self._hidden = (*_HIDDEN, *hidden)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path not in (*self._pages, *self._hidden):
            await self._app(scope, receive, send)
            return
        found = path in self._pages
        body = self._pages[path]() if found else b'{"detail":"Not Found"}'
        kind = b"text/plain; version=0.0.4" if path.endswith("metrics") else b"application/json"
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send(
            {"type": "http.response.start", "status": 200 if found else 404, "headers": headers}
        )
        await send({"type": "http.response.body", "body": body})
