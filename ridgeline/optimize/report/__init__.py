"""report.html: the result as one page that opens anywhere."""

from ridgeline.optimize.report.page import report

__all__ = ["report"]
