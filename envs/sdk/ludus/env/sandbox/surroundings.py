"""What a worker finds around it: environment variables, code, and a folder of its own.

Everything is named that it may have; what nobody thought of stays outside.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

WORKER_PID_VARIABLE = "LUDUS_WORKER_PID"
"""Its process id as the server and its logs have it."""
_PASSED_VARIABLES = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("CUDA_VISIBLE_DEVICES", "MUJOCO_GL", "PYOPENGL_PLATFORM", "SDL_VIDEODRIVER"),
    *("SDL_AUDIODRIVER", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
}
_PASSED_PREFIXES = ("LC_", "PYTHON")
_SYSTEM = [
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/proc", "/sys/devices/system"),
    *("/sys/fs/cgroup", "/etc/ld.so.cache", "/etc/ssl", "/etc/pki", "/etc/ca-certificates"),
    *("/etc/localtime", "/etc/timezone", "/etc/resolv.conf", "/etc/hosts", "/etc/host.conf"),
    *("/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/protocols", "/etc/passwd"),
    *("/etc/group", "/etc/mime.types", "/etc/os-release", "/etc/fonts", "/etc/alternatives"),
    *("/etc/terminfo", "/etc/profile", "/etc/bash.bashrc", "/etc/inputrc", "/etc/python3"),
]
_DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
_MIN_BYTES_PER_ENTRY = 4096
"""A file of no size costs the disk something, too."""


def filter_variables(variables: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The environment variables that workers get: the harmless ones, and those that are named."""
    passed = _PASSED_VARIABLES | set(names)
    return {
        name: value
        for name, value in variables.items()
        if name in passed or name.startswith(_PASSED_PREFIXES)
    }


def system_paths() -> list[Path]:
    """What programs read of the system."""
    return [Path(path) for path in _SYSTEM]


def device_paths() -> list[Path]:
    """Devices that hold nothing."""
    return [Path(path) for path in _DEVICES]


def code_paths(workers_folder: Path) -> list[Path]:
    """Where code is imported from, now and later.

    A path above the folder in which workers write is none: it would open theirs to each other.
    """
    workers_folder = workers_folder.resolve()
    found: list[Path] = []
    for path in sorted({path.resolve() for path in _places_of_code()}):
        if workers_folder.is_relative_to(path) or any(map(path.is_relative_to, found)):
            continue
        found.append(path)
    return found


def paths_in_options(options: Mapping[str, object]) -> list[Path]:
    """Files and folders that an environment's options name: it is meant to read them."""
    texts = [value for value in options.values() if isinstance(value, str)]
    named = [Path(text) for text in texts if os.sep in text and os.path.exists(text)]
    return [path.resolve() for path in named]


def make_workers_folder() -> Path:
    """A new folder in which each worker of a server makes its own."""
    folder = Path(tempfile.mkdtemp(prefix="ludus-workers-"))
    folder.chmod(0o711)
    return folder


def use_folder(folder: Path) -> None:
    """Make what asks for a temporary folder, or for a home, find this one."""
    for variable in ("TMPDIR", "TEMP", "TMP", "HOME"):
        os.environ[variable] = str(folder)
    tempfile.tempdir = None


def disk_usage_bytes(folder: Path) -> float:
    """How much disk space a folder takes; infinite where that is hidden from this process."""
    total, left = 0, [str(folder)]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                found = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it is gone by now
        except OSError:  # closed, or too deep
            return float("inf")
        total += sum(map(_bytes_of, found))
        left += [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
    return total


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it, however deep or closed."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if not folder.exists():
            return
        subprocess.run(
            [*command, "--", str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


def _bytes_of(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(FileNotFoundError):
        taken = entry.stat(follow_symlinks=False).st_blocks * 512
        return max(taken, _MIN_BYTES_PER_ENTRY)
    return 0


def _places_of_code() -> Iterator[Path]:
    yield from map(Path, (sys.prefix, sys.base_prefix, sys.exec_prefix))
    yield from (Path(place or os.getcwd()) for place in sys.path)
    for module in list(sys.modules.values()):
        # Not by getattr: a lazy module would import what it is asked for.
        known = vars(module)
        places = known.get("__path__") or [known.get("__file__")]
        with contextlib.suppress(Exception):  # whatever modules put there
            yield from [Path(place) for place in places if place]
