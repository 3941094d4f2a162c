"""The policy chart: the policy's action in each situation, next to the reference action."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ludus.proto.runs import ChartCell, PolicyChart
from ludus.services.numbers import format_percent
from ludus.services.report.drawing import Drawing, hover, text
from ludus.services.report.markup import Markup, element, join

CELL = 24.0
ROW_LABELS = 32.0
TITLE = 26.0
COLUMN_LABELS = 20.0


@dataclass(frozen=True, slots=True)
class Panel:
    """The cells of a panel, with its rows and columns in display order."""

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[ChartCell, ...]

    @property
    def width(self) -> float:
        """Width in pixels."""
        return ROW_LABELS + CELL * len(self.columns) + 2

    @property
    def height(self) -> float:
        """Height in pixels."""
        return TITLE + COLUMN_LABELS + CELL * len(self.rows) + 2


def split_panels(chart: PolicyChart) -> list[Panel]:
    """Split a chart into panels, with rows and columns in the order of the cells."""
    names = dict.fromkeys(cell.panel for cell in chart.cells)
    return [_panel(name, [cell for cell in chart.cells if cell.panel == name]) for name in names]


def most_likely_answer(chart: PolicyChart, cell: ChartCell) -> str:
    """Return the policy's most likely answer in a situation."""
    index = max(range(len(cell.probabilities)), key=cell.probabilities.__getitem__)
    return chart.answers[index]


def count_agreements(chart: PolicyChart) -> int:
    """Count the situations in which the most likely answer is the reference's."""
    return sum(most_likely_answer(chart, cell) == cell.reference for cell in chart.cells)


def draw_policy(chart: PolicyChart, panel: Panel, title: str) -> Drawing:
    """Draw the policy: color is the probability of the first answer, letter the most likely."""

    def draw_cell(cell: ChartCell, x: float, y: float) -> Markup:
        answer = most_likely_answer(chart, cell)
        probability = cell.probabilities[0]
        strength = abs(probability - 0.5) * 2
        classes = _cell_class(probability >= 0.5, strength)
        if answer != cell.reference:
            classes += " differs"
        return _draw_cell(_describe(chart, cell), answer, x, y, classes, strength)

    return _draw_grid(panel, title, draw_cell)


def draw_reference(chart: PolicyChart, panel: Panel, title: str) -> Drawing:
    """Draw the reference answers."""

    def draw_cell(cell: ChartCell, x: float, y: float) -> Markup:
        classes = _cell_class(cell.reference == chart.answers[0], 1.0)
        return _draw_cell(_describe(chart, cell), cell.reference, x, y, classes, 1.0)

    return _draw_grid(panel, title, draw_cell)


def draw_legend(chart: PolicyChart) -> Drawing:
    """Draw the color scale: the probability of the first answer from 100 to 0 %."""
    num_steps, width = 11, 18.0
    parts: list[Markup] = []
    for index in range(num_steps):
        probability = 1 - index / (num_steps - 1)
        strength = abs(probability - 0.5) * 2
        parts.append(_swatch(index * width, 0, width, probability >= 0.5, strength))
    end = num_steps * width
    parts.append(text(0, 34, f"always {chart.answers[0]}"))
    parts.append(text(end, 34, f"always {chart.answers[-1]}", anchor="end"))
    return Drawing(end, 40, join(*parts), f"Colors: probability of {chart.answers[0]}")


def _panel(name: str, cells: Sequence[ChartCell]) -> Panel:
    return Panel(
        name=name,
        rows=tuple(dict.fromkeys(cell.row for cell in cells)),
        columns=tuple(dict.fromkeys(cell.column for cell in cells)),
        cells=tuple(cells),
    )


def _draw_grid(
    panel: Panel, title: str, draw_cell: Callable[[ChartCell, float, float], Markup]
) -> Drawing:
    top = TITLE + COLUMN_LABELS
    middle = ROW_LABELS + CELL * len(panel.columns) / 2
    parts = [text(middle, 14, title, class_="grid-title", anchor="middle")]
    for index, column in enumerate(panel.columns):
        x = ROW_LABELS + CELL * (index + 0.5)
        parts.append(text(x, top - 6, column, anchor="middle"))
    for index, row in enumerate(panel.rows):
        parts.append(text(ROW_LABELS - 7, top + CELL * (index + 0.5) + 4, row, anchor="end"))
    for cell in panel.cells:
        x = ROW_LABELS + CELL * panel.columns.index(cell.column)
        y = top + CELL * panel.rows.index(cell.row)
        parts.append(draw_cell(cell, x, y))
    return Drawing(panel.width, panel.height, join(*parts), f"{title}: {panel.name}")


def _draw_cell(
    title: str, answer: str, x: float, y: float, classes: str, strength: float
) -> Markup:
    letter = answer[:1].upper()
    return hover(
        title,
        element(
            "rect",
            x=x + 1,
            y=y + 1,
            width=CELL - 2,
            height=CELL - 2,
            rx=3,
            class_=classes,
            fill_opacity=_opacity(strength),
        ),
        text(
            x + CELL / 2,
            y + CELL / 2 + 4,
            letter,
            class_="letter strong" if strength > 0.55 else "letter",
            anchor="middle",
        ),
    )


def _swatch(x: float, y: float, width: float, is_first: bool, strength: float) -> Markup:
    return element(
        "rect",
        x=x,
        y=y,
        width=width,
        height=16,
        class_=_cell_class(is_first, strength),
        fill_opacity=_opacity(strength),
    )


def _cell_class(is_first: bool, strength: float) -> str:
    if strength < 0.02:
        return "cell even"
    return "cell first" if is_first else "cell other"


def _opacity(strength: float) -> float:
    return round(0.1 + 0.82 * strength, 2)


def _describe(chart: PolicyChart, cell: ChartCell) -> str:
    probabilities = ", ".join(
        f"{answer} {format_percent(probability)}"
        for answer, probability in zip(chart.answers, cell.probabilities, strict=True)
    )
    situation = f"{cell.panel} {cell.row} against {cell.column}"
    return f"{situation}: {probabilities}; reference {cell.reference}"
