"""Tests of the metrics sinks of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError
from ludus.proto.runs import MetricsRow
from ludus.trainer.run.sinks import Sinks, open_sinks
from tests.sinks.mixed_run import make_run_config, make_step_rows


class RecordingSink:
    """A sink that records rows and can fail.

    Every `write` from row index `first_failing_row` on fails, and so does `close`.
    """

    def __init__(self, name: str, first_failing_row: int | None = None) -> None:
        self.name = name
        self.rows: list[MetricsRow] = []
        self.num_close_calls = 0
        self._first_failing_row = first_failing_row

    def write(self, row: MetricsRow) -> None:
        if self._first_failing_row is not None and len(self.rows) >= self._first_failing_row:
            raise OSError(28, "No space left on device")
        self.rows.append(row)

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        self.options = options

    def rewind(self, step: int) -> None:
        self.rows = [row for row in self.rows if row.step <= step]

    def close(self) -> None:
        self.num_close_calls += 1
        if self._first_failing_row is not None:
            raise OSError(28, "No space left on device")


def test_failed_sink_logs_one_warning_and_gets_no_more_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing_sink, working_sink = RecordingSink("full", first_failing_row=1), RecordingSink("good")
    sinks = Sinks([failing_sink, working_sink])
    rows = [row for step in range(1, 4) for row in make_step_rows(step)]
    for row in rows:
        sinks.write(row)
    assert working_sink.rows == rows
    assert len(failing_sink.rows) == 1
    (warning,) = caplog.records
    assert "full failed and gets no more metrics" in warning.getMessage()
    assert "No space left" in warning.getMessage()
    sinks.close()
    assert working_sink.num_close_calls == 1


def test_failed_close_does_not_prevent_closing_other_sinks() -> None:
    failing_sink, working_sink = RecordingSink("broken", first_failing_row=5), RecordingSink("good")
    sinks = Sinks([failing_sink, working_sink])
    sinks.close()
    sinks.close()
    assert (failing_sink.num_close_calls, working_sink.num_close_calls) == (1, 1)


def test_no_sinks_are_opened_by_default(tmp_path: Path) -> None:
    assert len(open_sinks(make_run_config(), tmp_path)) == 0
    assert list(tmp_path.iterdir()) == []


def test_wandb_sink_without_the_package_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        open_sinks(make_run_config(wandb={"mode": "offline"}), tmp_path)


@pytest.mark.slow
def test_online_wandb_without_an_api_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="WANDB_API_KEY, which is not set"):
        open_sinks(make_run_config(wandb={}), tmp_path)


def test_sink_that_fails_to_open_closes_the_open_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    closed_names: list[str] = []
    monkeypatch.setattr(
        "ludus.trainer.run.tensorboard.TensorboardWriter.close",
        lambda self: closed_names.append(self.name),
    )
    with pytest.raises(ConfigError):
        open_sinks(make_run_config(tensorboard=True, wandb={}), tmp_path)
    assert closed_names == ["tensorboard"]
