"""Prices of a file: CSV, or Parquet where pyarrow is installed.

date,close            one asset            date,AAPL,MSFT      a column for each
2024-01-02,185.64                          2024-01-02,185.64,370.87

date,tic,close        a row for each asset and date, as FinRL has them: asset_column="tic"
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean

from .prices import Prices

_DATE, _CLOSE = "date", "close"

Row = Mapping[str, Any]


@functools.lru_cache(maxsize=8)
def read_prices(path: str, columns: tuple[str, ...], asset_column: str) -> Prices:
    """The prices of a file; it is read once in a process.

    Args:
        columns: those that hold prices, each an asset; none stands for `close`, or where there is
            no such, all but the date.
        asset_column: the one that names the asset of a row; empty where a row holds all assets.

    Raises:
        NotFoundError: there is no such file or column.
        ConfigError: it holds no prices that can be played on; the message names the row.
    """
    rows = _rows_of(Path(path))
    if not rows:
        raise ConfigError(f"expected rows of prices in {path}, got none")
    names = {name.casefold(): name for name in rows[0]}
    date = names.get(_DATE, "")
    chosen = columns or _price_columns(names)
    for name in (*chosen, *filter(None, [asset_column])):
        if name not in rows[0]:
            hint = did_you_mean(name, list(rows[0])) or f"it has {', '.join(rows[0])}"
            raise NotFoundError(f"{path} has no column {name!r}; {hint}")
    if asset_column:
        rows, chosen = _pivoted(path, rows, date, asset_column, chosen)
    prices = [
        tuple(_price(path, number, name, row.get(name)) for name in chosen)
        for number, row in enumerate(rows, 1)
    ]
    dates = [str(row[date]) if date else str(number) for number, row in enumerate(rows, 1)]
    if date and any(later < earlier for earlier, later in itertools.pairwise(dates)):
        raise ConfigError(
            f"expected the rows of {path} in the order of their dates, year before month before"
            " day; sort them"
        )
    return Prices(tuple(chosen), tuple(dates), tuple(prices))


def _rows_of(path: Path) -> Sequence[Row]:
    if not path.is_file():
        raise NotFoundError(f"expected a file of prices, got {str(path)!r}, which is none")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ConfigError(f"{path} needs a library: pip install pyarrow") from error
        return pyarrow.parquet.read_table(path).to_pylist()
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def _price_columns(names: Mapping[str, str]) -> tuple[str, ...]:
    if _CLOSE in names:
        return (names[_CLOSE],)
    return tuple(name for folded, name in names.items() if folded != _DATE)


def _pivoted(
    path: str, rows: Sequence[Row], date: str, asset_column: str, chosen: Sequence[str]
) -> tuple[list[Row], tuple[str, ...]]:
    """A row for each date, and in it a column for each asset."""
    if not date or len(chosen) != 1:
        raise ConfigError(
            f"expected a column 'date' and one column of prices beside {asset_column!r} in {path},"
            f" got prices in {', '.join(chosen) or 'none'}; name one in `columns`"
        )
    by_date: dict[Any, dict[str, Any]] = {}
    for row in rows:
        by_date.setdefault(row[date], {date: row[date]})[str(row[asset_column])] = row[chosen[0]]
    assets = tuple(sorted({str(row[asset_column]) for row in rows}))
    # A date on which an asset was not traded has no price for it, so nobody could trade.
    whole = [row for row in by_date.values() if len(row) == len(assets) + 1]
    return list(whole), assets


def _price(path: str, number: int, name: str, value: Any) -> float:
    try:
        price = float(value)
    except (TypeError, ValueError):
        price = math.nan
    if not (math.isfinite(price) and price > 0):
        raise ConfigError(
            f"expected a price above 0 in {path}, row {number}, column {name!r}, got {value!r}"
        )
    return price
