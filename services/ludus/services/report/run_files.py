"""The files of a run folder, some of which may be missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from ludus.proto.config import (
    EnvironmentConfig,
    LanguageModelRun,
    RecordedRun,
    SftRun,
    validate_recorded_run_json,
)
from ludus.proto.errors import NotFoundError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import (
    CHART_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    TRACE_FILE,
    TRANSCRIPTS_FILE,
    MetricsRow,
    Phase,
    PolicyChart,
    RowKind,
    SftSummary,
    StepTrace,
    Summary,
    Transcript,
    read_metrics,
    read_samples,
    read_traces,
    read_transcripts,
)
from ludus.services.display import format_policy_name

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The contents of a run's files. A missing file is None or empty, and `notices` mentions it."""

    run_dir: Path
    config: RecordedRun | None
    summary: Summary | None
    """Summary of a run that trains a policy."""
    sft_summary: SftSummary | None
    """Summary of a fine-tuning run."""
    chart: PolicyChart | None
    metrics: list[MetricsRow]
    transcripts: list[Transcript]
    samples: list[Transcript]
    """Evaluation episodes before and after training."""
    notices: list[str]
    traces: list[StepTrace] = field(default_factory=list)
    """Traces of the training steps of a language model."""

    @property
    def name(self) -> str:
        """Name of the run."""
        if self.summary is not None:
            return self.summary.name
        if self.sft_summary is not None:
            return self.sft_summary.name
        return self.config.name if self.config is not None else self.run_dir.resolve().name

    @property
    def environments(self) -> list[str]:
        """Names of the run's environments, in order."""
        if self.summary is not None:
            return list(self.summary.results)
        if self.config is not None:
            return list(self.config.environments)
        return list(dict.fromkeys(row.environment or "" for row in self.select_rows("eval")))

    def find_environment_config(self, environment: str) -> EnvironmentConfig | None:
        """Return an environment's configuration; None if no language model is trained."""
        if not isinstance(self.config, LanguageModelRun):
            return None
        return self.config.environments.get(environment)

    def is_game(self, environment: str) -> bool:
        """Return False if the environment has tasks instead of games."""
        if self.summary is not None:
            return self.summary.results[environment].report.is_game
        return all(row.is_game for row in self.metrics if row.environment == environment)

    def select_rows(self, kind: RowKind, environment: str | None = None) -> list[MetricsRow]:
        """Return the metrics rows of a kind, for one environment or for all."""
        rows = [row for row in self.metrics if row.kind == kind]
        return [row for row in rows if environment in (None, row.environment)]

    @property
    def unlocks(self) -> list[tuple[int, str]]:
        """(Number of trained episodes, environment) for each opening by the curriculum."""
        return [
            (row.num_games_trained, row.environment or "")
            for row in self.select_rows("event")
            if TrainMetric.NUM_UNLOCKS in row.values
        ]

    @property
    def resumes(self) -> list[tuple[int, int]]:
        """(Step, number of trained episodes) for each resume from a checkpoint."""
        resumes, num_games_trained = [], 0
        for row in self.metrics:
            if row.phase is Phase.PREPARE_MODEL and row.step > 0:
                resumes.append((row.step, num_games_trained))
            num_games_trained = max(num_games_trained, row.num_games_trained)
        return resumes

    @property
    def num_steps_done(self) -> int:
        """Number of finished training steps, from the metrics."""
        return max((row.step for row in self.select_rows("train")), default=0)

    def find_reference_name(self, environment: str) -> str:
        """Return the display name of an environment's reference policy."""
        config = self.find_environment_config(environment)
        policy_name = config.optimal_policy if config else None
        return format_policy_name(policy_name) if policy_name else "the reference"


def load_run_files(run_dir: Path) -> RunFiles:
    """Read the files of a run folder.

    Raises:
        NotFoundError: the folder does not exist or contains no run.
    """
    file_names = [CONFIG_FILE, METRICS_FILE, SUMMARY_FILE]
    if not any((run_dir / name).is_file() for name in file_names):
        names = ", ".join(file_names)
        raise NotFoundError(f"'{run_dir}' is not a run folder: it has none of {names}")
    reader = _FileReader(run_dir)
    parse_json, read_file = reader.parse_json, reader.read_file
    config = parse_json(CONFIG_FILE, validate_recorded_run_json)
    summary = sft_summary = None
    if isinstance(config, SftRun):
        sft_summary = parse_json(SUMMARY_FILE, SftSummary.model_validate_json)
    else:
        summary = parse_json(SUMMARY_FILE, Summary.model_validate_json)
    chart = None
    if (run_dir / CHART_FILE).exists():
        chart = parse_json(CHART_FILE, PolicyChart.model_validate_json)
        chart = chart if chart and chart.cells else None
    metrics = read_file(METRICS_FILE, lambda: read_metrics(run_dir)) or []
    last_step = max((row.step for row in metrics if row.kind == "train"), default=0)
    any_summary = summary or sft_summary
    if any_summary is not None and any_summary.num_steps < last_step:
        reader.notices.append(
            f"{SUMMARY_FILE} is of step {any_summary.num_steps:,}, before the run was resumed, and "
            "is left out."
        )
        summary = sft_summary = None
    transcripts = read_file(TRANSCRIPTS_FILE, lambda: read_transcripts(run_dir)) or []
    traces = read_file(TRACE_FILE, lambda: read_traces(run_dir)) or []
    samples = read_file(SAMPLES_FILE, lambda: read_samples(run_dir)) or []
    return RunFiles(
        run_dir,
        config,
        summary,
        sft_summary,
        chart,
        metrics,
        transcripts,
        samples,
        reader.notices,
        traces,
    )


@dataclass(slots=True)
class _FileReader:
    """Reads the files of a run folder, and collects notices about those that it cannot read."""

    run_dir: Path
    notices: list[str] = field(default_factory=list)

    def parse_json(self, file_name: str, parse: Callable[[bytes], ValueT]) -> ValueT | None:
        """Return the parsed content of a file, or None with a notice."""
        return self.read_file(file_name, lambda: parse((self.run_dir / file_name).read_bytes()))

    def read_file(self, file_name: str, read: Callable[[], ValueT]) -> ValueT | None:
        """Return the result of `read`, which reads the file, or None with a notice."""
        try:
            return read()
        except FileNotFoundError:
            self.notices.append(f"{file_name} is missing.")
        except ValidationError as error:
            first_error = error.errors()[0]
            field_path = ".".join(str(key) for key in first_error["loc"]) or "the file"
            message = f"{file_name} cannot be read: {field_path}: {first_error['msg']}."
            self.notices.append(message)
        except OSError as error:
            self.notices.append(f"{file_name} cannot be read: {error.strerror}.")
        return None
