"""Reading what a run left in its folder, however far it came."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from ludus.proto.config import EnvironmentConfig, LanguageModelRun, RunConfig, validate_run_json
from ludus.proto.errors import NotFoundError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import (
    CHART_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    TRANSCRIPTS_FILE,
    MetricsRow,
    PolicyChart,
    Summary,
    Transcript,
    read_metrics,
    read_transcripts,
)
from ludus.services.results import readable_policy_name

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run; what is missing is None or empty, and a notice says so."""

    run_dir: Path
    config: RunConfig | None
    summary: Summary | None
    chart: PolicyChart | None
    metrics: tuple[MetricsRow, ...]
    transcripts: tuple[Transcript, ...]
    notices: tuple[str, ...]

    @property
    def name(self) -> str:
        """The run's name."""
        if self.summary is not None:
            return self.summary.name
        return self.config.name if self.config is not None else self.run_dir.resolve().name

    @property
    def environments(self) -> list[str]:
        """The run's environments by name, the first one first."""
        if self.summary is not None:
            return list(self.summary.results)
        if self.config is not None:
            return list(self.config.environments)
        return list(dict.fromkeys(row.environment or "" for row in self._rows("eval")))

    def environment_config(self, environment: str) -> EnvironmentConfig | None:
        """Return the section of a language-model run's environment; None for other runs."""
        if not isinstance(self.config, LanguageModelRun):
            return None
        return self.config.environments.get(environment)

    def eval_rows(self, environment: str) -> list[MetricsRow]:
        """Rows of the trained policy's evaluations in an environment."""
        return [row for row in self._rows("eval") if row.environment == environment]

    def baseline_rows(self, environment: str) -> dict[str, MetricsRow]:
        """The newest row of each fixed policy in an environment."""
        rows = [row for row in self._rows("baseline") if row.environment == environment]
        return {row.policy or "": row for row in rows}

    def environment_rows(self, environment: str) -> list[MetricsRow]:
        """Rows of training steps, as far as they are of one environment."""
        return [row for row in self._rows("environment") if row.environment == environment]

    @property
    def train_rows(self) -> list[MetricsRow]:
        """Rows of training steps, of the whole run."""
        return self._rows("train")

    @property
    def unlocks(self) -> list[tuple[int, str]]:
        """After how many games the curriculum opened which environment."""
        return [
            (row.num_games_trained, row.environment or "")
            for row in self._rows("event")
            if TrainMetric.NUM_UNLOCKS in row.values
        ]

    @property
    def num_steps_done(self) -> int:
        """Training steps that the metrics know of."""
        return max((row.step for row in self.train_rows), default=0)

    def reference_name(self, environment: str) -> str:
        """What the best policy known is called."""
        config = self.environment_config(environment)
        optimal = config.optimal_policy if config is not None else None
        return readable_policy_name(optimal) if optimal else "the reference"

    def _rows(self, kind: str) -> list[MetricsRow]:
        return [row for row in self.metrics if row.kind == kind]


def load_run_files(run_dir: Path) -> RunFiles:
    """What is in a run's folder.

    Raises:
        NotFoundError: the folder is not there, or holds no run.
    """
    known = [CONFIG_FILE, METRICS_FILE, SUMMARY_FILE]
    if not any((run_dir / name).is_file() for name in known):
        raise NotFoundError(_no_run(run_dir, known))
    notices: list[str] = []
    config = _load(run_dir / CONFIG_FILE, validate_run_json, notices)
    summary = _load(run_dir / SUMMARY_FILE, Summary.model_validate_json, notices)
    chart = None
    if (run_dir / CHART_FILE).exists():
        chart = _load(run_dir / CHART_FILE, PolicyChart.model_validate_json, notices)
    metrics = _guarded(lambda: read_metrics(run_dir), METRICS_FILE, notices) or []
    transcripts = _guarded(lambda: read_transcripts(run_dir), TRANSCRIPTS_FILE, notices) or []
    return RunFiles(
        run_dir, config, summary, chart, tuple(metrics), tuple(transcripts), tuple(notices)
    )


def _load(path: Path, parse: Callable[[bytes], ValueT], notices: list[str]) -> ValueT | None:
    if not path.exists():
        notices.append(f"{path.name} is missing.")
        return None
    return _guarded(lambda: parse(path.read_bytes()), path.name, notices)


def _guarded(read: Callable[[], ValueT], file: str, notices: list[str]) -> ValueT | None:
    try:
        return read()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        notices.append(f"{file} cannot be read: {where}: {first['msg']}.")
    except OSError as error:
        notices.append(f"{file} cannot be read: {error.strerror}.")
    return None


def _no_run(run_dir: Path, known: list[str]) -> str:
    wanted = f"expected a run's folder with one of {', '.join(known)}, got '{run_dir}'"
    if not run_dir.parent.is_dir():
        return f"{wanted}, which does not exist; runs usually stand in runs/"
    others = sorted(path.name for path in run_dir.parent.iterdir() if path.is_dir())
    close = difflib.get_close_matches(run_dir.name, others, n=3) or others[:5]
    problem = "which holds none of them" if run_dir.is_dir() else "which does not exist"
    hint = f"; beside it there is: {', '.join(close)}" if close else ""
    return f"{wanted}, {problem}{hint}"
