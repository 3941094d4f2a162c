"""Versions as objects in an S3-compatible bucket; the one file that knows obstore.

    put   parts of one multipart upload, side by side; the object appears when all have arrived
    get   ranges of the object, side by side, into one buffer

obstore is the Rust `object_store` crate: it signs, splits, retries and streams without holding
Python's lock, and depends on nothing. It reads credentials from the environment or from the
pod's identity; none ever passes through this file.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from ludus.proto.config import S3WeightStore
from ludus.proto.errors import ConfigError, StoreUnavailableError, WeightSyncError
from ludus.trainer.weights.retry_deadline import answer_within

_PART_BYTES = 8 * 2**20
_MAX_PARTS = 5000
_NUM_CONNECTIONS = 8
_STALLED_AFTER_S = 30.0
_CHECK_TIMEOUT_S = 15.0
_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of driver, learner and "
    "workers, or give their pods an identity that may read, write and delete there"
)


class BucketObjects:
    """One object for each version."""

    def __init__(self, config: S3WeightStore) -> None:
        self._config = config
        # A part of the time there is, so that a server that hangs and comes back is asked again.
        stalled_after_s = min(_STALLED_AFTER_S, config.timeout_s / 4)
        self._store = S3Store(
            config.bucket,
            prefix=config.prefix or None,
            region=config.region,
            endpoint=config.endpoint,
            client_options={
                "allow_http": (config.endpoint or "").startswith("http://"),
                "connect_timeout": timedelta(seconds=stalled_after_s),
                "read_timeout": timedelta(seconds=stalled_after_s),
                "timeout": timedelta(seconds=config.timeout_s),
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=config.timeout_s)},
        )

    @property
    def place(self) -> str:
        """What messages call it."""
        at = f" at {self._config.endpoint}" if self._config.endpoint else ""
        return f"the bucket '{self._config.bucket}'{at}, prefix '{self._config.prefix}'"

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> str:
        """The object's key below the prefix."""
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        part_bytes = max(_PART_BYTES, num_bytes // _MAX_PARTS)
        try:
            if num_bytes <= part_bytes:
                content = np.concatenate(buffers)
                obstore.put(self._store, name, content.data, use_multipart=False)
            else:
                obstore.put(
                    self._store,
                    name,
                    (buffer.data for buffer in buffers if buffer.nbytes),
                    chunk_size=part_bytes,
                    max_concurrency=_NUM_CONNECTIONS,
                )
        except (BaseError, OSError) as error:
            raise self._failure(error) from None
        return name

    def get(self, location: str, num_bytes: int) -> list[np.ndarray]:
        """The object's bytes."""
        try:
            size = obstore.head(self._store, location)["size"]
            if size != num_bytes:
                raise WeightSyncError(
                    f"'{location}' in {self.place} was cut off: expected {num_bytes} bytes, got "
                    f"{size}; see who else writes there"
                )
            content = np.empty(num_bytes, dtype=np.uint8)
            asyncio.run(self._load(location, content))
        except (BaseError, OSError) as error:
            raise self._failure(error) from None
        return [content]

    async def _load(self, location: str, content: np.ndarray) -> None:
        """Read the object into `content`."""
        connections = asyncio.Semaphore(_NUM_CONNECTIONS)

        async def load(start: int) -> None:
            end = min(start + _PART_BYTES, content.nbytes)
            async with connections:
                part = await obstore.get_range_async(self._store, location, start=start, end=end)
            content[start:end] = np.frombuffer(memoryview(part), dtype=np.uint8)

        await asyncio.gather(*(load(start) for start in range(0, content.nbytes, _PART_BYTES)))

    def drop(self, location: str) -> None:
        """Delete the object, if it is there."""
        try:
            obstore.delete(self._store, location)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise self._failure(error) from None

    def leftovers(self) -> list[str]:
        """Keys of the versions of earlier processes."""
        try:
            keys = [found["path"] for page in obstore.list(self._store) for found in page]
        except (BaseError, OSError) as error:
            raise self._failure(error) from None
        return [key for key in keys if re.fullmatch(r"v\d{8,}-\w+(\.delta)?\.safetensors", key)]

    def check(self) -> None:
        """Ask the bucket for a list.

        Raises:
            ConfigError: it does not answer, or refuses.
        """
        try:
            answer_within(self.leftovers, _CHECK_TIMEOUT_S)
        except WeightSyncError as error:
            raise ConfigError(f"weights.bucket = '{self._config.bucket}': {error}") from error

    def _failure(self, error: Exception) -> WeightSyncError:
        reason = f"{self.place}: {_reason(error)}"
        # The library has error classes for some calls, but the status for all.
        status = re.search(r"status code: (\d+)", reason)
        if status and status[1] in ("401", "403"):
            return WeightSyncError(f"{reason}; {_CREDENTIALS}")
        if status and status[1] == "404":
            return WeightSyncError(
                f"{reason}; the bucket must exist, and a slow worker may need more "
                "weights.keep_versions"
            )
        return StoreUnavailableError(reason)


def _reason(error: Exception) -> str:
    """One line; the library's own message continues for pages."""
    text = str(error)
    first = text.partition("\n")[0].partition("<?xml")[0].rstrip(" :")
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"{first} ({code[1]})" if code else first
