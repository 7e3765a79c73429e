"""`ridgeline compare A B`: what changed between two results."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.measure.compare import print_comparison
from ridgeline.config.tools import CompareOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.compare_runs import Conclusion, compare_runs

EXIT_CODES: dict[Conclusion, int] = {"not regressed": 0, "regressed": 1, "inconclusive": 3}


def compare(call: Invocation) -> int:
    """`ridgeline compare`."""
    options = call.read(CompareOptions)
    comparison = compare_runs(options.a, options.b, threshold=options.threshold / 100)
    code = EXIT_CODES[comparison.conclusion]
    if options.json:
        print(json_line(comparison.to_dict() | {"exit_code": code}))
    else:
        print_comparison(comparison, ReportConsole(soft_wrap=True))
    return code
