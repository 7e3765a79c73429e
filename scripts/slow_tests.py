"""Write tests/slow_tests.txt, the tests that the fast tier leaves out, from a timed run.

`make slow-tests` runs the whole suite and writes the list. The fast tier of `make check` has to end
within 90 seconds on two cores; it keeps the tests whose mean time over their parameters is below
LIMIT_S, and all house rules.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "slow_tests.txt"
LIMIT_S = 0.02


def read_times(report: Path) -> dict[str, list[float]]:
    """Seconds of each test function, one value per set of parameters, from a JUnit report."""
    times: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        path, classes = Path(), str(case.get("classname")).split(".")
        while classes and path.suffix != ".py":
            name = classes.pop(0)
            path = path / name
            if (ROOT / path).with_suffix(".py").is_file():
                path = path.with_suffix(".py")
        function = str(case.get("name")).partition("[")[0]
        times["::".join([path.as_posix(), *classes, function])].append(float(case.get("time", 0)))
    return times


def find_slow_tests(times: dict[str, list[float]]) -> list[str]:
    """Test functions above the limit, and whole files (without `::`) where no function is below."""
    slow = {
        test
        for test, seconds in times.items()
        if sum(seconds) / len(seconds) > LIMIT_S and not test.startswith("tests/house/")
    }
    quick_files = {test.partition("::")[0] for test in times.keys() - slow}
    files = {test.partition("::")[0] for test in slow}
    whole = files - quick_files
    return sorted(whole | {test for test in slow if test.partition("::")[0] not in whole})


def main() -> None:
    """Write the list from the report named on the command line."""
    slow = find_slow_tests(read_times(Path(sys.argv[1])))
    LIST.write_text("".join(f"{test}\n" for test in slow), "utf-8")
    print(f"{LIST.relative_to(ROOT)}: {len(slow)} entries")


if __name__ == "__main__":
    main()
