"""The short way to a route whose path is fixed: looked up, called, answered.

Starlette's way leads past every route before it, a second request object and three wrappers for
what might be raised. Where every core is busy with a step, each line of Python that a request
touches has to come from far away: that way is a seventh of what a request costs the event loop.
Paths with parameters, other methods and unknown paths go on to the router as ever, and whatever a
handler raises that nobody expected is the app's to tell, and to log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.errors import RidgelineError
from ridgeline.serve import errors
from ridgeline.serve.errors import ApiError, ClientGone

EXPECTED = (ApiError, ClientGone, RidgelineError, HTTPException)
"""What a handler raises in order to be answered with it."""

Handlers = Mapping[tuple[str, str], Callable[[Request], Awaitable[Response]]]
"""By method and path."""


class Direct:
    """See the head of this file."""

    def __init__(self, app: ASGIApp, handlers: Handlers) -> None:
        self._app, self._handlers = app, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope.get("method", ""), scope.get("path", "")
        handler = self._handlers.get(key)
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
            await response(scope, receive, send)
        except EXPECTED as error:  # an answer that has begun tells its errors by itself
            told = await errors.handle(request, error)
            await told(scope, receive, send)
