"""Landlock: hides files outside the given folders and processes outside the sandbox.

Each version of the kernel interface can withhold additional rights. Version 6 and later also block
signals to processes outside.
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
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8
_TRUNCATE, _DEVICE_CONTROL = 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_CONTROL
_READ_RIGHTS = _EXECUTE | _READ_FILE | _READ_FOLDER
_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: _DEVICE_CONTROL}
_SCOPES = 1 | 2
"""Scopes of abstract sockets and signals."""
_MIN_SCOPE_VERSION = 6


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
    """Check that `restrict_files` also confines signals.

    Raises:
        LayerUnavailableError: signals are not confined.
    """
    version = _read_version()
    if version < _MIN_SCOPE_VERSION:
        raise LayerUnavailableError(
            f"Landlock has version {version} here; signals need version"
            f" {_MIN_SCOPE_VERSION} (Linux 6.12)"
        )


def restrict_files(readable_paths: Iterable[Path], writable_paths: Iterable[Path]) -> None:
    """Hide all files but those in the given paths from this process and its descendants.

    Raises:
        LayerUnavailableError: the kernel has no Landlock, or Landlock is disabled.
    """
    version = _read_version()
    all_rights = sum(rights for minimum, rights in _RIGHTS_BY_VERSION.items() if minimum <= version)
    scopes = _SCOPES if version >= _MIN_SCOPE_VERSION else 0
    attributes = _Ruleset(all_rights, 0, scopes)
    size = ctypes.sizeof(attributes) if scopes else ctypes.sizeof(ctypes.c_uint64)
    ruleset_fd = kernel.syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    try:
        for paths, path_rights in ((readable_paths, _READ_RIGHTS), (writable_paths, all_rights)):
            for path in paths:
                _allow_path(ruleset_fd, path, path_rights)
        kernel.syscall(_RESTRICT_SELF, ruleset_fd, 0)
    finally:
        os.close(ruleset_fd)


def _allow_path(ruleset_fd: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a missing path needs no rule
    try:
        if not path.is_dir():
            rights &= _FILE_RIGHTS
        rule = _PathBeneath(rights, descriptor)
        kernel.syscall(_ADD_RULE, ruleset_fd, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _read_version() -> int:
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise
        message = f"the kernel has no Landlock ({os.strerror(error.errno)})"
        raise LayerUnavailableError(message) from None
