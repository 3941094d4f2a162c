"""The layers of a worker's sandbox, and the order in which they can be put on.

    namespaces -> own folder -> read-only mounts -> user id -> privileges -> Landlock -> seccomp
        -> non-dumpable

Mounts need what the user id gives up, rules of Landlock name the /proc of the namespace, the
filter refuses what the layers before it have used, and a change of user makes a process
visible again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.landlock import require_signal_scope, restrict_files
from ludus.env.sandbox.namespaces import make_read_only
from ludus.env.sandbox.privileges import give_up_privileges, hide_process
from ludus.env.sandbox.seccomp import refuse_system_calls
from ludus.env.sandbox.surroundings import device_paths, system_paths, use_folder
from ludus.env.sandbox.user_id import take_user_id

Missing = dict["Layer", str]
"""Why a layer is not in force; those in force are not in here."""


class Layer(StrEnum):
    """What keeps a worker to itself."""

    NAMESPACES = "namespaces"
    READ_ONLY = "read-only"
    """Mounts, in the namespaces."""
    USER_ID = "user-id"
    NO_NEW_PRIVILEGES = "no-new-privileges"
    LANDLOCK = "landlock"
    SIGNAL_SCOPE = "signal-scope"
    """Landlock, from Linux 6.12 on."""
    SECCOMP = "seccomp"
    NON_DUMPABLE = "non-dumpable"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What the workers of a server may do; travels as JSON."""

    folder: str
    """In which each worker makes its own."""
    readable: list[str] = field(default_factory=list)
    """Beside the system and the code."""
    writable: list[str] = field(default_factory=list)
    without_network: bool = False
    is_required: bool = False
    """A worker does not start without every layer."""

    def folder_of(self, worker_id: int) -> Path:
        """The worker's own folder."""
        return Path(self.folder, str(worker_id))


class SandboxError(Exception):
    """A layer that is required is missing."""


def confine(
    sandbox: Sandbox, worker_id: int, pid: int, code: list[Path], why_shared: str
) -> Missing:
    """Confine this process, and whatever it starts, as far as the machine offers it.

    Args:
        pid: this process as its server sees it.
        code: what it may read beside the system.
        why_shared: why it has no namespaces of its own; empty where it has.
    """
    missing: Missing = {Layer.NAMESPACES: why_shared} if why_shared else {}
    folder = sandbox.folder_of(worker_id)
    folder.mkdir(mode=0o700)
    use_folder(folder)
    named = [Path(path) for path in sandbox.readable]
    also_writable = [Path(path) for path in sandbox.writable]
    readable = [*system_paths(), *code, *named]
    writable = [folder, *device_paths(), *also_writable]
    if not why_shared:
        writable.append(Path("/dev/shm"))

    def close_mounts() -> None:
        if why_shared:
            raise LayerUnavailableError("it takes namespaces")
        make_read_only(writable)

    steps: Iterable[tuple[Layer, Callable[[], object]]] = (
        (Layer.READ_ONLY, close_mounts),
        (Layer.USER_ID, lambda: take_user_id(pid, folder, [*code, *named], also_writable)),
        (Layer.NO_NEW_PRIVILEGES, give_up_privileges),
        (Layer.LANDLOCK, lambda: restrict_files(readable, writable)),
        (Layer.SIGNAL_SCOPE, require_signal_scope),
        (Layer.SECCOMP, lambda: refuse_system_calls(shares_processes=bool(why_shared))),
        (Layer.NON_DUMPABLE, hide_process),
    )
    for layer, put_on in steps:
        try:
            _require_linux()
            put_on()
        except (LayerUnavailableError, OSError) as error:
            missing[layer] = str(error)
    return missing


def describe_missing_layers(missing: Mapping[Layer, str]) -> str:
    """The layers that are missing, and why, for people."""
    return "; ".join(f"{layer} ({why})" for layer, why in missing.items())


def _require_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise LayerUnavailableError("only Linux has it")
