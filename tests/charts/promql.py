"""Functions that replace variables and find metric names in PromQL expressions."""

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


def read_metric_names(expression: str) -> set[str]:
    """Return the names of the metrics in an expression."""
    remainder = _STRING.sub('""', expression)
    for pattern in (_LABELS, _SELECTOR, _RANGE, _NUMBER):
        remainder = pattern.sub(" ", remainder)
    return {
        word
        for word, parenthesis in _WORD.findall(remainder)
        if not parenthesis and word not in _KEYWORDS
    }


def fill_variables(expression: str, values: Mapping[str, str]) -> str:
    """Return the expression with Grafana's variables replaced by values.

    Raises:
        ValueError: a variable has no value.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            raise ValueError(f"${name} is not a variable of this dashboard: {expression}")
        return values[name]

    return re.sub(r"\$(\w+)", replace, expression)
