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
from ludus.proto.paths import parse_path

from .prices import Prices

_DATE_COLUMN, _CLOSE_COLUMN = "date", "close"

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
    rows = _read_rows(parse_path(path))
    if not rows:
        raise ConfigError(f"{path} has no rows of prices")
    name_by_folded_name = {name.casefold(): name for name in rows[0]}
    date_column = name_by_folded_name.get(_DATE_COLUMN, "")
    price_columns = columns or _find_default_columns(name_by_folded_name)
    for name in (*price_columns, *filter(None, [asset_column])):
        if name not in rows[0]:
            hint = did_you_mean(name, list(rows[0])) or f"it has {', '.join(rows[0])}"
            raise NotFoundError(f"{path} has no column {name!r}; {hint}")
    if asset_column:
        rows, price_columns = _pivot_rows(path, rows, date_column, asset_column, price_columns)
    prices = [
        tuple(_read_price(path, row_number, name, row.get(name)) for name in price_columns)
        for row_number, row in enumerate(rows, 1)
    ]
    dates = [
        str(row[date_column]) if date_column else str(row_number)
        for row_number, row in enumerate(rows, 1)
    ]
    if date_column and any(later < earlier for earlier, later in itertools.pairwise(dates)):
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


def _find_default_columns(name_by_folded_name: Mapping[str, str]) -> tuple[str, ...]:
    if _CLOSE_COLUMN in name_by_folded_name:
        return (name_by_folded_name[_CLOSE_COLUMN],)
    return tuple(
        name for folded_name, name in name_by_folded_name.items() if folded_name != _DATE_COLUMN
    )


def _pivot_rows(
    path: str,
    rows: Sequence[PriceRow],
    date_column: str,
    asset_column: str,
    price_columns: Sequence[str],
) -> tuple[list[PriceRow], tuple[str, ...]]:
    """Return one row per date with a column per asset, and the assets."""
    if not date_column or len(price_columns) != 1:
        raise ConfigError(
            f"{path} needs a column 'date' and one price column in addition to {asset_column!r},"
            f" got the price columns {', '.join(price_columns) or 'none'}; name one in `columns`"
        )
    row_by_date: dict[Any, dict[str, Any]] = {}
    for row in rows:
        row_by_date.setdefault(row[date_column], {date_column: row[date_column]})[
            str(row[asset_column])
        ] = row[price_columns[0]]
    assets = tuple(sorted({str(row[asset_column]) for row in rows}))
    # Dates without a price for every asset are left out.
    complete_rows = [row for row in row_by_date.values() if len(row) == len(assets) + 1]
    return list(complete_rows), assets


def _read_price(path: str, row_number: int, column: str, value: Any) -> float:
    try:
        price = float(value)
    except (TypeError, ValueError):
        price = math.nan
    if not (math.isfinite(price) and price > 0):
        raise ConfigError(
            f"a price in {path} must be above 0, got {value!r} in row {row_number}, column "
            f"{column!r}"
        )
    return price
