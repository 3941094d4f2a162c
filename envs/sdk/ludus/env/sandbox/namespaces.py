"""Namespaces of its own for each worker: processes, mounts, shared memory, the network where asked.

    fork server --fork--> divider, which leaves the namespaces and ends
                            +--fork--> keeper, number 1 in the new one: reaps orphans
                            +--fork--> worker, number 2

The divider's end hands both to the fork server, a subreaper, so that it hears how the worker
ended. The keeper ends with the worker, and the kernel then kills whatever is left in there.
Root needs no user namespace for this; everybody else gets one that maps his own id alone.
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
from ludus.env.sandbox.privileges import give_up_privileges, hide_process, show_process

_CAP_SYS_ADMIN = 21
_WORKER = 2
"""Its process id in there."""
_PIDS = struct.Struct("<ii")
_DONE, _FAILED = b"\1", b"\0"
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_OPTIONS = "size=64m,mode=1777"


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker process."""

    pid: int
    """0 in the worker itself."""
    keeper_pid: int = 0
    """0 where it shares its parent's namespaces."""


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)


def require_namespaces(*, without_network: bool) -> None:
    """Try once what every worker will do.

    Raises:
        LayerUnavailableError: it cannot be done here.
    """
    if not hasattr(os, "pidfd_open"):
        raise LayerUnavailableError("this system has no process descriptors")
    reader, writer = os.pipe()
    try:
        forked = fork_into_namespaces(without_network=without_network)
    except LayerUnavailableError:
        for descriptor in (reader, writer):  # or every worker would inherit them
            os.close(descriptor)
        raise
    if forked.pid == 0:
        try:
            enter_namespaces()
            os.write(writer, _DONE)
        except OSError as error:
            os.write(writer, _FAILED + str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:
        result = told.read()
    for pid in (forked.pid, forked.keeper_pid):
        os.waitpid(pid, 0)
    if result != _DONE:
        raise LayerUnavailableError(result[1:].decode() or "a process in them ended at once")


def fork_into_namespaces(*, without_network: bool) -> Forked:
    """Fork into new namespaces; in the child, `enter_namespaces` completes them.

    Raises:
        LayerUnavailableError: the kernel refuses.
        OSError: there is no process to be had for it.
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
        _divide(writer, without_network)
        return Forked(0)
    os.close(writer)
    with open(reader, "rb") as told:
        result = told.read()
    os.waitpid(divider, 0)
    if result[:1] != _DONE:
        raise LayerUnavailableError(
            result[1:].decode() or "the process that makes them ended at once"
        )
    return Forked(*_PIDS.unpack(result[1:]))


def enter_namespaces() -> None:
    """Give this process a /proc and shared memory of its own."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    if _SHARED_MEMORY.is_dir():
        kernel.mount("tmpfs", str(_SHARED_MEMORY), "tmpfs", flags, _SHARED_MEMORY_OPTIONS)


def make_read_only(writable: Iterable[Path]) -> None:
    """Mount everything read-only but these, in namespaces of this process's own.

    Landlock knows nothing of a file's mode, owner, times and attributes: who owns a file could
    change them wherever it lies.
    """
    kept: list[tuple[int, str]] = []
    try:
        for path in writable:
            with contextlib.suppress(FileNotFoundError):
                kept.append((kernel.clone_mounts(str(path)), str(path)))
        kernel.make_mounts_read_only()
        for descriptor, place in kept:
            kernel.put_mounts(descriptor, place)
    finally:
        for descriptor, _ in kept:
            os.close(descriptor)
    with contextlib.suppress(OSError):
        os.chdir(os.getcwd())  # it may lie below what was mounted over


def _divide(writer: int, without_network: bool) -> None:
    """Returns in the worker alone."""
    try:
        _leave(without_network)
        started, start = os.pipe()
        keeper = os.fork()
        if keeper == 0:
            _keep(started)
        worker = os.fork()
        if worker == 0:
            for descriptor in (writer, started, start):
                os.close(descriptor)
            return
        os.write(writer, _DONE + _PIDS.pack(worker, keeper))
    except OSError as error:
        # Nobody reads where the fork server has died; the divider, a copy of it, goes no further.
        with contextlib.suppress(OSError):
            os.write(writer, _FAILED + str(error).encode())
    os._exit(0)


def _leave(without_network: bool) -> None:
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
    if without_network:
        flags |= kernel.CLONE_NEWNET
    if _may_administer():
        kernel.unshare(flags)
        return
    user, group = os.geteuid(), os.getegid()
    show_process()
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")


def _may_administer() -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (held,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(held, 16) >> _CAP_SYS_ADMIN & 1)


def _keep(started: int) -> None:
    """Never returns: this is the keeper now."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps by itself
        os.closerange(3, started)
        os.closerange(started + 1, os.sysconf("SC_OPEN_MAX"))
        os.read(started, 1)  # ends when the divider has forked the worker, and has ended
        give_up_privileges()
        hide_process()
        with contextlib.suppress(ProcessLookupError):
            waiting = select.poll()
            waiting.register(os.pidfd_open(_WORKER), select.POLLIN)
            waiting.poll()
    finally:
        os._exit(0)
