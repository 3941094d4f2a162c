"""Building HTML and SVG out of elements, so that no text reaches a page unescaped."""

from __future__ import annotations

from html import escape
from typing import Final

VOID_ELEMENTS: Final = frozenset({"br", "hr", "img", "link", "meta"})


class Markup(str):
    """Text that is markup already and is inserted as it stands."""

    __slots__ = ()


Child = str | Markup | None
Attribute = str | float | int | None


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """One element, well-formed as XML too; plain text in it is escaped.

    A None child or attribute is left out. `class_` is written `class`, `fill_opacity`
    becomes `fill-opacity`.
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    content = join(*children)
    if not content and name in VOID_ELEMENTS:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{content}</{name}>")


def join(*children: Child) -> Markup:
    """The children one after the other, plain text escaped."""
    return Markup("".join(_inner(child) for child in children if child is not None))


def number(value: float) -> str:
    """A coordinate, short: at most two decimals and no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _inner(child: str) -> str:
    return child if isinstance(child, Markup) else escape(child, quote=False)


def _attribute(key: str, value: Attribute) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else number(value)
    return f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"'
