"""`ludus scale`: change the number of rollout workers of a run while it trains."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.runs import CONTROL_FILE, RunControl
from ludus.services.cli.console import get_stdout, print_line
from ludus.services.cli.options import Context, Namespace, Run, run_until_signal
from ludus.services.cli.run_names import RUNS_FOLDER, explain_missing_run, find_run_folder
from ludus.services.cli.train_command import read_run_config

if TYPE_CHECKING:
    from ludus.proto.config import LanguageModelRun


def scale(
    run: Run,
    num_workers: Annotated[
        int, typer.Option("--workers", min=1, help="New number of rollout workers.")
    ],
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Change the number of rollout workers of a run while it trains.

    A run that is not in runs/, or is named with --namespace or --context, is looked up on the
    cluster. Additional workers join when they are ready; surplus workers finish their episodes
    first. The number is kept when the run is resumed.

    Example: `ludus scale demo --workers 3`
    """
    folder = None if namespace or context else _find_local_folder(run)
    if folder is None:
        run_until_signal(_scale_on_cluster(run, num_workers, namespace, context))
    else:
        _scale_folder(folder, num_workers)
    print_line(get_stdout(), f"{folder or run}: requested {num_workers} rollout workers")


def _find_local_folder(run: str) -> Path | None:
    """Return the folder of a run on this machine; None for a name that may be on a cluster.

    Raises:
        NotFoundError: a path was given, and it is not the folder of a run.
    """
    try:
        return find_run_folder(run)
    except NotFoundError:
        if "/" in run:
            raise
        return None


def _scale_folder(folder: Path, num_workers: int) -> None:
    from ludus.proto.config import require_language_model

    _check_num_workers(require_language_model(read_run_config(folder), "ludus scale"), num_workers)
    path = folder / CONTROL_FILE
    temporary_path = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        temporary_path.write_text(RunControl(num_workers=num_workers).model_dump_json(indent=2))
        temporary_path.replace(path)
    except OSError as error:
        temporary_path.unlink(missing_ok=True)
        raise ConfigError(
            f"'{path}' cannot be written ({error.strerror or error}); the number of workers is "
            "unchanged"
        ) from error


async def _scale_on_cluster(run: str, num_workers: int, namespace: str, context: str) -> None:
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connect_cluster

    async with AsyncExitStack() as stack:
        try:
            cluster = await stack.enter_async_context(connect_cluster(context, namespace))
        except ConfigError as error:
            if namespace or context:
                raise
            raise NotFoundError(f"{explain_missing_run(run, RUNS_FOLDER)}; {error}") from None
        await operations.scale(cluster, run, num_workers)


def _check_num_workers(run: LanguageModelRun, num_workers: int) -> None:
    """Refuse a number of workers that the run cannot have."""
    rollout = run.rollout
    if num_workers < rollout.min_workers:
        raise ConfigError(
            f"--workers must be at least rollout.min_workers = {rollout.min_workers}, got"
            f" {num_workers}"
        )
    num_sessions = num_workers * rollout.num_groups_in_flight * rollout.group_size
    for name, environment in run.environments.items():
        if environment.kind == "local" and num_sessions > environment.max_sessions:
            field_path = f"{run.environment_section(name)}.max_sessions"
            raise ConfigError(
                f"{num_workers} workers play num_groups_in_flight * group_size = "
                f"{num_sessions // num_workers} sessions each, {num_sessions} together, but "
                f"{field_path} = {environment.max_sessions}; restart the run with "
                f"--set {field_path}={num_sessions}"
            )
