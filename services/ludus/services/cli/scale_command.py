"""`ludus scale`: says how many rollout workers a run shall have, while it continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.proto.errors import ConfigError
from ludus.proto.runs import CONTROL_FILE, RunControl
from ludus.services.cli.console import results_console, say
from ludus.services.cli.train_command import config_of_run

if TYPE_CHECKING:
    from ludus.proto.config import LanguageModelRun


def scale(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, for example runs/demo.")
    ],
    workers: Annotated[int, typer.Option(min=1, help="Rollout workers that it shall have.")],
) -> None:
    """Change the number of rollout workers of a run while it continues.

    More join when they are ready; those that leave end what they play. It holds, too, when the
    run is stopped and resumed.

    Example: `ludus scale runs/demo --workers 3`
    """
    from ludus.proto.config import require_language_model

    _check(require_language_model(config_of_run(run_dir), "ludus scale"), workers)
    _write(run_dir / CONTROL_FILE, RunControl(num_workers=workers))
    say(results_console(), f"{run_dir}: {workers} rollout workers are wanted")


def _check(run: LanguageModelRun, workers: int) -> None:
    """Refuse more workers, or fewer, than the run can have.

    Raises:
        ConfigError: it cannot have so many.
    """
    from ludus.proto.config import LocalEnvironment

    rollout = run.rollout
    if workers < rollout.min_workers:
        raise ConfigError(
            f"--workers expected at least rollout.min_workers = {rollout.min_workers}, got "
            f"{workers}; stop the run to have none"
        )
    wanted = workers * rollout.num_groups_in_flight * rollout.group_size
    for name, environment in run.environments.items():
        if isinstance(environment, LocalEnvironment) and wanted > environment.max_sessions:
            raise ConfigError(
                f"--workers {workers} play num_groups_in_flight * group_size = {wanted} sessions "
                f"at once, but {run.section_of(name)}.max_sessions = {environment.max_sessions}; "
                f"begin the run with --set {run.section_of(name)}.max_sessions={wanted}"
            )


def _write(path: Path, control: RunControl) -> None:
    """Replace the file: a reader sees the old one or the new one, never a part.

    Raises:
        ConfigError: it cannot be written.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        aside.write_text(control.model_dump_json(indent=2), encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(
            f"'{path}' cannot be written ({error.strerror or error}); the run has as many workers "
            "as before"
        ) from error
