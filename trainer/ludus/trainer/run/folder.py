"""Writes what a run leaves behind; `ludus.proto.runs` says what that is."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel

from ludus.env.types import JsonObject
from ludus.proto.config import LanguageModelRun, RunConfig
from ludus.proto.errors import ConfigError
from ludus.proto.metrics import TrainMetric
from ludus.proto.run_lock import LOCK_FILE, RunLock
from ludus.proto.runs import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    RUN_ID_FILE,
    TRANSCRIPTS_FILE,
    EvalReport,
    HeldWeights,
    MetricsRow,
    Phase,
    RowKind,
    Transcript,
    read_metrics,
    read_transcripts,
)
from ludus.trainer.core.disk import partial_path, write_atomically
from ludus.trainer.run.metrics import StepValues, delivery_values, eval_values, held_weights
from ludus.trainer.run.sinks import Sinks, open_sinks
from ludus.trainer.weights import WorkerWeights

_log = logging.getLogger(__name__)


def path_of(run: RunConfig) -> Path:
    """The folder of a run: absolute, so that processes elsewhere mean the same one."""
    return Path(run.output_dir).absolute() / run.name


def run_id(path: Path) -> str:
    """What tells the run of a folder from others of its name; made where there is none yet.

    It outlives a resume, and a run that takes the folder over: what the one has left elsewhere is
    the other's to remove.
    """
    file = path / RUN_ID_FILE
    if not file.exists():
        write_atomically(file, new_run_id())
    return file.read_text(encoding="utf-8")


def new_run_id() -> str:
    """An id that no run has."""
    return os.urandom(6).hex()


class RunFolder:
    """The folder of one run, open for writing.

    controller --trained, evaluated, delivered, phase--> MetricsRow --+-- metrics.jsonl
                                                                      +-- sinks
    """

    def __init__(self, run: RunConfig, lock: RunLock, *, resume_from: int | None = None) -> None:
        self.path = path_of(run)
        self._lock = lock
        self.checkpoints = self.path / CHECKPOINTS_FOLDER
        self._run = run
        self._resume_from = resume_from
        self._open_files()
        self._sinks = Sinks([])
        self._clock_start: float | None = None
        self._elapsed_before_s = 0.0

    @classmethod
    def create(cls, run: RunConfig, *, overwrite: bool) -> RunFolder:
        """A new run's folder.

        Raises:
            ConfigError: it holds a run already, another process trains there, or it cannot be
                written.
        """
        path = path_of(run)
        with _writing(path), _locked(path) as lock:
            cls._clear(path, overwrite=overwrite)
            folder = cls(run, lock)
            folder.configure()
            return folder

    @staticmethod
    def _clear(path: Path, *, overwrite: bool) -> None:
        if not _entries(path):
            return
        config_path = path / CONFIG_FILE
        if not (config_path.is_file() or partial_path(config_path).is_file()):
            raise ConfigError(
                f"'{path}' is not empty and not the folder of a run; take another name or "
                "output_dir"
            )
        if any(path.glob(f"{CHECKPOINTS_FOLDER}/step-*")) and not overwrite:
            raise ConfigError(
                f"'{path}' holds a run already; continue with --resume, replace it with "
                "--overwrite, or take another name"
            )
        _empty(path)

    @classmethod
    def reopen(cls, run: RunConfig, step: int) -> RunFolder:
        """The folder of a run that continues from `step`; rows of later steps are dropped.

        Its configuration stays as it was until `configure`: the run may yet be refused.

        Raises:
            ConfigError: another process trains there, or it cannot be written.
        """
        path = path_of(run)
        with _writing(path), _locked(path) as lock:
            rows = _drop_rows_after(path, step)
            folder = cls(run, lock, resume_from=step)
        folder._elapsed_before_s = max((row.elapsed_s for row in rows), default=0.0)
        return folder

    def configure(self) -> None:
        """Write the configuration that the run has from now on."""
        write_atomically(self.path / CONFIG_FILE, self._run.model_dump_json(indent=2))

    def lasts(self, run: RunConfig) -> None:
        """Go on as the folder of `run`, which is the same but for the steps it takes."""
        self._run = run
        if self._resume_from is None:
            self.configure()

    def open_sinks(self, *, in_job_log: bool = False) -> None:
        """Open the sinks of the configuration: rows go there, too, from now on.

        Args:
            in_job_log: whether rows go to standard output as well.

        Raises:
            ConfigError: one of them cannot start as configured.
        """
        past = read_metrics(self.path)
        self._sinks = open_sinks(
            self._run,
            self.path,
            resume_from=self._resume_from,
            past=past,
            job_log=sys.stdout if in_job_log else None,
        )

    def connected(self, options: Mapping[str, JsonObject]) -> None:
        """Tell the sinks what each environment, by its name, was built with."""
        self._sinks.connected(options)

    def rewind(self, step: int) -> None:
        """Go back to `step`: rows of later steps are dropped."""
        self._close_files()
        _drop_rows_after(self.path, step)
        self._open_files()
        self._sinks.rewind(step)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, evaluations in between included."""
        running = 0.0 if self._clock_start is None else time.monotonic() - self._clock_start
        return self._elapsed_before_s + running

    def start_clock(self) -> None:
        """Start the clock: training begins now."""
        self._clock_start = time.monotonic()

    def stop_clock(self) -> None:
        """Stop the clock: training has ended."""
        self._elapsed_before_s, self._clock_start = self.elapsed_s, None

    def phase(self, phase: Phase, step: int = 0) -> None:
        """Say what the run turns to."""
        _log.info("phase %s, step %d", phase, step)
        # Passes over data become steps once the environment has said how much there is.
        counts_epochs = (
            isinstance(self._run, LanguageModelRun) and self._run.training.num_epochs is not None
        )
        is_known = not counts_epochs or phase is not Phase.START_ENVIRONMENT
        num_steps = self._run.training.num_steps if is_known else None
        self._append("phase", step, phase=phase, num_steps=num_steps)

    def trained(self, step: int, num_games_trained: int, values: StepValues) -> None:
        """Append a training step's rows: the whole, then each environment's."""
        self._append("train", step, values.run, num_games_trained=num_games_trained)
        for name, environment_values in values.environments.items():
            self._append(
                "environment",
                step,
                environment_values,
                num_games_trained=num_games_trained,
                environment=name,
            )

    def said(self, step: int, transcripts: Iterable[Transcript]) -> tuple[Transcript, ...]:
        """The transcripts as those of a training step, which are appended."""
        of_step = tuple(one.model_copy(update={"step": step}) for one in transcripts)
        for one in of_step:
            self._transcripts.write(one.model_dump_json() + "\n")
        return of_step

    def evaluated(
        self, step: int, num_games_trained: int, environment: str, report: EvalReport
    ) -> None:
        """Append the rows of an evaluation in one environment."""
        values = eval_values(report.policy, report.gap_closed)
        self._append(
            "eval", step, values, num_games_trained=num_games_trained, environment=environment
        )
        for policy, result in report.baselines.items():
            self._append(
                "baseline",
                step,
                eval_values(result),
                num_games_trained=num_games_trained,
                environment=environment,
                policy=policy,
            )

    def delivered(self, step: int, weights: Mapping[int, WorkerWeights]) -> None:
        """Append a row of what each worker, by its number, samples from now."""
        held = tuple(held_weights(worker, weights[worker]) for worker in sorted(weights))
        values = delivery_values(list(weights.values()))
        self._append("weights", step, values, weights=held)

    def happened(self, step: int, metric: TrainMetric) -> None:
        """Append a row that counts one of what `metric` counts."""
        self._append("event", step, {metric: 1})

    def opened(self, step: int, num_games_trained: int, environment: str) -> None:
        """Append a row that the curriculum has opened an environment."""
        _log.info("step %d: the curriculum opens environment '%s'", step, environment)
        self._append(
            "event",
            step,
            {TrainMetric.NUM_UNLOCKS: 1},
            num_games_trained=num_games_trained,
            environment=environment,
        )

    def saved(self, step: int, duration_s: float) -> None:
        """Append a row of a checkpoint that is written, and how long training stood still."""
        values: dict[str, float] = {
            TrainMetric.NUM_CHECKPOINTS: 1,
            TrainMetric.CHECKPOINT_S: duration_s,
        }
        self._append("event", step, values)

    def record(self, name: str, record: BaseModel) -> None:
        """Write a file of the folder as a whole or not at all."""
        write_atomically(self.path / name, record.model_dump_json(indent=2))

    def discard(self) -> None:
        """Remove the folder."""
        self._close_all()
        _empty(self.path)
        (self.path / RUN_ID_FILE).unlink(missing_ok=True)
        self._lock.release()
        with suppress(OSError):  # another run of this name begins already
            self.path.rmdir()

    def close(self) -> None:
        """Close files and sinks; others may write into the folder from now on."""
        self._close_all()
        self._lock.release()

    def _close_all(self) -> None:
        self._sinks.close()
        self._close_files()

    def _open_files(self) -> None:
        self._metrics = _open_for_lines(self.path / METRICS_FILE)
        self._transcripts = _open_for_lines(self.path / TRANSCRIPTS_FILE)

    def _close_files(self) -> None:
        self._metrics.close()
        self._transcripts.close()

    def _append(
        self,
        kind: RowKind,
        step: int,
        values: Mapping[str, float] | None = None,
        *,
        num_games_trained: int = 0,
        environment: str | None = None,
        policy: str | None = None,
        phase: Phase | None = None,
        num_steps: int | None = None,
        weights: tuple[HeldWeights, ...] = (),
    ) -> None:
        self._write(
            MetricsRow(
                kind=kind,
                step=step,
                environment=environment,
                policy=policy,
                phase=phase,
                num_steps=num_steps,
                weights=weights,
                elapsed_s=self.elapsed_s,
                num_games_trained=num_games_trained,
                values={str(name): float(value) for name, value in (values or {}).items()},
            )
        )

    def _write(self, row: MetricsRow) -> None:
        self._metrics.write(row.model_dump_json(exclude_defaults=True) + "\n")
        self._sinks.write(row)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Says which folder it is that cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run's folder '{path}' cannot be written ({error.strerror or error}); set "
            "output_dir to a folder that can be"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[RunLock]:
    """The lock of a folder, which is made; free again, and the folder as it was, after an error."""
    path.mkdir(parents=True, exist_ok=True)
    lock = RunLock.take(path)
    try:
        yield lock
    except BaseException:
        lock.release()
        with suppress(OSError):
            path.rmdir()
        raise


def _entries(path: Path) -> list[Path]:
    """What is in a folder beside its lock and its id."""
    return [entry for entry in path.iterdir() if entry.name not in (LOCK_FILE, RUN_ID_FILE)]


def _empty(path: Path) -> None:
    """Remove what is in a run's folder; one that is left half empty is still known as a run's."""
    for entry in sorted(_entries(path), key=lambda entry: entry.name == CONFIG_FILE):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _open_for_lines(path: Path) -> TextIO:
    # Line by line: whoever follows the file sees whole rows.
    return path.open("a", encoding="utf-8", buffering=1)


def _drop_rows_after(path: Path, step: int) -> list[MetricsRow]:
    """The rows of metrics.jsonl that stay; transcripts of later steps go, too."""
    rows = [row for row in read_metrics(path) if row.step <= step]
    text = "".join(row.model_dump_json(exclude_defaults=True) + "\n" for row in rows)
    write_atomically(path / METRICS_FILE, text)
    transcripts = [one for one in read_transcripts(path) if one.step <= step]
    text = "".join(one.model_dump_json() + "\n" for one in transcripts)
    write_atomically(path / TRANSCRIPTS_FILE, text)
    return rows


@contextmanager
def logging_to(path: Path, level: str) -> Iterator[None]:
    """Log to a run's folder, too.

    A program that has set up its logging keeps it, and what it lets through is what is logged.
    """
    handler = logging.FileHandler(path / LOG_FILE, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level_before = root.level
    if not root.handlers:
        root.setLevel(level.upper())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level_before)
        handler.close()
