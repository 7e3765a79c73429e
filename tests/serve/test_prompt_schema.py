"""The shortcut for token ids in `Prompts` accepts and rejects what the plain union does."""

from __future__ import annotations

import json
import random
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ridgeline.serve.openai.schemas import Count, Prompts

PLAIN: TypeAdapter[Any] = TypeAdapter(str | list[str] | list[Count] | list[list[Count]])
SHORTCUT: TypeAdapter[Any] = TypeAdapter(Prompts)


def outcome(adapter: TypeAdapter[Any], value: Any) -> tuple[str, Any]:
    try:
        parsed = adapter.validate_python(value)
    except ValidationError as error:
        # The first part of a location is pydantic's own description of the branch.
        return "rejected", [(item["loc"][1:], item["msg"]) for item in error.errors()]
    return "accepted", (parsed, [type(item) for item in parsed])


def test_prompts_are_validated_as_by_the_plain_union() -> None:
    rng = random.Random(3)
    odd = [True, 1.0, 1.5, "1", "a", None, -1, 2**31, 2**31 - 1, 10**30, [], [1], [-1], {}, 0]
    texts = ['"text"', "[]", "[[]]", "null", "{}", "[[1],[2,3]]", '["a","b"]']
    for _ in range(3000):
        values: list[Any] = [rng.randrange(2**31) for _ in range(rng.randint(0, 6))]
        for _ in range(rng.randint(0, 2)):
            values.insert(rng.randint(0, len(values)), rng.choice(odd))
        texts.append(json.dumps(values))
    bodies = [json.loads(text) for text in texts]
    assert {outcome(SHORTCUT, body)[0] for body in bodies} == {"accepted", "rejected"}
    for body in bodies:
        assert outcome(SHORTCUT, body) == outcome(PLAIN, body), body
