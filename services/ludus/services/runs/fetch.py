"""Copies the results of a run from the cluster's volume to a local folder.

A pod packs the folder as a tar stream, in Python, because an image may lack the `tar` program. The
stream arrives through pods/exec and is unpacked next to its destination before anything there is
replaced.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from ludus.proto.errors import ClusterError, ConfigError, NotFoundError
from ludus.proto.runs import CHECKPOINTS_FOLDER, CONFIG_FILE, LOG_FILE
from ludus.services.runs.cluster import RunsCluster
from ludus.services.runs.platform import Release
from ludus.services.runs.reader import VolumeReader, open_reader

LARGE = (CHECKPOINTS_FOLDER, "initial_model", "weights")
"""Subfolders that are fetched on request only."""
_NO_FOLDER = "there is no folder "
_PACK = f"""
import pathlib, sys, tarfile
folder, excluded = pathlib.Path(sys.argv[1]), set(sys.argv[2:])
if not folder.is_dir():
    sys.exit("{_NO_FOLDER}" + str(folder))
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|gz") as archive:
    for path in sorted(folder.iterdir()):
        if path.name not in excluded and not path.name.endswith(".partial"):
            archive.add(path, arcname=path.name)
"""
_SHOW = """
import pathlib, shutil, sys
with pathlib.Path(sys.argv[1]).open("rb") as file:
    shutil.copyfileobj(file, sys.stdout.buffer)
"""


async def fetch(
    cluster: RunsCluster,
    release: Release,
    run: str,
    folder: Path,
    *,
    with_checkpoints: bool = False,
) -> None:
    """Copy the results of a run to a local folder.

    Args:
        with_checkpoints: fetch checkpoints and models, too.

    Raises:
        NotFoundError: the run has no folder on the volume.
        ConfigError: the local folder contains another run.
        ClusterError: the volume cannot be read.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    excluded = () if with_checkpoints else LARGE
    with (
        tempfile.TemporaryFile() as archive,
        tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unpacked,
    ):
        async with open_reader(cluster, release, run) as reader:
            await _receive(cluster, reader, run, excluded, archive)
        archive.seek(0)
        _unpack(archive, Path(unpacked))
        _refuse_another_run(Path(unpacked), folder)
        _move(Path(unpacked), folder)


async def read_log(cluster: RunsCluster, release: Release, run: str) -> str:
    """Return the driver's log from the run folder.

    Raises:
        NotFoundError: there is no log.
        ClusterError: the volume cannot be read.
    """
    async with open_reader(cluster, release, run) as reader:
        path = f"{reader.output_dir}/{run}/{LOG_FILE}"
        output = cluster.api.command_output(
            cluster.namespace, reader.pod, reader.container, ("python", "-c", _SHOW, path)
        )
        try:
            async with aclosing(output) as chunks:
                return b"".join([chunk async for chunk in chunks]).decode(errors="replace")
        except ClusterError as error:
            if "No such file" not in error.message:
                raise
            raise NotFoundError(f"run '{run}' has no log at {path}") from None


async def _receive(
    cluster: RunsCluster,
    reader: VolumeReader,
    run: str,
    excluded: tuple[str, ...],
    archive: IO[bytes],
) -> None:
    path = f"{reader.output_dir}/{run}"
    command = ("python", "-c", _PACK, path, *excluded)
    output = cluster.api.command_output(cluster.namespace, reader.pod, reader.container, command)
    try:
        async with aclosing(output) as chunks:
            async for chunk in chunks:
                archive.write(chunk)
    except ClusterError as error:
        if _NO_FOLDER not in error.message:
            raise
        raise NotFoundError(
            f"run '{run}' has no folder {path} on the cluster's volume; see: ludus status {run}"
        ) from None


def _unpack(archive: IO[bytes], folder: Path) -> None:
    try:
        with tarfile.open(fileobj=archive, mode="r|gz") as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ClusterError(f"the archive from the cluster cannot be unpacked: {error}") from error


class _Origin(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str = ""
    output_dir: str = ""


def _refuse_another_run(fetched: Path, folder: Path) -> None:
    """Refuse to replace the results of a different run that has the same name."""
    remote, local = _read_origin(fetched / CONFIG_FILE), _read_origin(folder / CONFIG_FILE)
    if local is not None and local != remote:
        raise ConfigError(
            f"'{folder}' contains another run, from {local.output_dir or 'this machine'}; choose "
            "another folder with --folder"
        )


def _read_origin(path: Path) -> _Origin | None:
    try:
        return _Origin.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return _Origin()


def _move(fetched: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in fetched.iterdir():
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
