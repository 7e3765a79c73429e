"""Escapes from jinja2 sandboxes that were published: none reaches an internal of Python."""

from __future__ import annotations

import pytest

from ridgeline.engine.tokenization.chat import Chat, JinjaTemplate
from ridgeline.errors import BadInput

ESCAPES = [
    '{{ ("{0.__call__.__builtins__[__import__]}" | attr("format"))(not_here) }}',  # CVE-2025-27516
    '{{ "{0.__class__}".format(1) }}',
    '{% set f = "{0.__class__.__mro__}".format %}{{ f(1) }}',
    "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
    "{{ messages | map(attribute='__class__') | list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_template_reaches_no_internals(source: str) -> None:
    try:
        text = JinjaTemplate({"default": source}, {}).render(Chat([{"role": "user"}]))
    except BadInput:
        return
    assert "class" not in text and "import" not in text and "builtin" not in text
