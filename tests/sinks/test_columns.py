from __future__ import annotations

from ludus.proto.runs import MetricsRow, RowKind
from ludus.trainer.run.columns import make_columns


def make_row(
    kind: RowKind, step: int, values: dict[str, float], environment: str | None = None
) -> MetricsRow:
    return MetricsRow(
        kind=kind,
        step=step,
        environment=environment,
        elapsed_s=2.0 * step,
        num_games_trained=8 * step,
        values=values,
    )


def test_columns_have_a_value_or_none_for_each_row() -> None:
    rows = [
        make_row("train", 1, {"loss": 0.5}),
        make_row("eval", 1, {"win_rate": 0.25}, "blackjack"),
        make_row("train", 2, {"loss": 0.4, "entropy": 1.5}),
    ]
    assert make_columns(rows, "train") == {
        "step": [1, 2],
        "num_games_trained": [8, 16],
        "elapsed_s": [2.0, 4.0],
        "loss": [0.5, 0.4],
        "entropy": [None, 1.5],
    }
    assert make_columns(rows, "eval") == {
        "step": [1],
        "environment": ["blackjack"],
        "num_games_trained": [8],
        "elapsed_s": [2.0],
        "win_rate": [0.25],
    }
    assert make_columns([], "train") == {"step": [], "num_games_trained": [], "elapsed_s": []}
