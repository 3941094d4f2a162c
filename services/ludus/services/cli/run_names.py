"""Runs that a user names by their folder, or by their name in runs/."""

from __future__ import annotations

import difflib
from pathlib import Path

from ludus.proto.errors import NotFoundError
from ludus.proto.paths import parse_path

RUNS_FOLDER = Path("runs")
_NUM_SHOWN_NAMES = 5


def find_run_folder(run: str, parent: Path = RUNS_FOLDER) -> Path:
    """Return the folder of a run.

    Raises:
        NotFoundError: there is no such run.
    """
    from ludus.services.report.run_list import is_run_folder

    for folder in (parse_path(run), parent / run):
        if is_run_folder(folder):
            return folder
    raise NotFoundError(explain_missing_run(run, parent))


def explain_missing_run(run: str, parent: Path) -> str:
    """Return a message that names the runs in a folder that the user may have meant."""
    from ludus.services.report.run_list import list_run_folders

    names = [folder.name for folder in list_run_folders(parent)]
    similar_names = difflib.get_close_matches(Path(run).name, names, n=3)
    similar_names = similar_names or names[:_NUM_SHOWN_NAMES]
    if not similar_names:
        return f"there is no run '{run}'; name the folder of a run, or a run in '{parent}'"
    return f"there is no run '{run}'; '{parent}' has {', '.join(similar_names)}"
