"""The layers of a worker's sandbox, applied in the only order that works.

    namespaces -> own folder -> read-only mounts -> user id -> privileges -> Landlock
        -> number of processes -> seccomp -> non-dumpable

Mounting needs the privileges that the change of user id gives up. Landlock rules name the
namespace's /proc. The seccomp filter refuses system calls that earlier layers use. A change of
user id makes a process dumpable again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.landlock import require_signal_scope, restrict_files
from ludus.env.sandbox.namespaces import mount_read_only
from ludus.env.sandbox.processes import (
    give_up_privileges,
    hide_process,
    limit_processes,
    take_user_id,
)
from ludus.env.sandbox.seccomp import refuse_system_calls
from ludus.env.sandbox.worker_resources import (
    list_device_paths,
    list_system_paths,
    set_home_and_temp,
)

MissingLayers = dict["Layer", str]
"""Layers that are not active, with the reasons."""


class Layer(StrEnum):
    """A layer of the sandbox."""

    NAMESPACES = "namespaces"
    READ_ONLY = "read-only"
    """Read-only mounts, which need the namespaces."""
    USER_ID = "user-id"
    NO_NEW_PRIVILEGES = "no-new-privileges"
    LANDLOCK = "landlock"
    SIGNAL_SCOPE = "signal-scope"
    """Landlock's scope for signals, available since Linux 6.12."""
    PROCESS_LIMIT = "process-limit"
    """Maximum number of processes and threads, which the kernel counts by user id."""
    SECCOMP = "seccomp"
    NON_DUMPABLE = "non-dumpable"


_NEEDED_LAYERS = (Layer.NO_NEW_PRIVILEGES, Layer.LANDLOCK, Layer.SECCOMP, Layer.NON_DUMPABLE)
"""Layers that every isolated worker needs."""
_SIGNAL_LAYERS = (Layer.NAMESPACES, Layer.USER_ID, Layer.SIGNAL_SCOPE)
"""Layers that confine signals; a worker needs one of them."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Permissions of a server's workers. The fork server receives them as JSON."""

    folder: str
    """Folder that contains the folders of all workers."""
    readable_paths: list[str] = field(default_factory=list)
    """Readable paths in addition to the system and the code."""
    writable_paths: list[str] = field(default_factory=list)
    without_network: bool = False
    """True if workers have a separate network namespace and no IP sockets."""
    without_sockets: bool = False
    """True if workers have no IP sockets."""
    max_processes: int = 0
    """Maximum number of processes and threads of a worker; 0 sets no limit."""
    is_required: bool = False
    """True if a worker must not start with a missing layer."""
    accepted_layers: list[str] = field(default_factory=list)
    """Layers that may be missing although a worker is then not isolated."""

    def worker_folder(self, worker_id: int) -> Path:
        """Return the folder of a worker."""
        return Path(self.folder, str(worker_id))

    def list_refused_layers(self, missing_layers: MissingLayers) -> list[Layer]:
        """Return the missing layers without which a worker must not start.

        Some layers replace each other: one of those that confine signals is enough.
        """
        if self.is_required:
            return list(missing_layers)
        needed_layers = [layer for layer in _NEEDED_LAYERS if layer in missing_layers]
        if all(layer in missing_layers for layer in _SIGNAL_LAYERS):
            needed_layers.append(Layer.SIGNAL_SCOPE)
        return [layer for layer in needed_layers if layer not in self.accepted_layers]


class SandboxError(Exception):
    """A required layer of the sandbox is missing."""


def confine(
    sandbox: Sandbox, worker_id: int, pid: int, code_paths: list[Path], namespace_fault: str
) -> MissingLayers:
    """Confine this process and its descendants with every layer that the machine supports.

    Args:
        pid: id of this process as its server sees it.
        code_paths: files and folders with Python code, which become readable.
        namespace_fault: reason why the process has no separate namespaces; "" if it has them.

    Returns the missing layers.
    """
    missing_layers: MissingLayers = {Layer.NAMESPACES: namespace_fault} if namespace_fault else {}
    folder = sandbox.worker_folder(worker_id)
    folder.mkdir(mode=0o700)
    set_home_and_temp(folder)
    extra_paths = [*code_paths, *map(Path, sandbox.readable_paths)]
    extra_writable_paths = [Path(path) for path in sandbox.writable_paths]
    readable_paths = [*list_system_paths(), *extra_paths]
    writable_paths = [folder, *list_device_paths(), *extra_writable_paths]
    if not namespace_fault:
        writable_paths.append(Path("/dev/shm"))

    def install_filter() -> None:
        without_sockets = sandbox.without_network or sandbox.without_sockets
        refuse_system_calls(shares_processes=bool(namespace_fault), without_sockets=without_sockets)

    def make_mounts_read_only() -> None:
        if namespace_fault:
            raise LayerUnavailableError("read-only mounts need namespaces")
        mount_read_only(writable_paths)

    def limit_number_of_processes() -> None:
        shares_user_id = Layer.USER_ID in missing_layers
        limit_processes(
            sandbox.max_processes,
            counts_other_processes=shares_user_id and (bool(namespace_fault) or os.geteuid() == 0),
        )

    layer_steps: Iterable[tuple[Layer, Callable[[], object]]] = (
        (Layer.READ_ONLY, make_mounts_read_only),
        (Layer.USER_ID, lambda: take_user_id(pid, folder, extra_paths, extra_writable_paths)),
        (Layer.NO_NEW_PRIVILEGES, give_up_privileges),
        (Layer.LANDLOCK, lambda: restrict_files(readable_paths, writable_paths)),
        (Layer.SIGNAL_SCOPE, require_signal_scope),
        (Layer.PROCESS_LIMIT, limit_number_of_processes),
        (Layer.SECCOMP, install_filter),
        (Layer.NON_DUMPABLE, hide_process),
    )
    for layer, apply_layer in layer_steps:
        try:
            if not sys.platform.startswith("linux"):
                raise LayerUnavailableError("the sandbox needs Linux")
            apply_layer()
        except (LayerUnavailableError, OSError) as error:
            missing_layers[layer] = str(error)
    return missing_layers


def describe_missing_layers(missing_layers: Mapping[Layer, str]) -> str:
    """List the missing layers and the reasons as text."""
    return "; ".join(f"{layer} ({reason})" for layer, reason in missing_layers.items())
