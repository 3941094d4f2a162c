"""Access to the results of runs on the cluster's volume.

    head of the run, or a temporary pod  --pods/exec-->  tar stream  -->  local folder

The pod packs the folder with Python, because an image may not contain `tar`. The stream is unpacked
next to the local folder, whose files are replaced only afterwards.
"""

from __future__ import annotations

import asyncio
import copy
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from ludus.proto.errors import ClusterError, ConfigError, NotFoundError
from ludus.proto.runs import CHECKPOINTS_FOLDER, CONFIG_FILE, LOG_FILE
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.cluster import RunsCluster, is_head
from ludus.services.runs.manifest import get_head_template, get_pod_containers
from ludus.services.runs.names import RUN_LABEL, make_core_path
from ludus.services.runs.platform import Release
from ludus.services.runs.state import find_pod_troubles, read_state

LARGE_FOLDERS = (CHECKPOINTS_FOLDER, "initial_model", "weights")
"""Subfolders that are fetched only on request."""
START_TIMEOUT_S = 180.0
_READER_LIFETIME_S = 900
_POLL_INTERVAL_S = 0.5
_READER_RESOURCES = {"cpu": "100m", "memory": "256Mi"}
_COPIED_FIELDS = ("securityContext", "nodeSelector", "tolerations", "affinity", "imagePullSecrets")
_NO_FOLDER_MESSAGE = "there is no folder "
_PACK_SCRIPT = f"""
import pathlib, sys, tarfile
folder, excluded_names = pathlib.Path(sys.argv[1]), set(sys.argv[2:])
if not folder.is_dir():
    sys.exit("{_NO_FOLDER_MESSAGE}" + str(folder))
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|gz") as archive:
    for path in sorted(folder.iterdir()):
        if path.name not in excluded_names and not path.name.endswith(".partial"):
            archive.add(path, arcname=path.name)
"""
_PRINT_SCRIPT = """
import pathlib, shutil, sys
with pathlib.Path(sys.argv[1]).open("rb") as file:
    shutil.copyfileobj(file, sys.stdout.buffer)
"""


async def fetch(
    cluster: RunsCluster,
    release: Release,
    run: str,
    folder: Path,
    includes_checkpoints: bool = False,
) -> None:
    """Copy the results of a run to a local folder.

    Args:
        includes_checkpoints: fetch checkpoints and models, too.

    Raises:
        NotFoundError: the run has no folder on the volume.
        ConfigError: the local folder contains another run.
        ClusterError: the volume cannot be read.
    """
    path = f"{release.platform.output_dir}/{run}"
    excluded_names = () if includes_checkpoints else LARGE_FOLDERS
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary_folder = tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent)
    with tempfile.TemporaryFile() as archive, temporary_folder as unpacked_path:
        try:
            await _run_script(cluster, release, run, (_PACK_SCRIPT, path, *excluded_names), archive)
        except ClusterError as error:
            if _NO_FOLDER_MESSAGE not in error.message:
                raise
            raise NotFoundError(
                f"run '{run}' has no folder {path} on the cluster's volume; see: ludus status {run}"
            ) from None
        archive.seek(0)
        _unpack_archive(archive, Path(unpacked_path))
        _refuse_another_run(Path(unpacked_path), folder)
        _move_files(Path(unpacked_path), folder)


async def read_log(cluster: RunsCluster, release: Release, run: str) -> str:
    """Return the driver's log from the run folder.

    Raises:
        NotFoundError: there is no log.
        ClusterError: the volume cannot be read.
    """
    path = f"{release.platform.output_dir}/{run}/{LOG_FILE}"
    log_buffer = io.BytesIO()
    try:
        await _run_script(cluster, release, run, (_PRINT_SCRIPT, path), log_buffer)
    except ClusterError as error:
        if "No such file" not in error.message:
            raise
        raise NotFoundError(f"run '{run}' has no log at {path}") from None
    return log_buffer.getvalue().decode(errors="replace")


async def _run_script(
    cluster: RunsCluster,
    release: Release,
    run: str,
    arguments: tuple[str, ...],
    destination: IO[bytes],
) -> None:
    """Run a Python script in a pod that mounts the volume; write its output to `destination`."""
    command = ("python", "-c", *arguments)
    async with _open_reader(cluster, release, run) as (pod, container):
        output = cluster.api.run_command(cluster.namespace, pod, container, command)
        async with aclosing(output) as chunks:
            async for chunk in chunks:
                destination.write(chunk)


def _unpack_archive(archive: IO[bytes], folder: Path) -> None:
    try:
        with tarfile.open(fileobj=archive, mode="r|gz") as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ClusterError(f"the archive from the cluster cannot be unpacked: {error}") from error


class _RunOrigin(BaseModel):
    """The name and the output folder of the run that wrote a configuration."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    output_dir: str = ""


def _refuse_another_run(fetched_folder: Path, folder: Path) -> None:
    """Refuse to replace the results of another run."""
    local_origin = _read_origin(folder / CONFIG_FILE)
    if local_origin is not None and local_origin != _read_origin(fetched_folder / CONFIG_FILE):
        raise ConfigError(
            f"'{folder}' contains another run, from {local_origin.output_dir or 'this machine'}; "
            "choose another folder with --folder"
        )


def _read_origin(path: Path) -> _RunOrigin | None:
    try:
        return _RunOrigin.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return _RunOrigin()


def _move_files(fetched_folder: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in fetched_folder.iterdir():
        destination = folder / path.name
        if destination.is_dir():
            shutil.rmtree(destination)
        os.replace(path, destination)


# The pod that reads the volume.


@asynccontextmanager
async def _open_reader(
    cluster: RunsCluster, release: Release, run: str
) -> AsyncIterator[tuple[str, str]]:
    """Yield the name of a pod that mounts the volume, and the name of its container.

    The pod is the run's head if it is running, otherwise a temporary pod.
    """
    job = await cluster.find_job(run)
    pods = await cluster.list_pods(read_state(job).ray_cluster) if job else []
    for pod in pods:
        if is_head(pod) and (pod.get("status") or {}).get("phase") == "Running":
            yield pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]
            return
    path = make_core_path(cluster.namespace, "pods")
    pod = await cluster.api.create(path, _make_reader_pod(release, run))
    name = pod["metadata"]["name"]
    try:
        await _wait_until_running(cluster, pod)
        yield name, "reader"
    finally:
        with suppress(ClusterError):
            await cluster.api.delete(f"{path}/{name}", {"gracePeriodSeconds": 0})


def _make_reader_pod(release: Release, run: str) -> JsonObject:
    """Build a pod that mounts the volume like the release's head, but runs only `sleep`.

    It has the head's image, which the nodes already have, and the head's security context, node
    selectors and image pull secrets. It has no credentials and no service account token.

    Raises:
        ConfigError: the release has no volume.
    """
    template = copy.deepcopy(get_head_template(release.template))
    spec, (head, *_) = template["spec"], get_pod_containers(template)
    folder = release.platform.output_dir
    mounts = [mount for mount in head.get("volumeMounts") or [] if mount["mountPath"] == folder]
    if not mounts:
        raise ConfigError(
            f"release '{release.platform.release}' mounts no volume at {folder}, so results "
            "are lost with the pods; set storage in the release's values"
        )
    volume_names = {mount["name"] for mount in mounts}
    container = {
        "name": "reader",
        "image": head.get("image"),
        "imagePullPolicy": head.get("imagePullPolicy", "IfNotPresent"),
        "command": ["python", "-c", f"import time; time.sleep({_READER_LIFETIME_S})"],
        "securityContext": head.get("securityContext") or {},
        "resources": {"requests": _READER_RESOURCES, "limits": _READER_RESOURCES},
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{run}-reader-",
            "namespace": release.platform.namespace,
            "labels": {RUN_LABEL: run, "app.kubernetes.io/component": "reader"},
        },
        "spec": {
            **{field: spec[field] for field in _COPIED_FIELDS if field in spec},
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "activeDeadlineSeconds": _READER_LIFETIME_S,
            "containers": [container],
            "volumes": [volume for volume in spec["volumes"] if volume["name"] in volume_names],
        },
    }


async def _wait_until_running(cluster: RunsCluster, pod: JsonObject) -> None:
    path = make_core_path(cluster.namespace, "pods", pod["metadata"]["name"])
    phase = ""
    with suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_S):
            while phase not in ("Failed", "Succeeded"):
                pod = await cluster.api.read(path)
                phase = (pod.get("status") or {}).get("phase", "")
                if phase == "Running":
                    return
                await asyncio.sleep(_POLL_INTERVAL_S)
    troubles = "; ".join(find_pod_troubles([pod])) or f"its phase is {phase}"
    raise ClusterError(
        f"the pod that reads the volume did not start within {START_TIMEOUT_S:.0f} s: {troubles}"
    )
