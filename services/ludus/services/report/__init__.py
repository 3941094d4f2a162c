"""The report of a run: one HTML page, and one picture."""

from ludus.services.report.page import write_figure, write_report

__all__ = ["write_figure", "write_report"]
