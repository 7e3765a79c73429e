"""The base of every workflow's result: a frozen record that saves and displays itself."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import BadInput
from ridgeline.report.files import write_file
from ridgeline.report.html import render_page
from ridgeline.report.json_line import json_line, plain


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a workflow found. Subclasses add the fields, and a page if they have a better one."""

    def to_dict(self) -> dict[str, Any]:
        """The result as dicts, lists and plain values, as `save` writes it to a .json file."""
        return dict(plain(self))

    def to_json(self) -> str:
        """The result as indented JSON."""
        return msgspec.json.format(json_line(self.to_dict()), indent=2)

    def to_html(self) -> str:
        """A self-contained HTML page: no scripts, nothing fetched."""
        name = type(self).__name__
        return render_page(
            "report/record.html",
            title=f"Ridgeline: {name}",
            eyebrow="Ridgeline",
            heading=name,
            lede="",
            text=self.to_json(),
        )

    def save(self, path: str | Path) -> Path:
        """Write the result as .json or .html, by the suffix of `path`, and return the path."""
        path = Path(path)
        if path.suffix == ".json":
            content = self.to_json()
        elif path.suffix == ".html":
            content = self.to_html()
        else:
            raise BadInput(
                "a result is saved as JSON or HTML",
                value=str(path),
                limit=".json, .html",
                fix="choose a name that ends in one of them",
            )
        write_file(path, [content.encode()])
        return path

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks: its style sheet does not leak into the notebook."""
        page = escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="640" frameborder="0"></iframe>'
