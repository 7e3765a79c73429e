"""report.html: the result as one page that opens anywhere."""

from ridgeline.optimize.report.page import headline, report

__all__ = ["headline", "report"]
