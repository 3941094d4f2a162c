"""The results of a run from the cluster's volume to a folder here.

The folder is packed there (`tar`, by Python: an image need not have the program), comes through
pods/exec, and is unpacked beside its destination before anything there is replaced.
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
from ludus.services.kubernetes.exec import stream_command_output
from ludus.services.runs.cluster import RunsCluster
from ludus.services.runs.platform import Release
from ludus.services.runs.reader import Place, reading_place

LARGE = (CHECKPOINTS_FOLDER, "initial_model", "weights")
"""What stays there unless all is wanted."""
_NO_FOLDER = "there is no folder "
_PACK = f"""
import pathlib, sys, tarfile
folder, left = pathlib.Path(sys.argv[1]), set(sys.argv[2:])
if not folder.is_dir():
    sys.exit("{_NO_FOLDER}" + str(folder))
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|gz") as archive:
    for path in sorted(folder.iterdir()):
        if path.name not in left and not path.name.endswith(".partial"):
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
    """Bring what a run left into a folder here.

    Args:
        with_checkpoints: fetch checkpoints and models, too.

    Raises:
        NotFoundError: the run has left nothing.
        ConfigError: the folder holds another run.
        ClusterError: it cannot be read.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    left = () if with_checkpoints else LARGE
    with (
        tempfile.TemporaryFile() as packed,
        tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside,
    ):
        async with reading_place(cluster, release, run) as place:
            await _receive(cluster, place, run, left, packed)
        packed.seek(0)
        _unpack(packed, Path(aside))
        _refuse_another_run(Path(aside), folder)
        _move(Path(aside), folder)


async def read_log(cluster: RunsCluster, release: Release, run: str) -> str:
    """What the run's driver has logged into its folder.

    Raises:
        NotFoundError: there is no such log.
        ClusterError: it cannot be read.
    """
    async with reading_place(cluster, release, run) as place:
        path = f"{place.output_dir}/{run}/{LOG_FILE}"
        parts = stream_command_output(
            cluster.api,
            cluster.namespace,
            place.pod,
            place.container,
            ("python", "-c", _SHOW, path),
        )
        try:
            async with aclosing(parts) as stream:
                return b"".join([part async for part in stream]).decode(errors="replace")
        except ClusterError as error:
            if "No such file" not in error.message:
                raise
            raise NotFoundError(f"run '{run}' has no log at {path}") from None


async def _receive(
    cluster: RunsCluster, place: Place, run: str, left: tuple[str, ...], packed: IO[bytes]
) -> None:
    path = f"{place.output_dir}/{run}"
    command = ("python", "-c", _PACK, path, *left)
    stream = stream_command_output(
        cluster.api, cluster.namespace, place.pod, place.container, command
    )
    try:
        async with aclosing(stream) as parts:
            async for part in parts:
                packed.write(part)
    except ClusterError as error:
        if _NO_FOLDER not in error.message:
            raise
        raise NotFoundError(
            f"run '{run}' has left nothing at {path} of the cluster's volume; see: ludus status "
            f"{run}"
        ) from None


def _unpack(packed: IO[bytes], folder: Path) -> None:
    try:
        with tarfile.open(fileobj=packed, mode="r|gz") as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ClusterError(f"what came from the cluster cannot be unpacked: {error}") from error


class _Origin(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str = ""
    output_dir: str = ""


def _refuse_another_run(come: Path, folder: Path) -> None:
    """A run of this machine may have the same name: its results are not replaced."""
    there, here = _origin(come / CONFIG_FILE), _origin(folder / CONFIG_FILE)
    if here is not None and here != there:
        raise ConfigError(
            f"'{folder}' holds another run, one of {here.output_dir or 'this machine'}; name "
            "another folder with --folder"
        )


def _origin(path: Path) -> _Origin | None:
    try:
        return _Origin.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return _Origin()


def _move(come: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in come.iterdir():
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
