"""The base of all request models: validation stops at the first bad item of a list.

pydantic collects an error for every item, times the branches of a union, and an error response
shows one of them: a list of a million numbers where texts belong took 12 seconds to refuse.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema

_LISTS = ("list", "tuple", "set", "frozenset")


def _set_fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in _LISTS:
            schema["fail_fast"] = True
        for part in schema.values():
            _set_fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _set_fail_fast(part)


class RequestModel(BaseModel):
    """A body, or a part of one."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """pydantic's hook: every list in the model fails fast, so that no field can forget to."""
        schema = handler(source)
        _set_fail_fast(schema)
        return schema
