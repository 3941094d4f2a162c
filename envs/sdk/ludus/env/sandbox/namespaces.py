"""Separate namespaces for each worker: processes, mounts, shared memory, optionally network.

    fork server --fork--> divider, which enters new namespaces and exits
                            +--fork--> keeper, pid 1 in the namespace: reaps orphans
                            +--fork--> worker, pid 2

When the divider exits, the keeper and the worker become children of the fork server, a
subreaper, which then receives the worker's exit status. The keeper exits with the worker, and
the kernel then kills every other process of the namespace.
Root needs no user namespace for this. Other users get one that maps only their own id.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ludus.env.sandbox import kernel
from ludus.env.sandbox.kernel import LayerUnavailableError
from ludus.env.sandbox.processes import (
    effective_capabilities,
    give_up_privileges,
    hide_process,
    show_process,
)

_CAP_SYS_ADMIN = 21
_WORKER_PID = 2
"""Process id of the worker in its namespace."""
_PIDS = struct.Struct("<ii")
_DONE, _FAILED = b"\1", b"\0"
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_OPTIONS = "size=64m,mode=1777"


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A forked worker process."""

    pid: int
    """Process id; 0 in the worker."""
    keeper_pid: int = 0
    """Process id of the keeper; 0 if the worker shares its parent's namespaces."""


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)


def find_namespace_fault(*, without_network: bool) -> str:
    """Fork into new namespaces as every worker will; return why that failed, or ""."""
    if not hasattr(os, "pidfd_open"):
        return "this system has no process descriptors"
    reader, writer = os.pipe()
    try:
        forked = fork_into_namespaces(without_network=without_network)
    except LayerUnavailableError as error:
        for descriptor in (reader, writer):  # otherwise every worker would inherit them
            os.close(descriptor)
        return str(error)
    if forked.pid == 0:
        try:
            enter_namespaces()
            os.write(writer, _DONE)
        except OSError as error:
            os.write(writer, _FAILED + str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        result = pipe.read()
    for pid in (forked.pid, forked.keeper_pid):
        os.waitpid(pid, 0)
    if result == _DONE:
        return ""
    return result[1:].decode() or "a process in them exited at once"


def fork_into_namespaces(*, without_network: bool) -> ForkedProcess:
    """Fork into new namespaces. The child must then call `enter_namespaces`.

    Raises:
        LayerUnavailableError: the kernel refuses.
        OSError: no process can be forked.
    """
    reader, writer = os.pipe()
    try:
        divider = os.fork()
    except OSError:
        for descriptor in (reader, writer):
            os.close(descriptor)
        raise
    if divider == 0:
        os.close(reader)
        _run_divider(writer, without_network)
        return ForkedProcess(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        result = pipe.read()
    os.waitpid(divider, 0)
    if result[:1] != _DONE:
        raise LayerUnavailableError(
            result[1:].decode() or "the process that makes them exited at once"
        )
    return ForkedProcess(*_PIDS.unpack(result[1:]))


def enter_namespaces() -> None:
    """Mount a separate /proc and separate shared memory for this process."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    if _SHARED_MEMORY.is_dir():
        kernel.mount("tmpfs", str(_SHARED_MEMORY), "tmpfs", flags, _SHARED_MEMORY_OPTIONS)


def mount_read_only(writable: Iterable[Path]) -> None:
    """Make everything else read-only, in this process's mount namespace.

    Landlock does not restrict a file's mode, owner, times and attributes, so without this a
    process could change those of every file that its user owns.
    """
    mounts: list[tuple[int, str]] = []
    try:
        for path in writable:
            with contextlib.suppress(FileNotFoundError):
                mounts.append((kernel.clone_mounts(str(path)), str(path)))
        kernel.make_mounts_read_only()
        for descriptor, target in mounts:
            kernel.put_mounts(descriptor, target)
    finally:
        for descriptor, _ in mounts:
            os.close(descriptor)
    with contextlib.suppress(OSError):
        os.chdir(os.getcwd())  # the working folder may be below a new mount


def _run_divider(writer: int, without_network: bool) -> None:
    """Fork the keeper and the worker. Only the worker returns from this function."""
    try:
        unshare_namespaces(without_network)
        ready_fd, start = os.pipe()
        keeper = os.fork()
        if keeper == 0:
            _run_keeper(ready_fd)
        worker = os.fork()
        if worker == 0:
            for descriptor in (writer, ready_fd, start):
                os.close(descriptor)
            return
        os.write(writer, _DONE + _PIDS.pack(worker, keeper))
    except OSError as error:
        # If the fork server has died, nothing reads the pipe; the divider must exit anyway.
        with contextlib.suppress(OSError):
            os.write(writer, _FAILED + str(error).encode())
    os._exit(0)


def unshare_namespaces(without_network: bool) -> None:
    """Move the children of this process into new namespaces."""
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
    if without_network:
        flags |= kernel.CLONE_NEWNET
    if effective_capabilities() >> _CAP_SYS_ADMIN & 1:
        kernel.unshare(flags)
        return
    user, group = os.geteuid(), os.getegid()
    show_process()
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")


def _run_keeper(started: int) -> None:
    """Wait until the worker exits, then exit. Never returns."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps children
        os.closerange(3, started)
        os.closerange(started + 1, os.sysconf("SC_OPEN_MAX"))
        os.read(started, 1)  # returns when the divider has forked the worker and exited
        give_up_privileges()
        hide_process()
        with contextlib.suppress(ProcessLookupError):
            worker_exit = select.poll()
            worker_exit.register(os.pidfd_open(_WORKER_PID), select.POLLIN)
            worker_exit.poll()
    finally:
        os._exit(0)
