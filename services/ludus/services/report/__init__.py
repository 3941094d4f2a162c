"""The report of a run: one HTML page, and one picture."""

from ludus.services.report.figure import render_figure, write_figure
from ludus.services.report.page import render_report, write_report

__all__ = ["render_figure", "render_report", "write_figure", "write_report"]
