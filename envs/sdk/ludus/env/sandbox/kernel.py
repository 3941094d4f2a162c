"""System calls without a Python function. Each raises OSError if the kernel refuses."""

from __future__ import annotations

import ctypes
import os
from typing import Any

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 1

_CAPABILITY_VERSION_3 = 0x2008_0522
_AMBIENT_CLEAR_ALL = 4


class LayerUnavailableError(Exception):
    """This machine or process does not support a layer of the sandbox; the text is the reason."""


def prctl(option: int, *arguments: Any) -> int:
    """Call prctl(2) for this process and return its result."""
    padded_arguments = [*arguments, *[0] * (4 - len(arguments))]
    c_arguments = [
        ctypes.c_ulong(argument) if isinstance(argument, int) else argument
        for argument in padded_arguments
    ]
    return _check_status("prctl", _load_libc().prctl(option, *c_arguments))


def syscall(call_number: int, *arguments: Any) -> int:
    """Make a system call that the C library has no function for, and return its result."""
    libc = _load_libc()
    libc.syscall.restype = ctypes.c_long
    c_arguments = [
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    ]
    return _check_status(
        f"system call {call_number}", libc.syscall(ctypes.c_long(call_number), *c_arguments)
    )


def unshare(flags: int) -> None:
    """Leave the namespaces shared with the parent."""
    _check_status("unshare", _load_libc().unshare(flags))


def mount(source: str, target: str, file_system: str, flags: int, options: str = "") -> None:
    """Mount a file system in this process's mount namespace."""
    c_strings = [argument.encode() for argument in (source, target, file_system)]
    status = _load_libc().mount(*c_strings, ctypes.c_ulong(flags), options.encode())
    _check_status(f"mount on {target}", status)


def clone_mounts(path: str) -> int:
    """Copy the mounts at and below a path; return a descriptor for `put_mounts`."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    return syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), flags)


def put_mounts(descriptor: int, path: str) -> None:
    """Mount a copy made by `clone_mounts` over a path."""
    move_arguments = (descriptor, b"", _AT_FDCWD, path.encode())
    syscall(_MOVE_MOUNT, *move_arguments, _MOVE_MOUNT_F_EMPTY_PATH)


def make_mounts_read_only() -> None:
    """Make all mounts of this process's namespace read-only, including file modes and times."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    mount_arguments = (_AT_FDCWD, b"/", _AT_RECURSIVE)
    syscall(_MOUNT_SETATTR, *mount_arguments, ctypes.byref(attributes), ctypes.sizeof(attributes))


def drop_capabilities() -> None:
    """Drop all capabilities of this process, even those of root."""
    prctl(PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check_status("capset", _load_libc().capset(header, (ctypes.c_uint32 * 6)()))


def _load_libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check_status(call_name: str, status: int) -> int:
    if status < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{call_name}: {os.strerror(error_number)}")
    return status
