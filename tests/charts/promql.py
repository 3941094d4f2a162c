"""Expressions of dashboards and rules: variables filled in, the names of metrics picked out."""

from __future__ import annotations

import re
from collections.abc import Mapping

_STRING = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_SELECTOR = re.compile(r"\{[^}]*\}")
_RANGE = re.compile(r"\[[^\]]*\]")
_NUMBER = re.compile(r"\b\d[\w.]*")
_WORD = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)\s*(\(?)")
_KEYWORDS = {"and", "or", "unless", "bool", "offset"}


def metrics_in(expression: str) -> set[str]:
    """The names of the metrics that an expression reads."""
    rest = _STRING.sub('""', expression)
    for ignored in (_LABELS, _SELECTOR, _RANGE, _NUMBER):
        rest = ignored.sub(" ", rest)
    return {word for word, call in _WORD.findall(rest) if not call and word not in _KEYWORDS}


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    """The expression with values in place of Grafana's variables.

    Raises:
        ValueError: a variable has no value.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name not in values:
            raise ValueError(f"${name} is no variable of this dashboard: {expression}")
        return values[name]

    return re.sub(r"\$(\w+)", value, expression)
