"""The weight store: the learner publishes versions, and workers fetch them.

    learner                                                          worker
    manifest, tensors                                                manifest, tensors
       |  complete, or the difference from        its version + the differences since,
       |  the previous version                    or the latest complete version + all since
       v                                                                ^
    payload  -->  files of a folder | objects of a bucket | objects of Ray

A version is complete if its number is a multiple of `full_every`, or if there is no previous
version. So a worker that joins late fetches one complete version and at most `full_every - 1`
differences. A published version lists its whole chain of payloads, so that a worker needs nothing
else to find them.

If differences are published, learner and workers keep the tensors of the last version in memory.
Every operation returns, or raises a WeightSyncError, within `timeout_s`. Each call of a storage
backend runs in a separate thread, so that a file system that hangs, or a server that never
responds, blocks only that thread.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np

from ludus.env.backoff import generate_pauses
from ludus.proto.config import WeightStoreConfig
from ludus.proto.errors import StoreUnavailableError, WeightSyncError
from ludus.trainer.core.interfaces import (
    FetchedWeights,
    PublishedWeights,
    StateDict,
    StoredPayload,
)
from ludus.trainer.core.types import TensorEntry, WeightManifest
from ludus.trainer.weights.payload import (
    Payload,
    apply_delta,
    decode_payload,
    encode_delta,
    encode_payload,
    verify_tensors,
)

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0


class StorageBackend(Protocol):
    """Storage of payloads, in a folder, in a bucket or in Ray.

    Every method may be called from any thread. It raises StoreUnavailableError for temporary
    failures, and another WeightSyncError for permanent ones.
    """

    description: str
    """The name of the storage in messages."""

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> Any:
        """Store the concatenated buffers under one name, and return their location."""

    def get(self, location: Any, num_bytes: int) -> Sequence[np.ndarray]:
        """Return the buffers of `put`, or one buffer with all their bytes."""

    def drop(self, location: Any) -> None:
        """Delete the payload at a location, if it exists."""

    def list_locations(self) -> Sequence[object]:
        """Return the locations of all payloads, including those of earlier processes."""


@dataclass(frozen=True, slots=True)
class _StoredVersion:
    manifest: WeightManifest
    state: StateDict
    payloads: tuple[StoredPayload, ...]
    """Payloads of the version, the complete one first."""

    @property
    def entries(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.manifest.tensors}


class VersionStore:
    """A store of versions in a storage backend; an instance either publishes or fetches."""

    drop_timeout_s = 5.0
    """Time limit for each deletion of an old version; after a failure, a later call retries."""

    def __init__(self, storage: StorageBackend, config: WeightStoreConfig) -> None:
        self._storage = storage
        self._config = config
        self._last_version: _StoredVersion | None = None
        """The last version published or fetched; None if no difference will build on it."""
        self._kept_versions: deque[tuple[StoredPayload, ...]] = deque(maxlen=config.keep_versions)
        """Payloads of each version that is kept."""
        self._locations: list[object] | None = None
        """All locations that may be in use; None until the backend has listed them."""

    def publish(self, manifest: WeightManifest, state: StateDict) -> PublishedWeights:
        """Store a version, delete versions that are not needed, and return the stored version.

        Raises:
            WeightSyncError: the version was not stored within `timeout_s`.
        """
        operation = f"publishing weights version {manifest.version} to {self._storage.description}"
        deadline = RetryDeadline(operation, self._config.timeout_s)
        base = self._find_base(manifest)
        buffers = encode_payload(_make_payload(manifest, state, base))
        name = f"v{manifest.version:08d}-{manifest.content_hash[:12]}"
        name += ".delta.safetensors" if base else ".safetensors"
        location = deadline.call(partial(self._storage.put, name, buffers))
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        payload = StoredPayload(manifest.version, manifest.content_hash, num_bytes, location)
        payloads = (*base.payloads, payload) if base else (payload,)
        if self._config.full_every > 1:
            copied_state = _copy_state(manifest, state, self._last_version)
            self._last_version = _StoredVersion(manifest, copied_state, payloads)
        self._kept_versions.append(payloads)
        self._delete_unneeded(location)
        return PublishedWeights(manifest, payloads)

    def fetch(self, published_weights: PublishedWeights) -> FetchedWeights:
        """Return the tensors as they were published; do not write to them.

        Raises:
            WeightSyncError: the version is missing, damaged, or unavailable for `timeout_s`.
        """
        manifest, payloads = published_weights.manifest, published_weights.payloads
        operation = f"fetching weights version {manifest.version} from {self._storage.description}"
        deadline = RetryDeadline(operation, self._config.timeout_s)
        num_applied = _count_applied(self._last_version, payloads)
        base = self._last_version if num_applied else None
        try:
            fetched_weights = self._apply_payloads(manifest, base, payloads[num_applied:], deadline)
        except WeightSyncError as error:
            if base is None:
                raise
            _log.warning("fetching version %d again from the start: %s", manifest.version, error)
            fetched_weights = self._apply_payloads(manifest, None, payloads, deadline)
        if self._config.full_every > 1:
            self._last_version = _StoredVersion(manifest, fetched_weights.state, payloads)
        return fetched_weights

    def _apply_payloads(
        self,
        manifest: WeightManifest,
        base: _StoredVersion | None,
        payloads: Sequence[StoredPayload],
        deadline: RetryDeadline,
    ) -> FetchedWeights:
        """Apply the payloads to `base`, and verify the result."""
        state = dict(base.state) if base else {}
        content_hash = base.manifest.content_hash if base else "nothing"
        changed_names: set[str] = set()
        for stored_payload in payloads:
            location, num_bytes = stored_payload.location, stored_payload.num_bytes
            buffers = deadline.call(partial(self._storage.get, location, num_bytes))
            payload = decode_payload(buffers)
            if payload.parent_hash is None:
                state = dict(payload.parts)
            else:
                state = apply_delta(state, content_hash, payload)
            content_hash = payload.content_hash
            changed_names.update(payload.parts)
        verify_tensors(manifest, state, base.entries if base else None, changed_names)
        total_bytes = sum(stored_payload.num_bytes for stored_payload in payloads)
        return FetchedWeights(state, total_bytes, deadline.elapsed_s)

    def _find_base(self, manifest: WeightManifest) -> _StoredVersion | None:
        """Return the version from which `manifest` may be published as a difference, or None."""
        base = self._last_version
        if base is None or manifest.version % self._config.full_every == 0:
            return None
        is_next = manifest.version == base.manifest.version + 1
        return base if is_next and _list_shapes(base.manifest) == _list_shapes(manifest) else None

    def _delete_unneeded(self, newest_location: object) -> None:
        """Delete payloads that no kept version needs; retry failed deletions at the next call."""
        needed_locations = [payload.location for payload in chain(*self._kept_versions)]
        try:
            if self._locations is None:
                locations = call_with_limit(self._storage.list_locations, self.drop_timeout_s)
                self._locations = list(locations)
            if newest_location not in self._locations:
                self._locations.append(newest_location)
            old_locations = [
                location for location in self._locations if location not in needed_locations
            ]
            for location in old_locations:
                call_with_limit(partial(self._storage.drop, location), self.drop_timeout_s)
                self._locations.remove(location)
        except (WeightSyncError, OSError) as error:
            _log.warning("old weights are not deleted yet: %s", error)


def _make_payload(
    manifest: WeightManifest, state: StateDict, base: _StoredVersion | None
) -> Payload:
    if base is None:
        return Payload(manifest.version, manifest.content_hash, None, state)
    entries = base.entries
    changed_names = [entry.name for entry in manifest.tensors if entry != entries[entry.name]]
    differences = encode_delta(base.state, state, changed_names)
    return Payload(manifest.version, manifest.content_hash, base.manifest.content_hash, differences)


def _copy_state(
    manifest: WeightManifest, state: StateDict, last_version: _StoredVersion | None
) -> StateDict:
    """Copy the tensors that have changed, because the optimizer may write to them; share others."""
    entries, old_state = (last_version.entries, last_version.state) if last_version else ({}, {})
    return {
        entry.name: old_state[entry.name]
        if entries.get(entry.name) == entry
        else state[entry.name].detach().clone()
        for entry in manifest.tensors
    }


def _count_applied(version: _StoredVersion | None, payloads: Sequence[StoredPayload]) -> int:
    """Return how many of the payloads `version` includes, from the first one."""
    last_hash = version.manifest.content_hash if version else ""
    hashes = [payload.content_hash for payload in payloads]
    return len(hashes) - hashes[::-1].index(last_hash) if last_hash in hashes else 0


def _list_shapes(manifest: WeightManifest) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(entry.name, entry.dtype, entry.shape) for entry in manifest.tensors]


class RetryDeadline:
    """The time limit of one publish or fetch, over all its calls to the store."""

    def __init__(self, operation: str, timeout_s: float) -> None:
        """`operation` is the subject of messages, such as "publishing weights version 3"."""
        self._operation = operation
        self._timeout_s = timeout_s
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def call(self, operation: Callable[[], ResultT]) -> ResultT:
        """Return the result of `operation`; retry while the store is unavailable.

        Raises:
            WeightSyncError: the time limit has passed, or a retry cannot help.
        """
        pauses_s = generate_pauses(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        num_attempts = 0
        while True:
            num_attempts += 1
            try:
                return call_with_limit(operation, self._timeout_s - self.elapsed_s)
            except StoreUnavailableError as error:
                reason = error
            # Random pauses prevent all waiting workers from retrying at the same time.
            pause_s = next(pauses_s) * random.uniform(0.5, 1.0)
            if self.elapsed_s + pause_s >= self._timeout_s:
                raise WeightSyncError(
                    f"{self._operation} failed for {self.elapsed_s:.1f} s, {num_attempts} attempts "
                    f"(weights.timeout_s = {self._timeout_s:g}); last error: {reason}; check that "
                    "the store is up, or raise weights.timeout_s"
                ) from reason
            time.sleep(pause_s)


def call_with_limit(function: Callable[[], ResultT], timeout_s: float) -> ResultT:
    """Return the result of `function`; abandon its thread if it does not finish in time.

    Raises:
        StoreUnavailableError: it did not finish in time.
    """
    future: Future[ResultT] = Future()

    def run_function() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            future.set_exception(error)

    threading.Thread(target=run_function, name="weight-store", daemon=True).start()
    try:
        return future.result(timeout=max(timeout_s, 0.0))
    except TimeoutError:
        if future.done():  # The function raised TimeoutError, or finished just at the deadline.
            return future.result()
        raise StoreUnavailableError(f"no response within {timeout_s:.1f} s") from None
