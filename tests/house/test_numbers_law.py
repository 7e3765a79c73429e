"""Numbers for people are rounded by `ridgeline.report.numbers`, which never writes 1e+03."""

from __future__ import annotations

import re

from ridgeline.report.numbers import rounded
from tests.house.code import files, name_of

ALLOWED = {
    "ridgeline/operate/rules.py": "PromQL has no thousands separators",
    "ridgeline/operate/dashboard.py": "PromQL has no thousands separators",
    "ridgeline/workflows/optimize/advise.py": "a value of a command line",
    "ridgeline/engine/quant/int8/exact.py": "an error far below 1",
}
EXPONENT = re.compile(r"\{[^{}\n]*:[<>^]?\d*,?\.\d+g\}")


def test_large_numbers_have_no_exponents() -> None:
    assert [rounded(x) for x in (0.01234, 44.56, 999.4, 999.6, 12_345.0, -1234.5)] == [
        *("0.0123", "44.6", "999", "1,000", "12,345", "-1,234"),
    ]
    assert (rounded(9999.4, 4), rounded(9999.6, 4), rounded(97.4, 2)) == ("9,999", "10,000", "97")


def test_significant_digits_are_those_of_one_function() -> None:
    found = {
        name_of(path)
        for path in files("ridgeline")
        if EXPONENT.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(ALLOWED)
