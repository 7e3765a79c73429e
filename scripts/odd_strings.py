"""Odd texts for comparing tokenizers, the same on every machine."""

from __future__ import annotations

import random

PIECES = (
    "the", "Hello", "HTTPServer", "camelCase", "éCOLE", "straße", "naïve",
    "it's", "THEY'LL", "I'd",
    "don't", "'ve", "‘s", "1", "12", "345", "6789", "1234567", "3.14",
    "0x1F", "1e-9", "½", "²", "Ⅻ",
    "٣٤٥", "中文", "漢字かな", "カタカナ", "한국어", "ไทยแลนด์", "हिन्दी", "العربية",
    "עברית", "ελληνικά",
    "Русский", "ǅ", "ʰ", "e\u0301", "\u0301", "🙂", "👩‍👩‍👧", "🇩🇪", "€",
    "$", "+=", "<=>", "&&", "||",
    "--", "---", "...", "…", "!?", "¿", "«x»", "“q”", "(", ")", "[", "]",
    "{", "}", "<", ">", "#", "@",
    "~", "`", "^", "\\", "/", "//", "_", "__init__", "%", "*", "**", "=",
    ";", ":", ",", ".", "|",
    "def f(x):", "return", "x_1", "a/b", "http://a.b/c?d=e&f", "\u00a0",
    "\u3000", "\u200b", "\ufeff",
)  # fmt: skip
BLANKS = ("", "", " ", " ", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "    ")


def odd_strings(count: int, seed: int = 0) -> list[str]:
    """`count` texts of words of many scripts, digits, symbols and blanks of every kind."""
    random_ = random.Random(seed)
    out = ["", " ", "  ", "\n", "\t", "a"]
    while len(out) < count:
        length = random_.randint(1, 9)
        out.append("".join(random_.choice(PIECES) + random_.choice(BLANKS) for _ in range(length)))
    return out[:count]
