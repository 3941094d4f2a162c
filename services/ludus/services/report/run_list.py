"""The runs in a folder: what each run trains, its progress, its latest result and its size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ludus.proto.config import (
    NetworkRun,
    RecordedRun,
    SftRun,
    TinyModel,
    validate_recorded_run_json,
)
from ludus.proto.errors import ConfigError
from ludus.proto.metrics import EvalMetric
from ludus.proto.run_lock import is_in_use
from ludus.proto.runs import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    MetricsRow,
    SftSummary,
    Summary,
)

_TAIL_SIZE = 1 << 18
"""Maximum number of bytes that are read from the end of metrics.jsonl."""
_EVAL_MARK, _PHASE_MARK = b'"kind":"eval"', b'"kind":"phase"'


class RunStatus(StrEnum):
    """Status of a run: training, trained to its last step, or stopped before it."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


class RunResult(BaseModel):
    """The main number of a run's latest evaluation. Intervals are 95 % intervals."""

    model_config = ConfigDict(frozen=True)

    metric: str
    """"wins", "return" or "loss"; the loss is a fine-tuning run's lowest validation loss."""
    value: float
    ci95: tuple[float, float] | None = None


class ListedRun(BaseModel):
    """A run in a folder. What its files do not say, or cannot be read, is None."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Name of the run's folder."""
    folder: Path
    status: RunStatus
    environments: tuple[str, ...] | None = None
    """Names of the environments; of a fine-tuning run, the path of its conversations."""
    model: str | None = None
    """Path or id of the initial model, or the kind of a model that the run made."""
    step: int = 0
    """Number of trained steps."""
    num_steps: int | None = None
    """Number of steps of the whole run."""
    result: RunResult | None = None
    """Result in the first environment."""
    changed_s: float
    """Time of the last change to the run's records, in seconds since 1970."""
    num_bytes: int
    """Size of all files of the run."""


def list_run_folders(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, by name."""
    try:
        candidates = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [candidate for candidate in candidates if is_run_folder(candidate)]


def is_run_folder(folder: Path) -> bool:
    """Return whether a run has written its configuration or its metrics to the folder."""
    return any((folder / name).is_file() for name in (CONFIG_FILE, METRICS_FILE))


def read_listed_run(folder: Path) -> ListedRun:
    """Return what a run's files say about it. Only the end of its metrics is read."""
    config = _read_config(folder)
    summary = _read_summary(folder, config)
    tail = list(_read_tail(folder / METRICS_FILE))
    last_row = next(_parse_rows(reversed(tail)), None)
    return ListedRun(
        name=folder.name,
        folder=folder,
        status=_find_status(folder, summary),
        environments=None if config is None else _list_environments(config),
        model=None if config is None else _describe_model(config),
        step=0 if last_row is None else last_row.step,
        num_steps=_find_num_steps(config, tail),
        result=_find_result(summary, tail),
        changed_s=_find_last_change(folder),
        num_bytes=measure_folder(folder),
    )


def measure_folder(folder: Path) -> int:
    """Return the number of bytes of all files in a folder. Links are not followed."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except OSError:  # removed in the meantime, such as an old checkpoint
                continue
            num_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return num_bytes


def _read_config(folder: Path) -> RecordedRun | None:
    try:
        return validate_recorded_run_json((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValidationError, ConfigError):
        return None


def _read_summary(folder: Path, config: RecordedRun | None) -> Summary | SftSummary | None:
    record_type = SftSummary if isinstance(config, SftRun) else Summary
    try:
        return record_type.model_validate_json((folder / SUMMARY_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def _find_status(folder: Path, summary: Summary | SftSummary | None) -> RunStatus:
    if is_in_use(folder):
        return RunStatus.RUNNING
    is_finished = summary.finished if isinstance(summary, Summary) else summary is not None
    return RunStatus.FINISHED if is_finished else RunStatus.STOPPED


def _find_num_steps(config: RecordedRun | None, tail: list[bytes]) -> int | None:
    """Return the number of steps that the run has recorded, or else has in its configuration."""
    for row in _parse_rows(line for line in reversed(tail) if _PHASE_MARK in line):
        if row.num_steps is not None:
            return row.num_steps
    if config is None or getattr(config.training, "num_epochs", None) is not None:
        return None  # a run with epochs computes its steps when it starts
    return config.training.num_steps


def _list_environments(config: RecordedRun) -> tuple[str, ...]:
    if isinstance(config, SftRun):
        return (config.data.path,)
    return tuple(config.environments)


def _describe_model(config: RecordedRun) -> str:
    if isinstance(config, NetworkRun):
        return "network"
    model = config.model
    return f"tiny, width {model.width}" if isinstance(model, TinyModel) else model.path


def _find_result(summary: Summary | SftSummary | None, tail: list[bytes]) -> RunResult | None:
    """Return the result of the summary, or of the latest evaluation in the metrics."""
    match summary:
        case Summary(win_rate=float(win_rate)):
            return RunResult(metric="wins", value=win_rate, ci95=summary.win_rate_ci95)
        case Summary():
            interval = summary.expected_return_ci95
            return RunResult(metric="return", value=summary.expected_return, ci95=interval)
        case SftSummary(best_loss=float(loss)):
            return RunResult(metric="loss", value=loss)
    for row in _parse_rows(line for line in reversed(tail) if _EVAL_MARK in line):
        return _read_result(row)
    return None


def _read_result(row: MetricsRow) -> RunResult | None:
    low, high = EvalMetric.WIN_RATE_CI95_LOW, EvalMetric.WIN_RATE_CI95_HIGH
    metric, name = EvalMetric.WIN_RATE, "wins"
    if EvalMetric.WIN_RATE not in row.values:
        low, high = EvalMetric.RETURN_CI95_LOW, EvalMetric.RETURN_CI95_HIGH
        metric, name = EvalMetric.RETURN_MEAN, "return"
    if metric not in row.values:
        return None
    has_interval = low in row.values and high in row.values
    interval = (row.values[low], row.values[high]) if has_interval else None
    return RunResult(metric=name, value=row.values[metric], ci95=interval)


def _read_tail(path: Path) -> Iterator[bytes]:
    """Yield the complete lines at the end of a file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_SIZE))
            lines = file.read(_TAIL_SIZE).split(b"\n")
    except OSError:
        return
    # The first line is cut off unless the file is short; the last one is empty or incomplete.
    yield from lines[0 if size <= _TAIL_SIZE else 1 : -1]


def _parse_rows(lines: Iterator[bytes]) -> Iterator[MetricsRow]:
    for line in lines:
        try:
            yield MetricsRow.model_validate_json(line)
        except ValidationError:
            continue


def _find_last_change(folder: Path) -> float:
    times = []
    for name in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
