"""Access to the results of runs on the cluster's volume.

    head of the run, or a temporary pod  --pods/exec-->  tar stream  -->  local folder

The pod packs the folder with Python, because an image may not contain `tar`. The stream is unpacked
next to the local folder, whose files are replaced only afterwards. A temporary pod is removed in
any case, also after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import copy
import io
import secrets
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import IO

from ludus.proto.errors import ClusterError, ConfigError, NotFoundError
from ludus.proto.runs import CHECKPOINTS_FOLDER, LOG_FILE, LOG_ROW_PREFIX, METRICS_FILE
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.cluster import NO_RESPONSE, NOT_FOUND, RunsCluster, is_head
from ludus.services.runs.manifest import get_head_template, get_pod_containers
from ludus.services.runs.names import COMPONENT_LABEL, RUN_LABEL, make_core_path
from ludus.services.runs.platform import Release
from ludus.services.runs.results_folder import (
    RunOrigin,
    check_results_folder,
    explain_write_errors,
    place_results,
)
from ludus.services.runs.state import find_pod_troubles, read_state

LARGE_FOLDERS = (CHECKPOINTS_FOLDER, "initial_model", "weights")
"""Subfolders that are fetched only on request."""
START_TIMEOUT_S = 180.0
_READER_LIFETIME_S = 900
_POLL_INTERVAL_S = 0.5
_REPORT_INTERVAL_S = 5
_WAIT_REPORT_INTERVAL_S = 30
_CREATION_TIMEOUT_S = 10.0
_NUM_REMOVAL_ATTEMPTS = 3
_REMOVAL_RETRY_S = 1.0
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
_NUM_READ_ROWS = 200
_PRINT_SCRIPT = f"""
import pathlib, shutil, sys
folder = pathlib.Path(sys.argv[1])
with (folder / "{LOG_FILE}").open("rb") as file:
    shutil.copyfileobj(file, sys.stdout.buffer)
metrics_path = folder / "{METRICS_FILE}"
rows = metrics_path.read_bytes().splitlines() if metrics_path.exists() else []
for row in rows[-{_NUM_READ_ROWS}:]:
    sys.stdout.buffer.write(b"{LOG_ROW_PREFIX}" + row + b"\\n")
"""


Report = Callable[[str], None]
"""Function that shows the user what an operation currently does or waits for."""


async def fetch(
    cluster: RunsCluster,
    release: Release,
    run: str,
    folder: Path,
    report: Report,
    includes_checkpoints: bool = False,
) -> None:
    """Copy the results of a run to a local folder.

    Args:
        includes_checkpoints: fetch checkpoints and models, too.

    Raises:
        NotFoundError: the run has no folder on the volume.
        ConfigError: the local folder contains another run, or cannot be written.
        ClusterError: the volume cannot be read.
    """
    check_results_folder(folder, RunOrigin(name=run, output_dir=release.platform.output_dir))
    path = f"{release.platform.output_dir}/{run}"
    excluded_names = () if includes_checkpoints else LARGE_FOLDERS
    parent, script = folder.absolute().parent, (_PACK_SCRIPT, path, *excluded_names)
    with explain_write_errors(folder):
        parent.mkdir(parents=True, exist_ok=True)
        temporary_folder = tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent)
    with temporary_folder as unpacked_path, tempfile.TemporaryFile() as archive:
        try:
            await _run_script(cluster, release, run, script, archive, report)
        except ClusterError as error:
            if _NO_FOLDER_MESSAGE not in error.message:
                raise
            raise NotFoundError(
                f"run '{run}' has no folder {path} on the cluster's volume; see: "
                f"{cluster.format_command(f'status {run}')}"
            ) from None
        archive.seek(0)
        _unpack_archive(archive, Path(unpacked_path))
        place_results(Path(unpacked_path), folder)


async def read_log(cluster: RunsCluster, release: Release, run: str, report: Report) -> list[str]:
    """Return the driver's log from the run folder, followed by lines with the latest metrics.

    Raises:
        NotFoundError: there is no log.
        ClusterError: the volume cannot be read.
    """
    path = f"{release.platform.output_dir}/{run}"
    log_buffer = io.BytesIO()
    try:
        await _run_script(cluster, release, run, (_PRINT_SCRIPT, path), log_buffer, report)
    except ClusterError as error:
        if "No such file" not in error.message:
            raise
        raise NotFoundError(f"run '{run}' has no log at {path}/{LOG_FILE}") from None
    return log_buffer.getvalue().decode(errors="replace").splitlines()


async def _run_script(
    cluster: RunsCluster,
    release: Release,
    run: str,
    arguments: tuple[str, ...],
    destination: IO[bytes],
    report: Report,
) -> None:
    """Run a Python script in a pod that mounts the volume; write its output to `destination`."""
    command = ("python", "-c", *arguments)
    async with _open_reader(cluster, release, run, report) as (pod, container):
        report(f"reading the volume in pod {pod}")
        reported_at_s = time.monotonic()
        output = cluster.api.run_command(cluster.namespace, pod, container, command)
        async with aclosing(output) as chunks:
            async for chunk in chunks:
                destination.write(chunk)
                if time.monotonic() - reported_at_s >= _REPORT_INTERVAL_S:
                    report(f"copied {destination.tell() / 1e6:,.0f} MB from pod {pod}")
                    reported_at_s = time.monotonic()


def _unpack_archive(archive: IO[bytes], folder: Path) -> None:
    try:
        with tarfile.open(fileobj=archive, mode="r|gz") as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ClusterError(f"the archive from the cluster cannot be unpacked: {error}") from error


# The pod that reads the volume.


@asynccontextmanager
async def _open_reader(
    cluster: RunsCluster, release: Release, run: str, report: Report
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
    pod = _make_reader_pod(release, run)
    name, path = pod["metadata"]["name"], make_core_path(cluster.namespace, "pods")
    report(f"starting pod {name}, which reads the volume")
    creation = asyncio.ensure_future(cluster.api.create(path, pod))
    try:
        await asyncio.shield(creation)
        await _wait_until_running(cluster, name, report)
        yield name, "reader"
    finally:
        await _remove_reader(cluster, name, creation, report)


async def _remove_reader(
    cluster: RunsCluster, name: str, creation: asyncio.Future[JsonObject], report: Report
) -> None:
    """Remove the pod that reads the volume, also if this task is cancelled meanwhile."""
    path, cancellation = make_core_path(cluster.namespace, "pods", name), None
    for attempt in range(_NUM_REMOVAL_ATTEMPTS):
        try:
            if attempt:
                await asyncio.sleep(_REMOVAL_RETRY_S)
            await asyncio.wait([creation], timeout=_CREATION_TIMEOUT_S)
            if not _is_refused(creation):
                await cluster.api.delete(path, {"gracePeriodSeconds": 0})
            break
        except asyncio.CancelledError as error:
            cancellation = error
        except ClusterError as error:
            if error.status == NOT_FOUND:
                break
    else:
        command = f"kubectl delete pod {name} --namespace {cluster.namespace}"
        report(f"pod {name} could not be removed; remove it with: {command}")
    if cancellation is not None:
        raise cancellation


def _is_refused(creation: asyncio.Future[JsonObject]) -> bool:
    """Return whether the API server has refused to create an object."""
    if not creation.done() or creation.cancelled():
        return False
    error = creation.exception()
    return isinstance(error, ClusterError) and error.status != NO_RESPONSE


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
            "name": f"{run}-reader-{secrets.token_hex(3)}",
            "namespace": release.platform.namespace,
            "labels": {RUN_LABEL: run, COMPONENT_LABEL: "reader"},
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


async def _wait_until_running(cluster: RunsCluster, name: str, report: Report) -> None:
    path = make_core_path(cluster.namespace, "pods", name)
    start_s, problem = time.monotonic(), ""
    while (elapsed_s := time.monotonic() - start_s) < START_TIMEOUT_S:
        pod = await cluster.api.read(path)
        phase = (pod.get("status") or {}).get("phase", "")
        if phase == "Running":
            return
        problem = "; ".join(find_pod_troubles([pod])) or f"its phase is {phase or 'Pending'}"
        if phase in ("Failed", "Succeeded"):
            raise ClusterError(f"pod {name}, which reads the volume, has ended: {problem}")
        shown_s = int(elapsed_s) // _WAIT_REPORT_INTERVAL_S * _WAIT_REPORT_INTERVAL_S
        report(f"waiting for pod {name} ({shown_s} of at most {START_TIMEOUT_S:.0f} s): {problem}")
        await asyncio.sleep(_POLL_INTERVAL_S)
    raise ClusterError(
        f"the pod that reads the volume did not start within {START_TIMEOUT_S:.0f} s: {problem}"
    )
