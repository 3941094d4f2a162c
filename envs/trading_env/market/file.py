"""Prices from a file, CSV or Parquet. Parquet needs pyarrow.

date,close            one asset            date,AAPL,MSFT      a column per asset
2024-01-02,185.64                          2024-01-02,185.64,370.87

date,tic,close        a row per asset and date, as in FinRL: asset_column="tic"
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

PriceRow = Mapping[str, Any]


@functools.lru_cache(maxsize=8)
def read_prices(path: str, columns: tuple[str, ...], asset_column: str) -> Prices:
    """Read the prices of a file. A process reads each file once.

    Args:
        columns: Price columns; each is an asset. Default: `close`, or all columns but the date.
        asset_column: Column with the asset's name; "" if a row has the prices of all assets.

    Raises:
        NotFoundError: The file or a column does not exist.
        ConfigError: A price is missing or invalid; the message names the row.
    """
    rows = _read_rows(Path(path))
    if not rows:
        raise ConfigError(f"{path} has no rows of prices")
    names = {name.casefold(): name for name in rows[0]}
    date = names.get(_DATE, "")
    price_columns = columns or _default_columns(names)
    for name in (*price_columns, *filter(None, [asset_column])):
        if name not in rows[0]:
            hint = did_you_mean(name, list(rows[0])) or f"it has {', '.join(rows[0])}"
            raise NotFoundError(f"{path} has no column {name!r}; {hint}")
    if asset_column:
        rows, price_columns = _pivot(path, rows, date, asset_column, price_columns)
    prices = [
        tuple(_price(path, number, name, row.get(name)) for name in price_columns)
        for number, row in enumerate(rows, 1)
    ]
    dates = [str(row[date]) if date else str(number) for number, row in enumerate(rows, 1)]
    if date and any(later < earlier for earlier, later in itertools.pairwise(dates)):
        raise ConfigError(
            f"the rows of {path} are not in the order of their dates; sort them, with dates like"
            " 2024-01-31"
        )
    return Prices(tuple(price_columns), tuple(dates), tuple(prices))


def _read_rows(path: Path) -> Sequence[PriceRow]:
    if not path.is_file():
        raise NotFoundError(f"there is no price file {str(path)!r}")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ConfigError(f"{path} needs pyarrow; pip install pyarrow") from error
        return pyarrow.parquet.read_table(path).to_pylist()
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def _default_columns(names: Mapping[str, str]) -> tuple[str, ...]:
    if _CLOSE in names:
        return (names[_CLOSE],)
    return tuple(name for folded, name in names.items() if folded != _DATE)


def _pivot(
    path: str, rows: Sequence[PriceRow], date: str, asset_column: str, price_columns: Sequence[str]
) -> tuple[list[PriceRow], tuple[str, ...]]:
    """Return one row per date with a column per asset, and the assets."""
    if not date or len(price_columns) != 1:
        raise ConfigError(
            f"{path} needs a column 'date' and one price column in addition to {asset_column!r},"
            f" got the price columns {', '.join(price_columns) or 'none'}; name one in `columns`"
        )
    by_date: dict[Any, dict[str, Any]] = {}
    for row in rows:
        by_date.setdefault(row[date], {date: row[date]})[str(row[asset_column])] = row[
            price_columns[0]
        ]
    assets = tuple(sorted({str(row[asset_column]) for row in rows}))
    # Dates without a price for every asset are left out.
    complete = [row for row in by_date.values() if len(row) == len(assets) + 1]
    return list(complete), assets


def _price(path: str, number: int, name: str, value: Any) -> float:
    try:
        price = float(value)
    except (TypeError, ValueError):
        price = math.nan
    if not (math.isfinite(price) and price > 0):
        raise ConfigError(
            f"a price in {path} must be above 0, got {value!r} in row {number}, column {name!r}"
        )
    return price
