"""`ludus runs` and `ludus runs rm`: the runs in a folder, and those on a cluster."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ludus.env.text.terminal import clean_for_terminal
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import expand_home
from ludus.proto.run_lock import LOCK_FILE, RunLock, is_in_use
from ludus.proto.runs import CONFIG_FILE, METRICS_FILE
from ludus.proto.wording import choose_wording
from ludus.services.cli import options
from ludus.services.cli.console import (
    get_stderr,
    get_stdout,
    make_table,
    print_line,
    show_activity,
    write_json,
)
from ludus.services.cli.run_names import RUNS_FOLDER, explain_missing_run
from ludus.services.numbers import (
    NO_VALUE,
    format_fixed,
    format_percent,
    format_size,
)

if TYPE_CHECKING:
    from ludus.services.run_list import ListedRun, RunResult

app = typer.Typer(invoke_without_command=True)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="FOLDER",
        help="Folder that contains the runs.",
        show_default=str(RUNS_FOLDER),
        callback=expand_home,
    ),
]


@app.callback()
def list_runs(
    invocation: typer.Context,
    folder: Folder = None,
    prints_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document per run.")
    ] = False,
    is_local: Annotated[
        bool, typer.Option("--local", help="List only the runs on this machine.")
    ] = False,
    namespace: options.Namespace = "",
    context: options.Context = "",
) -> None:
    """List the runs on this machine and on the cluster, the latest first, or delete local runs.

    The cluster is that of the current Kubernetes context, if there is one. If the cluster does not
    respond within seconds, the list has only the local runs.

    The result is that of the latest evaluation in the first environment, with half the width of its
    95 % interval; for a finished fine-tuning run, the validation loss of its model.

    Example: `ludus runs`

    Example: `ludus runs rm demo`
    """
    invocation.obj = folder
    if invocation.invoked_subcommand is not None:
        if prints_json or is_local or namespace or context:
            raise ConfigError(
                "--json, --local, --namespace and --context are for the list of runs; remove them"
            )
        return
    from ludus.services.run_list import list_run_folders, read_listed_run

    if is_local and (namespace or context):
        raise ConfigError("--namespace and --context choose a cluster; remove them, or --local")
    folder = folder or RUNS_FOLDER
    runs = list(map(read_listed_run, list_run_folders(folder)))
    cluster_runs = None if is_local else _find_cluster_runs(context, namespace)
    runs += cluster_runs or []
    runs.sort(key=lambda run: run.changed_s, reverse=True)
    if prints_json:
        for run in runs:
            write_json(run.model_dump_json())
    elif runs:
        _print_table(runs)
    else:
        searched_text = f"'{folder}'" if cluster_runs is None else f"'{folder}' or on the cluster"
        print_line(get_stderr(), f"no runs in {searched_text}; --folder names another folder")


def _find_cluster_runs(context: str, namespace: str) -> list[ListedRun] | None:
    """Return the runs on the cluster; None without a cluster, or if it does not respond."""
    from ludus.services.kubernetes.access import has_current_context

    if not (context or namespace or has_current_context()):
        return None
    from ludus.services.cli.cluster_run_list import read_cluster_runs

    with show_activity(get_stderr()) as report:
        if get_stderr().is_terminal:
            report("reading the runs on the cluster")
        return read_cluster_runs(context, namespace)


@app.command("rm")
def remove(
    invocation: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of runs.")],
    folder: Folder = None,
    is_confirmed: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")
    ] = False,
) -> None:
    """Delete the folders of runs, with all checkpoints and models.

    Weights in a store outside the folder remain.

    Example: `ludus runs rm demo demo2`
    """
    from ludus.services.run_list import measure_folder

    parent = folder or invocation.obj or RUNS_FOLDER
    run_folders = [_find_run(name, parent) for name in dict.fromkeys(names)]
    size_text = format_size(sum(map(measure_folder, run_folders)))
    paths_text = clean_for_terminal(", ".join(f"'{path}'" for path in run_folders))
    if not is_confirmed:
        if not sys.stdin.isatty():
            raise ConfigError(f"this would delete {paths_text} ({size_text}); add --yes to confirm")
        typer.confirm(f"Delete {paths_text} ({size_text})?", abort=True, err=True)
    for path in run_folders:
        _delete_run(path)
        print_line(get_stdout(), f"deleted {path}")


def _find_run(name: str, parent: Path) -> Path:
    """Return the folder of a run that can be deleted."""
    from ludus.services.run_list import list_run_folders

    folder = parent / name
    # Only an entry of the folder can be deleted, so not `..` or a path.
    if not any(name == path.name for path in list_run_folders(parent)):
        raise NotFoundError(explain_missing_run(name, parent))
    if folder.is_symlink():
        raise ConfigError(
            f"'{folder}' is a link to '{folder.resolve()}'; remove the link or that folder yourself"
        )
    if is_in_use(folder):
        raise ConfigError(f"run '{name}' is training; stop it with Ctrl-C first")
    return folder


def _delete_run(folder: Path) -> None:
    """Delete a run's folder; until the end, it is still that of a run.

    Raises:
        ConfigError: a process trains in the folder, or it cannot be deleted.
    """
    try:
        lock = RunLock.take(folder)
        try:
            records = (METRICS_FILE, CONFIG_FILE, LOCK_FILE)
            for path in list(folder.iterdir()):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name not in records:
                    path.unlink()
            for name in records:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
        finally:
            lock.release()
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be deleted: {error.strerror or error} ('{error.filename}')"
        ) from error


def _print_table(runs: Sequence[ListedRun]) -> None:
    """Print a table of runs, with their location if some are on a cluster."""
    from ludus.services.run_list import Location

    has_location = any(run.location is not Location.LOCAL for run in runs)
    table = make_table(
        "run", *(["where"] if has_location else []),
        "environment", "model", "status", "step", "result", "±95%", "age", "size",
        number_columns=("step", "result", "±95%", "age", "size"),
    )  # fmt: skip
    table.columns[0].min_width = max(len(run.name) for run in runs)  # `rm` needs the whole name
    now_s = time.time()
    for run in runs:
        cells = (
            run.name,
            *([run.location] if has_location else []),
            NO_VALUE if run.environments is None else ", ".join(run.environments),
            NO_VALUE if run.model is None else run.model,
            run.status,
            f"{_format_count(run.step)}/{_format_count(run.num_steps)}",
            *_format_result(run.result),
            _format_age(now_s - run.changed_s),
            NO_VALUE if run.num_bytes is None else format_size(run.num_bytes),
        )
        table.add_row(*map(Text, cells))
    get_stdout().print(table)


def _format_count(count: int | None) -> str:
    return NO_VALUE if count is None else str(count)


def _format_result(result: RunResult | None) -> tuple[str, str]:
    """Return a result and the half-width of its interval."""
    if result is None:
        return NO_VALUE, NO_VALUE
    half_width = None if result.ci95 is None else (result.ci95[1] - result.ci95[0]) / 2
    if result.metric == "wins":
        success = choose_wording(result.is_game is not False).success
        return f"{format_percent(result.value)} {success}", format_percent(half_width)
    width_text = NO_VALUE if half_width is None else format_fixed(half_width, 3)
    return f"{result.metric} {format_fixed(result.value, 3)}", width_text


def _format_age(seconds: float) -> str:
    """Return an age in one unit: "12 s", "3 min", "5 h" or "9 days"."""
    for min_s, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * min_s:
            return f"{seconds / min_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
