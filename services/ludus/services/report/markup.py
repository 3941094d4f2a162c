"""HTML and SVG elements that escape all plain text."""

from __future__ import annotations

from html import escape
from typing import Final

VOID_ELEMENTS: Final = frozenset({"br", "hr", "img", "link", "meta"})


class Markup(str):
    """Text that is already markup and is not escaped again."""

    __slots__ = ()


Child = str | Markup | None
Attribute = str | float | int | None


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Build an element, which is also well-formed XML; plain text is escaped.

    Children and attributes that are None are omitted. `class_` becomes `class`, and
    `fill_opacity` becomes `fill-opacity`.
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    content = join(*children)
    if not content and name in VOID_ELEMENTS:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{content}</{name}>")


def join(*children: Child) -> Markup:
    """Concatenate the children; plain text is escaped."""
    return Markup("".join(_inner(child) for child in children if child is not None))


def number(value: float) -> str:
    """Format a coordinate with at most two decimals and no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _inner(child: str) -> str:
    return child if isinstance(child, Markup) else escape(child, quote=False)


def _attribute(key: str, value: Attribute) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else number(value)
    return f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"'
