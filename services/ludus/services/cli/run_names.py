"""Runs that a user names by their folder, or by their name in runs/, and their checkpoints."""

from __future__ import annotations

import difflib
from pathlib import Path

from ludus.proto.errors import NotFoundError
from ludus.proto.paths import describe_place, parse_path
from ludus.services.cli.checkpoint_names import find_checkpoint

RUNS_FOLDER = Path("runs")
_NUM_SHOWN_NAMES = 5


def find_run_folder(run: str) -> Path:
    """Return the folder of a run.

    Raises:
        NotFoundError: there is no such run.
    """
    from ludus.services.run_list import is_run_folder

    path = parse_path(run)
    for folder in (path, RUNS_FOLDER / run):
        if is_run_folder(folder):
            return folder
    parent = path.parent if "/" in run and path.parent.is_dir() else RUNS_FOLDER
    raise NotFoundError(explain_missing_run(run, parent))


def explain_missing_run(run: str, parent: Path) -> str:
    """Return a message that names the runs in a folder that the user may have meant."""
    from ludus.services.run_list import list_run_folders

    names = [folder.name for folder in list_run_folders(parent)]
    similar_names = difflib.get_close_matches(Path(run).name, names, n=3)
    similar_names = similar_names or names[:_NUM_SHOWN_NAMES]
    if not similar_names:
        return (
            f"there is no run '{run}'{describe_place(run)}; name the folder of a run, or a run in "
            f"'{parent}'"
        )
    return f"there is no run '{run}'; '{parent}' has {', '.join(similar_names)}"


def split_run_step(text: str) -> tuple[Path, Path | None]:
    """Return the run and the checkpoint that RUN, RUN@STEP, RUN@latest or RUN@best names.

    The checkpoint is None for RUN alone, and for the best model that a fine-tuning run keeps.

    Raises:
        NotFoundError: there is no such run or checkpoint.
    """
    name, separator, checkpoint_name = text.rpartition("@")
    if not separator or "/" in checkpoint_name:
        return find_run_folder(text), None
    folder = find_run_folder(name)
    return folder, find_checkpoint(folder, checkpoint_name)
