"""The local folder that receives the results of a run on a cluster.

before the run starts   check_new_folder, check_results_folder --> a ConfigError with a remedy
after the run           place_results: replaces the files of an earlier fetch of the same run
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ludus.proto.errors import ConfigError
from ludus.proto.runs import CONFIG_FILE, RUN_ID_FILE


class RunOrigin(BaseModel):
    """The name and the output folder of the run that wrote a configuration."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str = ""
    output_dir: str = ""


def check_new_folder(folder: Path, run: str) -> None:
    """Refuse a folder that cannot receive the results of a new run.

    Raises:
        ConfigError: the folder contains files, or cannot be written.
    """
    _check_writable(folder)
    if _has_files(folder):
        raise ConfigError(
            f"'{folder}' is not empty, so the results of run '{run}' would be mixed with its "
            f"files; choose another folder, for example --folder {suggest_folder(folder)}, or "
            "another name with --set name=..."
        )


def check_results_folder(folder: Path, origin: RunOrigin) -> None:
    """Refuse a folder that cannot receive the results of an existing run.

    Raises:
        ConfigError: the folder contains another run or other files, or cannot be written.
    """
    _check_writable(folder)
    local_origin = _read_origin(folder / CONFIG_FILE)
    if local_origin is None and _has_files(folder):
        raise ConfigError(f"'{folder}' is not empty and not the folder of a run; {_advise(folder)}")
    if local_origin not in (None, origin):
        raise _make_other_run_error(folder, f", from {_describe_source(local_origin)}")


def place_results(fetched_folder: Path, folder: Path) -> None:
    """Move fetched files to the local folder, where they replace those of an earlier fetch.

    Raises:
        ConfigError: the local folder contains another run or other files, or cannot be written.
    """
    check_results_folder(folder, _read_origin(fetched_folder / CONFIG_FILE) or RunOrigin())
    run_ids = [_read_text(path / RUN_ID_FILE) for path in (folder, fetched_folder)]
    if all(run_ids) and run_ids[0] != run_ids[1]:
        raise _make_other_run_error(folder, " of the same name")
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The configuration comes first: it marks the folder of a run if the move is interrupted.
        for path in sorted(fetched_folder.iterdir(), key=lambda path: path.name != CONFIG_FILE):
            destination = folder / path.name
            if destination.is_dir() and not destination.is_symlink():
                shutil.rmtree(destination)
            elif path.is_dir():
                destination.unlink(missing_ok=True)
            os.replace(path, destination)


def suggest_folder(folder: Path) -> Path:
    """Return an unused folder next to `folder`."""
    name = folder.resolve().name or "results"
    names = (f"{name}-{number}" for number in itertools.count(2))
    paths = (folder.with_name(name) if folder.name else Path(name) for name in names)
    return next(path for path in paths if not os.path.lexists(path))


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into ConfigErrors."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written ({error.strerror or error}); {_advise(folder)}"
        ) from error


def _check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be created or written; create nothing."""
    with explain_write_errors(folder):
        existing_path = folder.absolute()
        while not os.path.lexists(existing_path):
            existing_path = existing_path.parent
        if not existing_path.is_dir():
            raise ConfigError(f"'{existing_path}' is not a folder; choose another with --folder")
        # The files are unpacked next to the folder.
        paths = {existing_path, folder.absolute().parent} if folder.exists() else {existing_path}
        for path in paths:
            if not os.access(path, os.W_OK | os.X_OK):
                raise ConfigError(f"'{path}' cannot be written; choose another with --folder")


def _has_files(folder: Path) -> bool:
    with explain_write_errors(folder):
        return folder.is_dir() and any(folder.iterdir())


def _advise(folder: Path) -> str:
    return f"choose another folder, for example --folder {suggest_folder(folder)}"


def _make_other_run_error(folder: Path, description: str) -> ConfigError:
    return ConfigError(f"'{folder}' contains another run{description}; {_advise(folder)}")


def _describe_source(origin: RunOrigin | None) -> str:
    return (origin and origin.output_dir) or "this machine"


def _read_origin(path: Path) -> RunOrigin | None:
    try:
        return RunOrigin.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError):
        return RunOrigin()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
