"""Compiles chat templates for jinja2's sandbox.

A template is untrusted code. It runs in ImmutableSandboxedEnvironment: no attributes that begin
with an underscore, no changes to its arguments, no imports. It may use the filters, functions and
statements that Hugging Face's templates expect.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

from ridgeline.errors import BadModel

if TYPE_CHECKING:
    import jinja2

GLOBALS = frozenset(
    ("raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace")
)
"""Names of the environment that a caller's variables cannot replace."""


def compile_template(source: str) -> jinja2.Template:
    """The compiled template. Raises BadModel if it is not valid Jinja."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks text to train on; for inference it is replaced by its body."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    try:
        return environment.from_string(source)
    except (TemplateSyntaxError, SyntaxError, TypeError, ValueError, RecursionError) as error:
        raise BadModel("the model's chat template is not valid Jinja", fix=str(error)) from None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's HTML escaping, with the arguments that transformers' filter takes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
