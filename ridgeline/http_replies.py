"""Opens addresses with urllib, so that whatever goes wrong on the way is an OSError.

`urlopen` raises HTTPException, which is none, for a reply that is not HTTP (another program has the
port) and for one that is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.error import HTTPError
    from urllib.request import Request

MAX_SHOWN = 300  # characters of a server's message
MAX_ERROR_BYTES = 4096


@contextmanager
def open_reply(request: str | Request, timeout_s: float) -> Iterator[HTTPResponse]:
    """The reply, which is read inside the block.

    Raises OSError (also HTTPError, for a status of 400 or more, with the beginning of the body),
    and ValueError for an address that cannot be one of a server.
    """
    from http.client import BadStatusLine, HTTPException, InvalidURL
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        with urlopen(request, timeout=timeout_s) as reply:
            yield reply
    except HTTPError as error:
        with error:
            body = BytesIO(_beginning(error))
        raise HTTPError(error.url, error.code, error.msg, error.headers, body) from None
    except InvalidURL as error:
        raise ValueError(str(error)) from None
    except BadStatusLine as error:
        raise ConnectionError(f"the reply is not HTTP: {str(error).strip()[:80]!r}") from None
    except HTTPException as error:
        reason = str(error) or type(error).__name__
        raise ConnectionError(f"the reply is cut off or not HTTP: {reason}") from None


def error_text(error: HTTPError) -> str:
    """The beginning of the body of a refusal, which `open_reply` has read."""
    return error.read().decode("utf-8", "replace")[:MAX_SHOWN]


def _beginning(error: HTTPError) -> bytes:
    """The first bytes of a refusal's body; none if it is cut off."""
    from http.client import HTTPException

    try:
        return error.read(MAX_ERROR_BYTES)
    except (OSError, HTTPException):
        return b""
