"""Writes what a run leaves behind; `ludus.proto.runs` says what that is."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from ludus.proto.config import RunConfig
from ludus.proto.errors import ConfigError
from ludus.proto.runs import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    EvalReport,
    MetricsRow,
    Phase,
    read_metrics,
)
from ludus.trainer.metrics import eval_values


class RunFolder:
    """The folder of one run, open for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS_FOLDER
        self._metrics = (path / METRICS_FILE).open("a", encoding="utf-8", buffering=1)
        self._clock_start: float | None = None
        self._elapsed_before_s = 0.0

    @classmethod
    def create(cls, run: RunConfig, *, overwrite: bool) -> RunFolder:
        """A new run's folder.

        Raises:
            ConfigError: it holds a run already.
        """
        path = Path(run.output_dir) / run.name
        if path.exists() and any(path.iterdir()):
            cls._clear(path, overwrite=overwrite)
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / CONFIG_FILE, run.model_dump_json(indent=2))
        return cls(path)

    @staticmethod
    def _clear(path: Path, *, overwrite: bool) -> None:
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(
                f"'{path}' is not empty and not the folder of a run; take another name or "
                "output_dir"
            )
        if any(path.glob(f"{CHECKPOINTS_FOLDER}/step-*")) and not overwrite:
            raise ConfigError(
                f"'{path}' holds a run already; go on with --resume, replace it with "
                "--overwrite, or take another name"
            )
        shutil.rmtree(path)

    @classmethod
    def reopen(cls, run: RunConfig, step: int) -> RunFolder:
        """The folder of a run that goes on from `step`; rows of later steps are dropped."""
        path = Path(run.output_dir) / run.name
        rows = [row for row in read_metrics(path) if row.step <= step]
        write_atomically(path / METRICS_FILE, "".join(row.model_dump_json() + "\n" for row in rows))
        write_atomically(path / CONFIG_FILE, run.model_dump_json(indent=2))
        folder = cls(path)
        folder._elapsed_before_s = max((row.elapsed_s for row in rows), default=0.0)
        return folder

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, evaluations in between included."""
        running = 0.0 if self._clock_start is None else time.monotonic() - self._clock_start
        return self._elapsed_before_s + running

    def start_clock(self) -> None:
        """Nothing; training begins now."""
        self._clock_start = time.monotonic()

    def stop_clock(self) -> None:
        """Nothing; training has ended."""
        self._elapsed_before_s, self._clock_start = self.elapsed_s, None

    def phase(self, phase: Phase, step: int = 0) -> None:
        """Nothing; says what the run turns to."""
        logging.getLogger(__name__).info("phase %s, step %d", phase, step)
        self._write(
            MetricsRow(
                kind="phase", step=step, phase=phase, elapsed_s=self.elapsed_s, num_games_trained=0
            )
        )

    def trained(self, step: int, num_games_trained: int, values: Mapping[str, float]) -> None:
        """Nothing; appends a training step's row."""
        self._write(self._row("train", step, num_games_trained, values))

    def evaluated(self, step: int, num_games_trained: int, report: EvalReport) -> None:
        """Nothing; appends an evaluation's row."""
        self._write(self._row("eval", step, num_games_trained, eval_values(report)))

    def record(self, name: str, record: BaseModel) -> None:
        """Nothing; writes a file of the folder as a whole or not at all."""
        write_atomically(self.path / name, record.model_dump_json(indent=2))

    def discard(self) -> None:
        """Nothing; the folder is gone."""
        self.close()
        shutil.rmtree(self.path)

    def close(self) -> None:
        """Nothing; closes the files."""
        self._metrics.close()

    def _row(
        self,
        kind: Literal["train", "eval"],
        step: int,
        num_games_trained: int,
        values: Mapping[str, float],
    ) -> MetricsRow:
        return MetricsRow(
            kind=kind,
            step=step,
            elapsed_s=self.elapsed_s,
            num_games_trained=num_games_trained,
            values={str(name): float(value) for name, value in values.items()},
        )

    def _write(self, row: MetricsRow) -> None:
        self._metrics.write(row.model_dump_json(exclude_defaults=True) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Nothing; a reader sees the old file or the new one, never a part."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def log_to(path: Path, level: str) -> None:
    """Nothing; this process logs to a run's folder."""
    logging.basicConfig(
        filename=path / LOG_FILE,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
