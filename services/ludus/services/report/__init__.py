"""The report of a run: an HTML page and an SVG figure."""

from ludus.services.report.comparison import write_comparison
from ludus.services.report.page import write_figure, write_report

__all__ = ["write_comparison", "write_figure", "write_report"]
