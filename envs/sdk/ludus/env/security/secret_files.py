"""Secrets in files, one on each line, that are read again after a change.

    mounted Secret --stat, at most once per second--> FollowedFile.current --> signing, sending
                                                                          --> checks of callers

The first line signs and is sent; every line is accepted. A file with a new and an old line
therefore replaces a secret without an interruption, and a removed line is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from ludus.proto.errors import ConfigError, UserError

_log = logging.getLogger(__name__)

ReadSecrets: TypeAlias = Callable[[], tuple[str, ...]]
"""Function that returns the current secrets, the one that signs and is sent first."""
MIN_SECRET_CHARS = 16
CHECK_INTERVAL_S = 1.0
"""Minimum time between two checks of a file for changes, in seconds."""
_MAX_FILE_BYTES = 64 * 1024
_ContentT = TypeVar("_ContentT")
_ContentT_co = TypeVar("_ContentT_co", covariant=True)


class ChangingFile(Protocol[_ContentT_co]):
    """A file whose content may change while the process runs."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    def has_changed(self) -> bool:
        """Return whether the file changed after the last `read`."""

    def read(self) -> _ContentT_co:
        """Read the file and return its content."""


class FollowedFile(Generic[_ContentT]):
    """The content of a file, read again after each change.

    If the changed file is invalid, an error is logged and the previous content remains.

    Args:
        clock: monotonic clock in seconds.

    Raises:
        UserError: the file cannot be used.
    """

    def __init__(
        self, file: ChangingFile[_ContentT], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file
        self._clock = clock
        self._next_check_s = clock() + CHECK_INTERVAL_S
        self._content = file.read()

    @property
    def current(self) -> _ContentT:
        """Content of the file, at most `CHECK_INTERVAL_S` old."""
        if self._clock() >= self._next_check_s:
            self._next_check_s = self._clock() + CHECK_INTERVAL_S
            if self._file.has_changed():
                self._read_changes()
        return self._content

    def _read_changes(self) -> None:
        try:
            self._content = self._file.read()
            _log.info("read the changed file %s", self._file.path)
        except UserError as error:
            _log.error(
                "cannot use the changed file %s, the previous content remains: %s",
                self._file.path,
                error,
            )


class SecretFile:
    """A file with a token or key on each line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: tuple[Any, ...] = ()

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    def has_changed(self) -> bool:
        """Return whether the file changed after the last `read`."""
        return read_file_signatures((self._path,)) != self._signature

    def read(self) -> tuple[str, ...]:
        """Read the file and return its secrets.

        Raises:
            ConfigError: the file cannot be read, or a line is not a secret.
        """
        # The signature is computed first, so that a change during the read is found later.
        self._signature = read_file_signatures((self._path,))
        lines = [line.strip() for line in self._read_text().splitlines()]
        secrets = tuple(dict.fromkeys(line for line in lines if line))
        if not secrets:
            raise ConfigError(f"{self._path} must contain a secret on each line, but is empty")
        for index, secret in enumerate(secrets, 1):
            is_valid = secret.isascii() and secret.isprintable() and " " not in secret
            if len(secret) < MIN_SECRET_CHARS or not is_valid:
                raise ConfigError(
                    f"{self._path}: secret {index} must have at least {MIN_SECRET_CHARS} printable"
                    f" ASCII characters without spaces, got {len(secret)} characters; make one"
                    " with: openssl rand -hex 32"
                )
        return secrets

    def _read_text(self) -> str:
        try:
            if self._path.stat().st_size > _MAX_FILE_BYTES:
                raise ConfigError(f"{self._path} must have at most {_MAX_FILE_BYTES} bytes")
            return self._path.read_text("utf-8", "replace")
        except OSError as error:
            raise ConfigError(
                f"{self._path} must be a readable file with a secret on each line, got"
                f" {error.strerror}; create it or name another file"
            ) from error


def follow_secrets(path: Path) -> ReadSecrets:
    """Return a function that returns the current secrets of a file.

    Raises:
        ConfigError: the file cannot be used.
    """
    followed_file = FollowedFile(SecretFile(path))
    return lambda: followed_file.current


def read_file_signatures(paths: Iterable[Path]) -> tuple[Any, ...]:
    """Return values that change when a file, or the target of its symbolic link, changes."""
    signatures: list[Any] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            signatures.append(error.errno)
        else:
            signatures.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(signatures)
