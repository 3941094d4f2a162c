"""System calls that Python has no function for; each raises OSError when the kernel refuses."""

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
    """This machine, or this process's place on it, has no such layer; the text says why."""


def prctl(option: int, *values: Any) -> int:
    """What the kernel answers to a call about this process."""
    padded = [*values, *[0] * (4 - len(values))]
    words = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in padded]
    return _checked("prctl", _libc().prctl(option, *words))


def syscall(number: int, *values: Any) -> int:
    """What a system call without a name in the C library returns."""
    libc = _libc()
    libc.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in values]
    return _checked(f"system call {number}", libc.syscall(ctypes.c_long(number), *words))


def unshare(flags: int) -> None:
    """Leave namespaces that are shared with the parent."""
    _checked("unshare", _libc().unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount in this process's mount namespace."""
    words = [word.encode() for word in (source, target, kind)]
    status = _libc().mount(*words, ctypes.c_ulong(flags), options.encode())
    _checked(f"mount on {target}", status)


def clone_mounts(path: str) -> int:
    """A descriptor of what is mounted at and below a path, to be put in place again."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    return syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), flags)


def put_mounts(descriptor: int, path: str) -> None:
    """Mount over a path what `clone_mounts` has found."""
    where = (descriptor, b"", _AT_FDCWD, path.encode())
    syscall(_MOVE_MOUNT, *where, _MOVE_MOUNT_F_EMPTY_PATH)


def make_mounts_read_only() -> None:
    """Let this process's mount namespace change no file, its mode and times included."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    where = (_AT_FDCWD, b"/", _AT_RECURSIVE)
    syscall(_MOUNT_SETATTR, *where, ctypes.byref(attributes), ctypes.sizeof(attributes))


def drop_capabilities() -> None:
    """Leave this process, whatever its user, without a privilege of its own."""
    prctl(PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked("capset", _libc().capset(header, (ctypes.c_uint32 * 6)()))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(name: str, status: int) -> int:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return status
