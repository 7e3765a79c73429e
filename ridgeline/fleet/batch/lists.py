"""The lists of several batch stores as one, by time, in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from ridgeline.errors import DECODE_ERRORS
from ridgeline.fleet.backends import Backend
from ridgeline.fleet.batch.stores import BatchStores, Kind, StoreRequest
from ridgeline.fleet.upstream import Headers
from ridgeline.serve.errors import ApiError

_MAX_LIMITS: dict[Kind, int] = {"files": 10_000, "batches": 100}
_DEFAULT_LIMITS: dict[Kind, int] = {"files": 10_000, "batches": 20}


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks of a list; `filters` go to every store as they are."""

    kind: Kind
    limit: int
    after: str | None
    newest_first: bool
    filters: tuple[tuple[str, str], ...]

    @staticmethod
    def parse(kind: Kind, fields: Sequence[tuple[str, str]]) -> ListQuery | None:
        """None for a query that a server would refuse."""
        given = dict(fields)
        limit, order = given.pop("limit", str(_DEFAULT_LIMITS[kind])), given.get("order", "desc")
        after = given.pop("after", None)
        is_number = limit.isascii() and limit.isdecimal() and len(limit) < 9
        if not is_number or not 1 <= int(limit) <= _MAX_LIMITS[kind]:
            return None
        if kind == "files" and order not in ("asc", "desc"):
            return None
        return ListQuery(
            kind=kind,
            limit=int(limit),
            after=after,
            newest_first=kind == "batches" or order == "desc",
            filters=tuple(given.items()),
        )


class _StoreList:
    """The list of one store, page by page."""

    def __init__(
        self, stores: BatchStores, servers: Sequence[Backend], query: ListQuery, headers: Headers
    ) -> None:
        self._stores, self._servers, self._query = stores, servers, query
        self._headers, self._items = headers, list[dict[str, Any]]()
        self._after: str | None = None
        self._has_more = True

    async def first(self) -> dict[str, Any] | None:
        """The next item; None at the end. ApiError 503 if the store cannot be read."""
        if not self._items and self._has_more:
            await self._read_page()
        return self._items[0] if self._items else None

    def take(self) -> dict[str, Any]:
        return self._items.pop(0)

    async def _read_page(self) -> None:
        query = self._query
        fields = [*query.filters, ("limit", str(min(query.limit + 1, _MAX_LIMITS[query.kind])))]
        if self._after is not None:
            fields.append(("after", self._after))
        target = f"/v1/{query.kind}?{urlencode(fields)}".encode()
        request = StoreRequest(method=b"GET", target=target, headers=self._headers)
        status, body = await self._stores.read(self._servers, request)
        try:
            page = msgspec.json.decode(body)
            items, has_more = page["data"], bool(page["has_more"])
        except (KeyError, TypeError, *DECODE_ERRORS):
            own = status if status in (401, 403) else 502
            raise ApiError(own, f"a server answered its list with status {status}") from None
        self._items, self._has_more = items, has_more and bool(items)
        self._after = items[-1]["id"] if items else None


async def merged_list(stores: BatchStores, query: ListQuery, headers: Headers) -> bytes:
    """One page over all stores, as a server answers it. An unknown `after` is the start."""
    items = await _page(stores, query, headers)
    if items is None:
        items = await _page(stores, msgspec.structs.replace(query, after=None), headers)
    assert items is not None
    shown = items[: query.limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(items) > query.limit,
        }
    )


async def _page(
    stores: BatchStores, query: ListQuery, headers: Headers
) -> list[dict[str, Any]] | None:
    """The items behind `after`, one more than asked for if there are; None if it is not found."""
    lists = [_StoreList(stores, s, query, headers) for _, s in sorted(stores.all().items())]
    sign, is_behind = -1 if query.newest_first else 1, query.after is None
    page: list[dict[str, Any]] = []
    while len(page) <= query.limit:
        heads = [(await one.first(), number) for number, one in enumerate(lists)]
        known = [(sign * item["created_at"], number) for item, number in heads if item is not None]
        if not known:
            break
        item = lists[min(known)[1]].take()
        if is_behind:
            page.append(item)
        is_behind |= item["id"] == query.after
    return page if is_behind else None
