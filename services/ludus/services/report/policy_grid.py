"""The policy chart, which compares the policy's answer in each situation with the reference's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ludus.proto.runs import ChartCell, PolicyChart
from ludus.services.numbers import format_percent

NUM_LEGEND_COLORS = 11


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in a situation.

    `probability` is that of the chart's first answer, whatever `text` is. It sets the color.
    """

    text: str
    probability: float

    @property
    def strength(self) -> float:
        """Strength of the color, from 0 (undecided) to 1 (certain)."""
        return abs(self.probability - 0.5) * 2

    @property
    def color_class(self) -> str:
        """CSS class: even, first or other (the answer whose color is shown)."""
        if self.strength < 0.02:
            return "even"
        return "first" if self.probability >= 0.5 else "other"

    @property
    def opacity(self) -> float:
        """Opacity of the color, from 0.1 to 0.92."""
        return round(0.1 + 0.82 * self.strength, 2)


@dataclass(frozen=True, slots=True)
class Situation:
    """A cell of a panel: one situation, with the answers of the policy and the reference."""

    row: int
    column: int
    description: str
    policy: Answer
    reference: Answer


@dataclass(frozen=True, slots=True)
class Panel:
    """A grid of situations, with its rows and columns in display order."""

    cell_size: ClassVar[float] = 24
    """Width and height of a cell in pixels."""
    margin_left: ClassVar[float] = 32
    """Pixels for the names of the rows."""
    margin_top: ClassVar[float] = 46
    """Pixels for the title and the names of the columns."""
    name: str
    rows: list[str]
    columns: list[str]
    situations: list[Situation]

    @property
    def width(self) -> float:
        """Width in pixels."""
        return self.margin_left + self.cell_size * len(self.columns) + 2

    @property
    def height(self) -> float:
        """Height in pixels."""
        return self.margin_top + self.cell_size * len(self.rows) + 2


def split_panels(chart: PolicyChart) -> list[Panel]:
    """Split a chart into panels, with rows and columns in the order of the cells."""
    names = dict.fromkeys(cell.panel for cell in chart.cells)
    return [
        _make_panel(chart, name, [cell for cell in chart.cells if cell.panel == name])
        for name in names
    ]


def count_agreements(chart: PolicyChart) -> int:
    """Count the situations in which the policy's most likely answer is the reference's answer."""
    return sum(_find_most_likely_answer(chart, cell) == cell.reference for cell in chart.cells)


def make_legend_colors() -> list[Answer]:
    """Return a color scale, from certainty about the first answer to certainty about the other."""
    last_index = NUM_LEGEND_COLORS - 1
    return [Answer("", 1 - index / last_index) for index in range(NUM_LEGEND_COLORS)]


def _make_panel(chart: PolicyChart, name: str, cells: list[ChartCell]) -> Panel:
    rows = list(dict.fromkeys(cell.row for cell in cells))
    columns = list(dict.fromkeys(cell.column for cell in cells))
    situations = [
        Situation(
            column=columns.index(cell.column),
            row=rows.index(cell.row),
            description=_describe_cell(chart, cell),
            policy=Answer(_find_most_likely_answer(chart, cell), cell.probabilities[0]),
            reference=Answer(cell.reference, float(cell.reference == chart.answers[0])),
        )
        for cell in cells
    ]
    return Panel(name, rows, columns, situations)


def _find_most_likely_answer(chart: PolicyChart, cell: ChartCell) -> str:
    index = max(range(len(cell.probabilities)), key=cell.probabilities.__getitem__)
    return chart.answers[index]


def _describe_cell(chart: PolicyChart, cell: ChartCell) -> str:
    probabilities = ", ".join(
        f"{answer} {format_percent(probability)}"
        for answer, probability in zip(chart.answers, cell.probabilities, strict=True)
    )
    name = f"{cell.panel} {cell.row} against {cell.column}"
    return f"{name}: {probabilities}; reference {cell.reference}"
