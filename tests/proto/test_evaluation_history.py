"""The best evaluation of a run, from the rows of metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.evaluation_history import EvaluationHistory, StepScore, read_evaluation_history
from ludus.proto.runs import METRICS_FILE, MetricsRow


def make_row(step: int, environment: str | None = "coins", **values: float) -> MetricsRow:
    kind = "eval" if environment else "event"
    return MetricsRow(
        kind=kind,
        step=step,
        environment=environment,
        elapsed_s=1.0,
        num_games_trained=step,
        values=values,
    )


def find_best(*rows: MetricsRow, steps: range = range(100)) -> tuple[int, str, float] | None:
    score = EvaluationHistory(rows).find_best(steps)
    return None if score is None else (score.step, score.metric, score.value)


@pytest.mark.parametrize(
    ("values", "metric"),
    [
        ({"return_mean": (3.0, 1.0)}, "return_mean"),
        ({"return_mean": (1.0, 3.0), "win_rate": (0.4, 0.2)}, "win_rate"),
        ({"return_mean": (1.0, 3.0), "win_rate": (0.2, 0.4), "gap_closed": (0.9, 0.1)}, "gap"),
    ],
    ids=["return", "wins", "gap"],
)
def test_gap_closed_decides_before_the_win_rate_before_the_return(
    values: dict[str, tuple[float, float]], metric: str
) -> None:
    rows = [
        make_row(step, **{name: pair[index] for name, pair in values.items()})
        for index, step in enumerate((10, 20))
    ]
    best = find_best(*rows)
    assert best is not None
    assert best[0] == 10
    assert best[1].startswith(metric)


def test_the_lowest_validation_loss_is_the_best() -> None:
    losses = {0: 0.1, 10: 2.0, 20: 1.5, 30: 1.7}
    rows = [make_row(step, None, validation_loss=loss) for step, loss in losses.items()]
    assert find_best(*rows) == (20, "validation_loss", 1.5)


def test_environments_count_equally() -> None:
    rows = [
        make_row(10, "a", win_rate=0.9),
        make_row(10, "b", win_rate=0.1),
        make_row(20, "a", win_rate=0.6),
        make_row(20, "b", win_rate=0.6),
    ]
    assert find_best(*rows) == (20, "win_rate", 0.6)


def test_the_policy_before_training_is_never_the_best() -> None:
    assert find_best(make_row(0, win_rate=0.9)) is None
    assert find_best(make_row(0, win_rate=0.9), make_row(10, win_rate=0.1)) == (10, "win_rate", 0.1)


def test_the_earliest_of_equal_scores_is_the_best() -> None:
    rows = [make_row(step, win_rate=1.0) for step in (30, 10, 20)]
    assert find_best(*rows) == (10, "win_rate", 1.0)
    assert find_best(*rows, steps=range(15, 100)) == (20, "win_rate", 1.0)


@pytest.mark.parametrize(
    "incomplete_rows",
    [
        [make_row(20, "a", win_rate=1.0)],
        [make_row(20, "a", win_rate=1.0), make_row(20, "b", return_mean=1.0)],
        [make_row(20, "a", win_rate=1.0), make_row(20, "b", win_rate=float("nan"))],
    ],
    ids=["environment", "metric", "number"],
)
def test_an_incomplete_evaluation_is_never_the_best(incomplete_rows: list[MetricsRow]) -> None:
    rows = [make_row(10, name, win_rate=0.1) for name in ("a", "b")]
    best = find_best(*rows, *incomplete_rows)
    assert best is not None
    assert best[0] == 10


def test_results_after_a_rollback_are_dropped() -> None:
    history = EvaluationHistory([make_row(step, win_rate=step / 100) for step in (10, 20, 30)])
    history.drop_after(20)
    assert history.find_best(range(100)) == StepScore(20, "win_rate", 0.2)


def test_unreadable_lines_of_the_metrics_are_left_out(tmp_path: Path) -> None:
    assert read_evaluation_history(tmp_path).num_evaluations == 0
    lines = [
        make_row(10, win_rate=0.1).model_dump_json(exclude_defaults=True),
        '{"kind":"eval","step":"many"}',
        '"eval"\0',
        make_row(20, win_rate=0.2).model_dump_json(exclude_defaults=True),
    ]
    text = "\n".join(lines) + '\n{"kind":"eval","step":30,"elapsed_s":1,"num_games_'
    (tmp_path / METRICS_FILE).write_text(text)
    history = read_evaluation_history(tmp_path)
    assert history.find_best(range(100)) == StepScore(20, "win_rate", 0.2)
