"""Recorded metrics as columns, for plots and data frames."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.proto.runs import MetricsRow, RowKind

MetricColumns = dict[str, list[float | str | None]]
"""Lists of one length by column name, which `pandas.DataFrame` and plotting libraries accept."""


def make_columns(rows: Sequence[MetricsRow], kind: RowKind) -> MetricColumns:
    """Return the rows of a kind as columns, with None if a row lacks a metric.

    The first columns are the step, the environment if the rows have one, the number of trained
    episodes and the training time in seconds. The other columns have the names of metrics.
    """
    kept_rows = [row for row in rows if row.kind == kind]
    columns: MetricColumns = {"step": [row.step for row in kept_rows]}
    if any(row.environment is not None for row in kept_rows):
        columns["environment"] = [row.environment for row in kept_rows]
    columns["num_games_trained"] = [row.num_games_trained for row in kept_rows]
    columns["elapsed_s"] = [row.elapsed_s for row in kept_rows]
    for name in dict.fromkeys(name for row in kept_rows for name in row.values):
        columns[name] = [row.values.get(name) for row in kept_rows]
    return columns
