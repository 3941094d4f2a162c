"""Formats of numbers in tables and reports."""

from __future__ import annotations

import math

MINUS_SIGN = "−"
NO_VALUE = "–"

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_percent(share: float | None, decimals: int = 1) -> str:
    """Format a share as "42.9%"; None becomes a dash."""
    if share is None:
        return NO_VALUE
    return f"{format_fixed(share * 100, decimals)}%"


def format_percent_interval(interval: tuple[float, float] | None, decimals: int = 1) -> str:
    """Format an interval of shares as "41.9 to 43.9%"; None becomes a dash."""
    if interval is None:
        return NO_VALUE
    low, high = (format_fixed(bound * 100, decimals) for bound in interval)
    return f"{low} to {high}%"


def format_fixed(number: float, decimals: int) -> str:
    """Format a number with a fixed number of decimals and a true minus sign; never "-0.0"."""
    digits = f"{number:,.{decimals}f}"
    if float(digits.replace(",", "")) == 0:
        digits = digits.removeprefix("-")
    return digits.replace("-", MINUS_SIGN)


def format_fixed_interval(interval: tuple[float, float], decimals: int = 3) -> str:
    """Format an interval as "−0.058 to −0.031"."""
    low, high = (format_fixed(bound, decimals) for bound in interval)
    return f"{low} to {high}"


def format_compact(number: float) -> str:
    """Format a number of any size with about three digits: "12.3k", "0.046", "1.2×10⁻⁷"."""
    magnitude = abs(number)
    if number == 0 or not math.isfinite(number):
        return "0" if number == 0 else str(number)
    if magnitude < 1e-3:
        mantissa, exponent = f"{number:.1e}".split("e")
        mantissa = mantissa.removesuffix(".0").replace("-", MINUS_SIGN)
        return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    for min_magnitude, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if magnitude >= min_magnitude:
            divisor = 1e3 if unit == "k" else min_magnitude
            return _format_short(number / divisor) + unit
    return _format_short(number)


def format_axis_count(count: float, max_count: float) -> str:
    """Format a count on an axis, in the unit that suits the largest count: "0", "5k", "10k"."""
    for min_count, divisor, unit in ((1e7, 1e6, "M"), (1e4, 1e3, "k")):
        if max_count >= min_count and count:
            return f"{count / divisor:,g}{unit}"
    return f"{count:,g}"


def format_duration(seconds: float) -> str:
    """Format a duration as "8.4 s", "94 s", "12 min 30 s" or "3 h 20 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, remaining_s = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {remaining_s} s" if remaining_s else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def format_size(num_bytes: int) -> str:
    """Format a number of bytes as "512 B", "3.4 kB" or "2.2 GB"."""
    for divisor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= divisor:
            return f"{_format_short(num_bytes / divisor)} {unit}"
    return f"{num_bytes} B"


def format_memory(num_bytes: int) -> str:
    """Format a size of memory in binary units, as settings use them: "512 MiB" or "2.2 GiB"."""
    unit, divisor = ("GiB", 2**30) if num_bytes >= 2**30 else ("MiB", 2**20)
    return f"{_format_short(num_bytes / divisor)} {unit}"


def _format_short(number: float) -> str:
    magnitude = abs(number)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    digits = format_fixed(number, decimals)
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
