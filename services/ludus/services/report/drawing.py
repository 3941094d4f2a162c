"""SVG drawings of known size, which can be combined or put on a page."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.services.report.markup import Child, Markup, element, join


@dataclass(frozen=True, slots=True)
class Drawing:
    """SVG content in its own coordinates, from (0, 0) to (width, height)."""

    width: float
    height: float
    body: Markup
    label: str
    """Description for screen readers."""

    def inline(self, class_: str | None = None) -> Markup:
        """Return an `svg` element that fills the available width of a page."""
        return element(
            "svg",
            self.body,
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            class_=class_,
            role="img",
            aria_label=self.label,
        )

    def move_to(self, x: float, y: float) -> Markup:
        """Return the content, moved to (x, y) of a larger drawing."""
        return element("g", self.body, transform=f"translate({x:g} {y:g})")


def text(
    x: float, y: float, *content: Child, class_: str = "tick", anchor: str = "start"
) -> Markup:
    """Draw a line of text whose baseline is at y."""
    return element("text", *content, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Draw a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def hover(title: str, *children: Child) -> Markup:
    """Group elements; `title` is shown under the pointer."""
    return element("g", element("title", title), join(*children))
