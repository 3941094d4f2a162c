"""Resources of a worker: environment variables, readable paths, and its folder.

These are allowlists: anything that is not listed is hidden from the worker.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

WORKER_PID_VARIABLE = "LUDUS_WORKER_PID"
"""Environment variable with the worker's process id as its server sees it."""
_PASSED_VARIABLES = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("CUDA_VISIBLE_DEVICES", "MUJOCO_GL", "PYOPENGL_PLATFORM", "SDL_VIDEODRIVER"),
    *("SDL_AUDIODRIVER", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
}
_PASSED_PREFIXES = ("LC_", "PYTHON")
_SYSTEM_PATHS = [
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/proc", "/sys/devices/system"),
    *("/sys/fs/cgroup", "/etc/ld.so.cache", "/etc/ssl", "/etc/pki", "/etc/ca-certificates"),
    *("/etc/localtime", "/etc/timezone", "/etc/resolv.conf", "/etc/hosts", "/etc/host.conf"),
    *("/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/protocols", "/etc/passwd"),
    *("/etc/group", "/etc/mime.types", "/etc/os-release", "/etc/fonts", "/etc/alternatives"),
    *("/etc/terminfo", "/etc/profile", "/etc/bash.bashrc", "/etc/inputrc", "/etc/python3"),
]
_DEVICE_PATHS = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
_MIN_BYTES_PER_ENTRY = 4096
"""Minimum disk use of a file, because even empty files cost space."""


def filter_variables(variables: Mapping[str, str], extra_names: Iterable[str]) -> dict[str, str]:
    """Select the environment variables that workers get: safe defaults and `extra_names`."""
    passed_names = _PASSED_VARIABLES | set(extra_names)
    return {
        name: value
        for name, value in variables.items()
        if name in passed_names or name.startswith(_PASSED_PREFIXES)
    }


def list_system_paths() -> list[Path]:
    """Return the system's files and folders that programs read."""
    return [Path(path) for path in _SYSTEM_PATHS]


def list_device_paths() -> list[Path]:
    """Return the devices that store no data."""
    return [Path(path) for path in _DEVICE_PATHS]


def list_code_paths(workers_folder: Path) -> list[Path]:
    """Return the folders and files from which Python imports code.

    A parent of the workers' folder is skipped: granting it would let workers read each other's
    files. The working folder is skipped too, unless a loaded module comes from it.
    """
    workers_folder = workers_folder.resolve()
    paths: list[Path] = []
    for path in sorted(_list_import_paths()):
        if workers_folder.is_relative_to(path) or any(map(path.is_relative_to, paths)):
            continue
        paths.append(path)
    return paths


def find_option_paths(options: Mapping[str, object]) -> list[Path]:
    """Return the existing files and folders that an environment's options name.

    The name of a folder contains a separator, because many other options are bare words.
    """
    return [
        Path(text).resolve()
        for text in _list_texts(options)
        if os.path.isfile(text) or (os.sep in text and os.path.exists(text))
    ]


def make_workers_folder() -> Path:
    """Make a temporary folder for the folders of a server's workers."""
    folder = Path(tempfile.mkdtemp(prefix="ludus-workers-"))
    folder.chmod(0o711)
    return folder


def set_home_and_temp(folder: Path) -> None:
    """Use `folder` as this process's home and temporary folder."""
    for variable in ("TMPDIR", "TEMP", "TMP", "HOME"):
        os.environ[variable] = str(folder)
    tempfile.tempdir = None


def measure_disk_bytes(folder: Path) -> float:
    """Return the disk space that a folder uses; infinite if a subfolder cannot be read."""
    num_bytes, remaining_folders = 0, [str(folder)]
    while remaining_folders:
        try:
            with os.scandir(remaining_folders.pop()) as iterator:
                entries = list(iterator)
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed in the meantime
        except OSError:  # not readable, or nested too deep
            return float("inf")
        num_bytes += sum(map(_measure_entry_bytes, entries))
        remaining_folders += [
            entry.path for entry in entries if entry.is_dir(follow_symlinks=False)
        ]
    return num_bytes


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, even if it is nested deep or not readable."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if not folder.exists():
            return
        null = subprocess.DEVNULL
        subprocess.run([*command, "--", str(folder)], stdout=null, stderr=null, check=False)


def _measure_entry_bytes(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(FileNotFoundError):
        num_bytes = entry.stat(follow_symlinks=False).st_blocks * 512
        return max(num_bytes, _MIN_BYTES_PER_ENTRY)
    return 0


def _list_texts(option: object) -> Iterator[str]:
    """Yield the texts in an option that could be paths."""
    if isinstance(option, str):
        yield option
    elif isinstance(option, Mapping):
        for value in option.values():
            yield from _list_texts(value)
    elif isinstance(option, (list, tuple)):
        for value in option:
            yield from _list_texts(value)


def _list_import_paths() -> set[Path]:
    """Return the absolute paths of folders and files with code."""
    try:
        working_folder = Path.cwd()
    except FileNotFoundError:  # the folder was removed, so relative paths name nothing
        return {path.resolve() for path in _list_all_import_paths() if path.is_absolute()}
    paths = {path.resolve() for path in _list_all_import_paths()}
    search_folders = {Path(path).resolve() for path in sys.path}
    if not _has_loaded_module(working_folder):
        search_folders.discard(working_folder)
    return paths | search_folders


def _list_all_import_paths() -> Iterator[Path]:
    """Yield all paths except the folders in `sys.path`."""
    yield from map(Path, (sys.prefix, sys.base_prefix, sys.exec_prefix))
    for module in list(sys.modules.values()):
        yield from _list_module_paths(module)
    for finder in sys.meta_path:
        # The finder of an editable install knows packages that may be imported later.
        finder_module = sys.modules.get(getattr(finder, "__module__", ""))
        mapping = getattr(finder_module, "MAPPING", None)
        if isinstance(mapping, Mapping):
            yield from (Path(path) for path in mapping.values())


def _has_loaded_module(folder: Path) -> bool:
    """Return True if a loaded top-level module or package lies directly in the folder."""
    parents = {
        path.parent
        for name, module in list(sys.modules.items())
        if "." not in name
        for path in _list_module_paths(module)
        if path.is_absolute()  # some modules invent a relative path
    }
    return any(parent.resolve() == folder for parent in parents)


def _list_module_paths(module: ModuleType) -> list[Path]:
    """Return the folders of a package, or the file of a module."""
    # Use vars, because getattr would make a lazy module import its content.
    attributes = vars(module)
    paths = attributes.get("__path__") or [attributes.get("__file__")]
    with contextlib.suppress(Exception):  # modules may define these with any type
        return [Path(path) for path in paths if path]
    return []
