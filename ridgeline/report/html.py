"""HTML pages from jinja2 templates: self-contained, without scripts, nothing fetched.

Templates are named by their path inside the package (`measure/report/bench.html`), extend
`report/base.html` and use `report/macros.html`. Everything is escaped except drawings, which
`ridgeline.report.svg` marks as safe, and the style sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from jinja2 import Environment


class HtmlTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table: the first `num_text` columns are text, the others right-aligned numbers.

    No columns: a table without a header.
    """

    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    num_text: int = 1


class Tile(msgspec.Struct, frozen=True):
    """A headline figure: name, value, its unit, and a remark below."""

    name: str
    value: str
    unit: str = ""
    remark: str = ""


def render_page(template: str, **context: object) -> str:
    """Render a page. The base template needs `title`, `eyebrow`, `heading` and `lede` ("")."""
    return _environment().get_template(template).render(context)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    import ridgeline

    # Not PackageLoader: an editable install has two package folders, and it looks in the first,
    # which holds only the native module.
    environment = Environment(
        loader=FileSystemLoader(Path(ridgeline.__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = files("ridgeline.report").joinpath("style.css").read_text(encoding="utf-8")
    environment.globals["style"] = Markup(style)
    return environment
