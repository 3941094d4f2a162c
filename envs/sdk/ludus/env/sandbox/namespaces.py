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
    give_up_privileges,
    hide_process,
    read_effective_capabilities,
    show_process,
)

_CAP_SYS_ADMIN = 21
_WORKER_PID = 2
"""Process id of the worker in its namespace."""
_PIDS = struct.Struct("<ii")
_SUCCESS, _FAILURE = b"\1", b"\0"
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
    """Try to fork into new namespaces, as for a worker; return why that failed, or ""."""
    if not hasattr(os, "pidfd_open"):
        return "this system has no process descriptors"
    read_fd, write_fd = os.pipe()
    try:
        child = fork_into_namespaces(without_network=without_network)
    except LayerUnavailableError as error:
        for descriptor in (read_fd, write_fd):  # otherwise every worker would inherit them
            os.close(descriptor)
        return str(error)
    if child.pid == 0:
        try:
            enter_namespaces()
            os.write(write_fd, _SUCCESS)
        except OSError as error:
            os.write(write_fd, _FAILURE + str(error).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        report = pipe.read()
    for pid in (child.pid, child.keeper_pid):
        os.waitpid(pid, 0)
    if report == _SUCCESS:
        return ""
    return report[1:].decode() or "a process in the new namespaces exited at once"


def fork_into_namespaces(*, without_network: bool) -> ForkedProcess:
    """Fork into new namespaces. The child must then call `enter_namespaces`.

    Raises:
        LayerUnavailableError: the kernel refuses.
        OSError: no process can be forked.
    """
    read_fd, write_fd = os.pipe()
    try:
        divider_pid = os.fork()
    except OSError:
        for descriptor in (read_fd, write_fd):
            os.close(descriptor)
        raise
    if divider_pid == 0:
        os.close(read_fd)
        _run_divider(write_fd, without_network)
        return ForkedProcess(0)
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        report = pipe.read()
    os.waitpid(divider_pid, 0)
    if report[:1] != _SUCCESS:
        raise LayerUnavailableError(
            report[1:].decode() or "the process that creates the namespaces exited at once"
        )
    return ForkedProcess(*_PIDS.unpack(report[1:]))


def enter_namespaces() -> None:
    """Mount a separate /proc and separate shared memory for this process."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    if _SHARED_MEMORY.is_dir():
        kernel.mount("tmpfs", str(_SHARED_MEMORY), "tmpfs", flags, _SHARED_MEMORY_OPTIONS)


def mount_read_only(writable_paths: Iterable[Path]) -> None:
    """Make everything except `writable_paths` read-only in this process's mount namespace.

    Landlock does not restrict a file's mode, owner, times and attributes, so without
    read-only mounts a process could change them for every file that its user owns.
    """
    mounts: list[tuple[int, str]] = []
    try:
        for path in writable_paths:
            with contextlib.suppress(FileNotFoundError):
                mounts.append((kernel.clone_mounts(str(path)), str(path)))
        kernel.make_mounts_read_only()
        for descriptor, path_text in mounts:
            kernel.put_mounts(descriptor, path_text)
    finally:
        for descriptor, _ in mounts:
            os.close(descriptor)
    with contextlib.suppress(OSError):
        os.chdir(os.getcwd())  # the working folder may be below a new mount


def _run_divider(report_fd: int, without_network: bool) -> None:
    """Fork the keeper and the worker. Only the worker returns from this function."""
    try:
        unshare_namespaces(without_network)
        start_read_fd, start_write_fd = os.pipe()
        keeper_pid = os.fork()
        if keeper_pid == 0:
            _run_keeper(start_read_fd)
        worker_pid = os.fork()
        if worker_pid == 0:
            for descriptor in (report_fd, start_read_fd, start_write_fd):
                os.close(descriptor)
            return
        os.write(report_fd, _SUCCESS + _PIDS.pack(worker_pid, keeper_pid))
    except OSError as error:
        # If the fork server has died, nothing reads the pipe; the divider must exit anyway.
        with contextlib.suppress(OSError):
            os.write(report_fd, _FAILURE + str(error).encode())
    os._exit(0)


def unshare_namespaces(without_network: bool) -> None:
    """Move the children of this process into new namespaces."""
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
    if without_network:
        flags |= kernel.CLONE_NEWNET
    if read_effective_capabilities() >> _CAP_SYS_ADMIN & 1:
        kernel.unshare(flags)
        return
    user_id, group_id = os.geteuid(), os.getegid()
    show_process()
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user_id} {user_id} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group_id} {group_id} 1", encoding="ascii")


def _run_keeper(start_fd: int) -> None:
    """Wait until the worker exits, then exit. Never returns."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps children
        os.closerange(3, start_fd)
        os.closerange(start_fd + 1, os.sysconf("SC_OPEN_MAX"))
        os.read(start_fd, 1)  # returns when the divider has forked the worker and exited
        give_up_privileges()
        hide_process()
        with contextlib.suppress(ProcessLookupError):
            poller = select.poll()
            poller.register(os.pidfd_open(_WORKER_PID), select.POLLIN)
            poller.poll()
    finally:
        os._exit(0)
