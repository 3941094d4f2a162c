"""`ludus scale`: changes the number of rollout workers of a running run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.proto.errors import ConfigError
from ludus.proto.runs import CONTROL_FILE, RunControl
from ludus.services.cli.console import print_line, results_console
from ludus.services.cli.train_command import read_run_config

if TYPE_CHECKING:
    from ludus.proto.config import LanguageModelRun


def scale(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, for example runs/demo.")
    ],
    workers: Annotated[int, typer.Option(min=1, help="New number of rollout workers.")],
) -> None:
    """Change the number of rollout workers of a run on this machine while it trains.

    Additional workers join when they are ready; surplus workers finish their episodes first. The
    number is kept when the run is resumed.

    Example: `ludus scale runs/demo --workers 3`
    """
    from ludus.proto.config import require_language_model

    _check_worker_count(require_language_model(read_run_config(run_dir), "ludus scale"), workers)
    _write(run_dir / CONTROL_FILE, RunControl(num_workers=workers))
    print_line(results_console(), f"{run_dir}: requested {workers} rollout workers")


def _check_worker_count(run: LanguageModelRun, workers: int) -> None:
    """Refuse a number of workers that the run cannot have.

    Raises:
        ConfigError: the number is too small or too large for the run.
    """
    from ludus.proto.config import LocalEnvironment

    rollout = run.rollout
    if workers < rollout.min_workers:
        raise ConfigError(
            f"--workers must be at least rollout.min_workers = {rollout.min_workers}, got {workers}"
        )
    num_sessions = workers * rollout.num_groups_in_flight * rollout.group_size
    for name, environment in run.environments.items():
        if isinstance(environment, LocalEnvironment) and num_sessions > environment.max_sessions:
            field = f"{run.environment_section(name)}.max_sessions"
            raise ConfigError(
                f"{workers} workers need num_groups_in_flight * group_size = {num_sessions} "
                f"concurrent sessions, but {field} = {environment.max_sessions}; start the run "
                f"with --set {field}={num_sessions}"
            )


def _write(path: Path, control: RunControl) -> None:
    """Replace the control file atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(control.model_dump_json(indent=2), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"'{path}' cannot be written ({error.strerror or error}); the number of workers is "
            "unchanged"
        ) from error
