"""Prices as both sources give them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of some assets, row by row in the order of time."""

    assets: tuple[str, ...]
    dates: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
    """[dates, assets], all above 0."""

    def window(self, start: int, num_rows: int) -> Prices:
        """So many rows from one on."""
        stop = start + num_rows
        return Prices(self.assets, self.dates[start:stop], self.rows[start:stop])
