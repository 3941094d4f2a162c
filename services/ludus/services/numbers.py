"""Formatting of numbers for people, shared by tables and reports."""

from __future__ import annotations

import math

MINUS_SIGN = "−"
NO_VALUE = "–"

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_percent(share: float | None, decimals: int = 1) -> str:
    """Format a share as "42.9%", or as a dash if there is none."""
    if share is None:
        return NO_VALUE
    return f"{format_fixed(share * 100, decimals)}%"


def format_percent_interval(interval: tuple[float, float] | None, decimals: int = 1) -> str:
    """Format an interval of shares as "41.9 to 43.9%", or as a dash if there is none."""
    if interval is None:
        return NO_VALUE
    low, high = (format_fixed(bound * 100, decimals) for bound in interval)
    return f"{low} to {high}%"


def format_fixed(value: float, decimals: int) -> str:
    """Format a number with a fixed number of decimals and a true minus sign; never "-0.0"."""
    text = f"{value:,.{decimals}f}"
    if float(text.replace(",", "")) == 0:
        text = text.removeprefix("-")
    return text.replace("-", MINUS_SIGN)


def format_fixed_interval(interval: tuple[float, float], decimals: int = 3) -> str:
    """Format an interval as "−0.058 to −0.031"."""
    low, high = (format_fixed(bound, decimals) for bound in interval)
    return f"{low} to {high}"


def format_compact(value: float) -> str:
    """Format a number of any size with about three digits: "12.3k", "0.046", "1.2×10⁻⁷"."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        mantissa = mantissa.removesuffix(".0").replace("-", MINUS_SIGN)
        return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            divisor = 1e3 if unit == "k" else limit
            return _format_short(value / divisor) + unit
    return _format_short(value)


def format_axis_count(value: float, largest: float) -> str:
    """Format a count on an axis in the unit of the largest count: "0", "5k", "10k"."""
    for limit, divisor, unit in ((1e7, 1e6, "M"), (1e4, 1e3, "k")):
        if largest >= limit and value:
            return f"{value / divisor:,g}{unit}"
    return f"{value:,g}"


def format_duration(seconds: float) -> str:
    """Format a duration as "8.4 s", "94 s", "12 min 30 s" or "3 h 20 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest_s} s" if rest_s else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _format_short(value: float) -> str:
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = format_fixed(value, decimals)
    return text.rstrip("0").rstrip(".") if "." in text else text
