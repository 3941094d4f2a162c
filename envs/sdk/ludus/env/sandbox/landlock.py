"""Landlock: files outside the given folders are closed, processes outside cannot be looked into.

Each version of the kernel's interface adds rights that it can withhold. From the sixth on
signals, too, reach nobody outside.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from ludus.env.sandbox import kernel
from ludus.env.sandbox.kernel import LayerUnavailableError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8
_TRUNCATE, _DEVICE_CONTROL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_CONTROL
_READING = _EXECUTE | _READ_FILE | _READ_FOLDER
_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: _DEVICE_CONTROL}
_SCOPES = 1 | 2
"""Abstract sockets and signals."""
_SCOPES_FROM = 6


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def require_signal_scope() -> None:
    """Say whether `restrict_files` confines signals, too.

    Raises:
        LayerUnavailableError: it does not.
    """
    version = _version()
    if version < _SCOPES_FROM:
        raise LayerUnavailableError(
            f"Landlock's interface has version {version} here, and signals come with"
            f" {_SCOPES_FROM} (Linux 6.12)"
        )


def restrict_files(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Close all files but these, for this process and for whatever it starts.

    Raises:
        LayerUnavailableError: the kernel has no Landlock, or it is turned off.
    """
    version = _version()
    all_rights = sum(bits for since, bits in _RIGHTS_BY_VERSION.items() if since <= version)
    scopes = _SCOPES if version >= _SCOPES_FROM else 0
    asked = _Ruleset(all_rights, 0, scopes)
    size = ctypes.sizeof(asked) if scopes else ctypes.sizeof(ctypes.c_uint64)
    ruleset = kernel.syscall(_CREATE_RULESET, ctypes.byref(asked), size, 0)
    try:
        for paths, rights in ((readable, _READING), (writable, all_rights)):
            for path in paths:
                _open_to(ruleset, path, rights)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _open_to(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no rule
    try:
        if not path.is_dir():
            rights &= _OF_FILES
        rule = _PathBeneath(rights, descriptor)
        kernel.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _version() -> int:
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise
        raise LayerUnavailableError(
            f"there is no Landlock here ({os.strerror(error.errno)})"
        ) from None
