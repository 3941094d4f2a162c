"""Versions as objects in an S3-compatible bucket; the only file that uses obstore.

    put   parallel parts of one multipart upload; the object appears when all parts have arrived
    get   parallel ranges of the object, read into one buffer

obstore is the Rust crate `object_store`. It signs, splits, retries and streams without holding
Python's lock, and has no dependencies. It reads credentials from the environment or from the
pod's identity; no credentials pass through this file.
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
from ludus.trainer.weights.store import StorageBackend, call_with_limit

_PART_BYTES = 8 * 2**20
_MAX_PARTS = 5000
_NUM_CONNECTIONS = 8
_MAX_STALL_S = 30.0
_CHECK_TIMEOUT_S = 15.0
_CREDENTIALS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of driver, learner and "
    "workers, or give their pods an identity that may read, write and delete there"
)


class BucketStorage(StorageBackend):
    """A storage backend with one object for each version."""

    def __init__(self, config: S3WeightStore) -> None:
        self._config = config
        endpoint = f" at {config.endpoint}" if config.endpoint else ""
        self.description = f"the bucket '{config.bucket}'{endpoint}, prefix '{config.prefix}'"
        # A stall may take only part of the total time, so that a request that hangs is retried.
        max_stall_s = min(_MAX_STALL_S, config.timeout_s / 4)
        self._store = S3Store(
            config.bucket,
            prefix=config.prefix or None,
            region=config.region,
            endpoint=config.endpoint,
            client_options={
                "allow_http": (config.endpoint or "").startswith("http://"),
                "connect_timeout": timedelta(seconds=max_stall_s),
                "read_timeout": timedelta(seconds=max_stall_s),
                "timeout": timedelta(seconds=config.timeout_s),
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=config.timeout_s)},
        )

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> str:
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
            raise self._make_error(error) from None
        return name

    def get(self, location: str, num_bytes: int) -> list[np.ndarray]:
        try:
            size = obstore.head(self._store, location)["size"]
            if size != num_bytes:
                raise WeightSyncError(
                    f"'{location}' in {self.description} has {size} bytes instead of {num_bytes}; "
                    "check whether another program writes there"
                )
            content = np.empty(num_bytes, dtype=np.uint8)
            asyncio.run(self._load_ranges(location, content))
        except (BaseError, OSError) as error:
            raise self._make_error(error) from None
        return [content]

    async def _load_ranges(self, key: str, content: np.ndarray) -> None:
        """Read the object into `content`."""
        connections = asyncio.Semaphore(_NUM_CONNECTIONS)

        async def load_range(start: int) -> None:
            end = min(start + _PART_BYTES, content.nbytes)
            async with connections:
                part = await obstore.get_range_async(self._store, key, start=start, end=end)
            content[start:end] = np.frombuffer(memoryview(part), dtype=np.uint8)

        await asyncio.gather(*map(load_range, range(0, content.nbytes, _PART_BYTES)))

    def drop(self, location: str) -> None:
        try:
            obstore.delete(self._store, location)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise self._make_error(error) from None

    def list_locations(self) -> list[str]:
        try:
            keys = [entry["path"] for page in obstore.list(self._store) for entry in page]
        except (BaseError, OSError) as error:
            raise self._make_error(error) from None
        return [key for key in keys if re.fullmatch(r"v\d{8,}-\w+(\.delta)?\.safetensors", key)]

    def check(self) -> None:
        """Check that the bucket can be listed.

        Raises:
            ConfigError: the bucket does not respond, or refuses access.
        """
        try:
            call_with_limit(self.list_locations, _CHECK_TIMEOUT_S)
        except WeightSyncError as error:
            raise ConfigError(f"weights.bucket = '{self._config.bucket}': {error}") from error

    def _make_error(self, error: Exception) -> WeightSyncError:
        reason = f"{self.description}: {_format_first_line(error)}"
        # obstore has error classes for some calls only, but a status for all.
        status = re.search(r"status code: (\d+)", reason)
        if status and status[1] in ("401", "403"):
            return WeightSyncError(f"{reason}; {_CREDENTIALS_HINT}")
        if status and status[1] == "404":
            return WeightSyncError(
                f"{reason}; the bucket must exist, and a slow worker may need more "
                "weights.keep_versions"
            )
        return StoreUnavailableError(reason)


def _format_first_line(error: Exception) -> str:
    """Return the first line of obstore's message, which may be very long, and the error code."""
    message = str(error)
    first_line = message.partition("\n")[0].partition("<?xml")[0].rstrip(" :")
    error_code = re.search(r"<Code>(\w+)</Code>", message)
    return f"{first_line} ({error_code[1]})" if error_code else first_line
