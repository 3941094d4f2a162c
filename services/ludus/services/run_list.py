"""The list of runs: what each run trains, its progress, its latest result and its size."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
    Phase,
    SftSummary,
    Summary,
)

_BLOCK_SIZE = 1 << 16
"""Number of bytes that are read at once from the end of metrics.jsonl."""
_MAX_LINE_SIZE = 1 << 24
_RUN_KEYS = {"name", "training"}
"""Keys of the configuration of every run, which that of a Hugging Face model does not have."""


class Location(StrEnum):
    """The place where a run trains."""

    LOCAL = "local"
    CLUSTER = "cluster"


class RunStatus(StrEnum):
    """Status of a run on this machine: training, trained to its last step, or stopped before it."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


class RunResult(BaseModel):
    """The main number of an evaluation, with its 95 % interval."""

    model_config = ConfigDict(frozen=True)

    metric: str
    """"wins" for the share of successes, "return", or "loss" for the validation loss of a
    fine-tuning run's model."""
    value: float
    ci95: tuple[float, float] | None = None
    is_game: bool | None = None
    """True if the environment has games, which are won; False if it has tasks, which are solved.
    None for a loss, which belongs to no environment."""


class ListedRun(BaseModel):
    """A run on this machine or on a cluster. Optional fields that are unknown are None."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Name of the run, or of its folder on this machine."""
    location: Location
    folder: str | None
    """Folder on this machine; None for a run on a cluster."""
    status: str
    """A `RunStatus`, or the phase of a run on a cluster."""
    environments: tuple[str, ...] | None = None
    """Names of the environments, or the path of a fine-tuning run's conversations."""
    model: str | None = None
    """Path or id of the initial model, or the kind of a model that the run created."""
    step: int | None = None
    """Number of trained steps."""
    num_steps: int | None = None
    """Number of steps of the whole run."""
    result: RunResult | None = None
    """Latest result in the first environment."""
    changed_s: float
    """Time of the last change to the run's records, in seconds since 1970."""
    num_bytes: int | None = None
    """Size of all files of the run on this machine."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run according to its metrics."""

    step: int | None
    """Number of trained steps; None without metrics."""
    num_steps: int | None
    result: RunResult | None
    is_done: bool
    """True if the last row is that of the end of the run."""


@dataclass(frozen=True, slots=True)
class Description:
    """The training of a run according to its configuration, and its progress."""

    environments: tuple[str, ...] | None
    model: str | None
    progress: Progress


def list_run_folders(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, by name."""
    try:
        return sorted(filter(is_run_folder, folder.iterdir()))
    except OSError:
        return []


def is_run_folder(folder: Path) -> bool:
    """Return whether a run has written its metrics or its configuration to the folder."""
    try:
        if (folder / METRICS_FILE).is_file():
            return True
        config = json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.keys() >= _RUN_KEYS


def read_listed_run(folder: Path) -> ListedRun:
    """Return what a run's files say about it. Its metrics are read from their end."""
    config_json, summary = _read_bytes(folder / CONFIG_FILE), _read_summary(folder)
    description = describe_run(config_json, _read_lines_backwards(folder / METRICS_FILE))
    progress = description.progress
    step = progress.step or 0
    if summary is not None and step != summary.num_steps:
        summary = None  # of an earlier end, before the run was resumed
    return ListedRun(
        name=_decode(folder.name),
        location=Location.LOCAL,
        folder=_decode(folder),
        status=_find_status(folder, summary, is_done=progress.is_done),
        environments=description.environments,
        model=description.model,
        step=step,
        num_steps=progress.num_steps,
        result=progress.result if summary is None else _read_result(summary),
        changed_s=_find_last_change(folder),
        num_bytes=measure_folder(folder),
    )


def describe_run(config_json: str | bytes, lines: Iterable[bytes]) -> Description:
    """Return the training of a run and its progress.

    Args:
        config_json: configuration of the run. If it is not valid, the fields from it are None.
        lines: rows of the metrics as JSON, the last one first; read as far as necessary.
    """
    config = _parse_config(config_json)
    if config is None:
        return Description(None, None, _find_progress(lines, None))
    environments = _list_environments(config)
    progress = _find_progress(lines, environments[0])
    if progress.num_steps is None:
        progress = replace(progress, num_steps=get_num_steps(config))
    return Description(environments, _describe_model(config), progress)


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


def _decode(path: str | Path) -> str:
    """Return a path as text, in which bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _read_bytes(path: Path) -> bytes:
    """Return the contents of a file; b"" if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _parse_config(config_json: str | bytes) -> RecordedRun | None:
    try:
        return validate_recorded_run_json(config_json)
    except (ValidationError, ConfigError):
        return None


def _read_summary(folder: Path) -> Summary | SftSummary | None:
    summary_json = _read_bytes(folder / SUMMARY_FILE)
    for record_type in (Summary, SftSummary):
        try:
            return record_type.model_validate_json(summary_json)
        except ValidationError:
            continue
    return None


def _find_status(folder: Path, summary: Summary | SftSummary | None, *, is_done: bool) -> RunStatus:
    try:
        if is_in_use(folder):
            return RunStatus.RUNNING
    except OSError:  # the lock cannot be read
        pass
    if summary is None:
        return RunStatus.FINISHED if is_done else RunStatus.STOPPED
    is_finished = summary.finished if isinstance(summary, Summary) else True
    return RunStatus.FINISHED if is_finished else RunStatus.STOPPED


def get_num_steps(config: RecordedRun) -> int | None:
    """Return the number of steps; None if the run computes it from epochs when it starts."""
    has_epochs = getattr(config.training, "num_epochs", None) is not None
    return None if has_epochs else config.training.num_steps


def _list_environments(config: RecordedRun) -> tuple[str, ...]:
    return (config.data.path,) if isinstance(config, SftRun) else tuple(config.environments)


def _describe_model(config: RecordedRun) -> str:
    if isinstance(config, NetworkRun):
        return "network"
    model = config.model
    return f"tiny, width {model.width}" if isinstance(model, TinyModel) else model.path


def _read_result(summary: Summary | SftSummary) -> RunResult | None:
    if isinstance(summary, SftSummary):
        loss = summary.kept_loss
        return None if loss is None else RunResult(metric="loss", value=loss)
    name, value, interval = "wins", summary.win_rate, summary.win_rate_ci95
    if value is None:
        name, value, interval = "return", summary.expected_return, summary.expected_return_ci95
    is_game = next(iter(summary.results.values())).report.is_game
    return RunResult(metric=name, value=value, ci95=interval, is_game=is_game)


def _find_progress(lines: Iterable[bytes], environment: str | None) -> Progress:
    """Read rows from the last one back, until all fields are known.

    Args:
        lines: rows as JSON, the last one first.
        environment: environment of the result; None takes any.
    """
    step: int | None = None
    is_done = False
    num_steps: int | None = None
    result: RunResult | None = None
    for line in lines:
        is_relevant = step is None or b'"eval"' in line or b'"phase"' in line
        row = _parse_row(line) if is_relevant else None
        if row is None:
            continue
        if step is None:
            step, is_done = row.step, row.phase is Phase.DONE
        if num_steps is None:
            num_steps = row.num_steps
        if row.kind == "eval" and environment in (None, row.environment):
            result = _read_evaluation(row)
        if num_steps is not None and (result is not None or is_done):
            break
    return Progress(step, num_steps, result, is_done)


def _read_evaluation(row: MetricsRow) -> RunResult | None:
    low, high = EvalMetric.WIN_RATE_CI95_LOW, EvalMetric.WIN_RATE_CI95_HIGH
    metric, name = EvalMetric.WIN_RATE, "wins"
    if EvalMetric.WIN_RATE not in row.values:
        low, high = EvalMetric.RETURN_CI95_LOW, EvalMetric.RETURN_CI95_HIGH
        metric, name = EvalMetric.RETURN_MEAN, "return"
    if metric not in row.values:
        return None
    has_interval = low in row.values and high in row.values
    interval = (row.values[low], row.values[high]) if has_interval else None
    return RunResult(metric=name, value=row.values[metric], ci95=interval, is_game=row.is_game)


def _read_lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file, the last one first."""
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            rest = b""
            is_at_end = True
            while position > 0:
                size = min(_BLOCK_SIZE, position)
                position -= size
                file.seek(position)
                first, *lines = (file.read(size) + rest).split(b"\n")
                if lines and is_at_end:
                    lines.pop()  # incomplete or empty, after the last newline
                    is_at_end = False
                yield from reversed(lines)
                rest = first
                if len(rest) > _MAX_LINE_SIZE:
                    return
            if not is_at_end:
                yield rest
    except OSError:
        return


def _parse_row(line: bytes) -> MetricsRow | None:
    try:
        return MetricsRow.model_validate_json(line)
    except ValidationError:
        return None


def _find_last_change(folder: Path) -> float:
    times = []
    for name in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
