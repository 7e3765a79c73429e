"""Output that is, by its grammar, a JSON list of calls: `[{"name": …, "parameters": {…}}, …]`."""

from __future__ import annotations

import json
import re

from ridgeline.serve.output_parsers.base import Content, OutputPart, ParsedToolCall, to_call

_STRUCTURE = re.compile(r'["\\{}\[\]]')
_CUT_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*')


class JsonScanner:
    """Follows the nesting of JSON text that arrives in pieces."""

    def __init__(self) -> None:
        self.depth, self.is_in_string = 0, False
        self._is_escaped = False

    def ends(self, text: str, depth: int) -> list[int]:
        """Take a piece; the indices in it behind each bracket that closes down to `depth`."""
        found, skipped = [], 0 if self._is_escaped else -1
        self._is_escaped = False
        for match in _STRUCTURE.finditer(text):
            character, at = match[0], match.start()
            if at == skipped:
                continue
            if self.is_in_string:
                if character == "\\":
                    skipped = at + 1
                self.is_in_string = character != '"'
            elif character == '"':
                self.is_in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == depth:
                    found.append(at + 1)
        self._is_escaped = skipped == len(text)
        return found


class CallListParser:
    """Emits each call when it is complete; a last call that was cut has the arguments so far."""

    def __init__(self) -> None:
        self._scanner, self._item, self._has_calls = JsonScanner(), "", False

    def feed(self, text: str) -> list[OutputPart]:
        parts, begin = list[OutputPart](), 0
        for end in self._scanner.ends(text, depth=1):
            item, begin = self._item + text[begin:end], end
            call = to_call(_value(item.lstrip("[, \n")))
            parts += [call] if call else [Content(item)]
            self._item, self._has_calls = "", True
        self._item += text[begin:]
        return parts

    def finish(self) -> list[OutputPart]:
        cut = _CUT_CALL.match(self._item.lstrip("[, \n"))
        if cut is not None:
            arguments = self._item.lstrip("[, \n")[cut.end() :]
            return [ParsedToolCall(json.loads(cut[1]), arguments)]
        is_content = bool(self._item) and not self._has_calls
        return [Content(self._item)] if is_content else []


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
