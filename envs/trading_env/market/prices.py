"""A table of prices, the common form of both sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of some assets, ordered by time."""

    assets: tuple[str, ...]
    dates: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
    """[dates, assets]; every price is above 0."""

    def take_window(self, start: int, num_rows: int) -> Prices:
        """Return `num_rows` rows from row `start`."""
        stop = start + num_rows
        return Prices(self.assets, self.dates[start:stop], self.rows[start:stop])
