"""How numbers are written for people, the same in tables and reports."""

from __future__ import annotations

import math

MINUS = "−"
NONE = "–"

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(share: float | None, decimals: int = 1) -> str:
    """A share as "42.9%"; a dash where there is none."""
    if share is None:
        return NONE
    return f"{fixed(share * 100, decimals)}%"


def percent_interval(interval: tuple[float, float] | None, decimals: int = 1) -> str:
    """An interval of shares as "41.9 to 43.9%"; a dash where there is none."""
    if interval is None:
        return NONE
    low, high = (fixed(end * 100, decimals) for end in interval)
    return f"{low} to {high}%"


def fixed(value: float, decimals: int) -> str:
    """A number with a fixed count of decimals and a true minus sign; never "-0.0"."""
    text = f"{value:,.{decimals}f}"
    if float(text.replace(",", "")) == 0:
        text = text.removeprefix("-")
    return text.replace("-", MINUS)


def fixed_interval(interval: tuple[float, float], decimals: int = 3) -> str:
    """An interval as "−0.058 to −0.031"."""
    low, high = (fixed(end, decimals) for end in interval)
    return f"{low} to {high}"


def compact(value: float) -> str:
    """A number of any size in about three digits: "12.3k", "0.046", "1.2×10⁻⁷"."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        mantissa = mantissa.removesuffix(".0").replace("-", MINUS)
        return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            divisor = 1e3 if unit == "k" else limit
            return _short(value / divisor) + unit
    return _short(value)


def axis_count(value: float, largest: float) -> str:
    """A count on an axis, in the unit that suits the largest one there: "0", "5k", "10k"."""
    for limit, divisor, unit in ((1e7, 1e6, "M"), (1e4, 1e3, "k")):
        if largest >= limit and value:
            return f"{value / divisor:,g}{unit}"
    return f"{value:,g}"


def duration(seconds: float) -> str:
    """A time as "8.4 s", "94 s", "12 min 30 s" or "3 h 20 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest_s} s" if rest_s else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _short(value: float) -> str:
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = fixed(value, decimals)
    return text.rstrip("0").rstrip(".") if "." in text else text
