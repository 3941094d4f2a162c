"""The weight store: the learner publishes versions, and workers fetch them.

    learner                                                          worker
    manifest, tensors                                                manifest, tensors
       |  complete, or the difference from        its version + the differences since,
       |  the previous version                    or the latest complete version + all since
       v                                                                ^
    payload  -->  files of a folder | objects of a bucket | objects of Ray

A version is complete if its number is a multiple of `full_every`, or if there is no version to
build on. So a worker that joins late fetches one complete version and at most `full_every - 1`
differences. A published version lists its whole chain of payloads, so a worker needs only their
bytes from the store.

If differences are published, both ends keep the tensors of the last version in memory. Every
operation ends with a result or a WeightSyncError, after `timeout_s` at the latest. Each call of a
store runs in a separate thread, so a file system that hangs, or a server that never responds,
blocks only that thread.
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
from typing import Protocol, TypeVar

import numpy as np
import torch

from ludus.env.backoff import doubling
from ludus.proto.config import WeightStoreConfig
from ludus.proto.errors import StoreUnavailableError, WeightSyncError
from ludus.trainer.core.interfaces import (
    FetchedWeights,
    PublishedWeights,
    StateDict,
    StorageLocation,
)
from ludus.trainer.core.types import TensorEntry, WeightManifest
from ludus.trainer.weights.payload import (
    Payload,
    apply_delta,
    decode_payload,
    encode_delta,
    encode_payload,
    verify,
)

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0


class StorageBackend(Protocol):
    """Storage of payloads: the only part in which stores differ.

    Every method may be called from any thread. It raises StoreUnavailableError for temporary
    failures, and another WeightSyncError for permanent ones.
    """

    description: str
    """The name of the storage in messages."""

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> StorageLocation:
        """Store the concatenated buffers under one name, and return their location."""

    def get(self, location: StorageLocation, num_bytes: int) -> Sequence[np.ndarray]:
        """Return the buffers of `put`, or one buffer with all their bytes."""

    def drop(self, location: StorageLocation) -> None:
        """Delete the payload at a location."""

    def list_locations(self) -> Sequence[StorageLocation]:
        """Return the locations of all payloads, including those of earlier processes."""


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """One payload of a chain."""

    version: int
    content_hash: str
    """Content hash of the version that the payload completes."""
    num_bytes: int
    location: StorageLocation


@dataclass(frozen=True, slots=True)
class _StoredVersion:
    manifest: WeightManifest
    state: StateDict
    chain: tuple[StoredPayload, ...]
    """Payloads of the version, the complete one first."""

    @property
    def entries(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.manifest.tensors}


class VersionStore:
    """A store of versions in a storage backend; one object either publishes or fetches."""

    drop_timeout_s = 5.0
    """Time limit for each call that deletes old versions; they stay until the next one."""

    def __init__(self, storage: StorageBackend, config: WeightStoreConfig) -> None:
        self._storage = storage
        self._config = config
        self._last: _StoredVersion | None = None
        """The last version published or fetched; None if no difference will build on it."""
        self._kept: deque[tuple[StoredPayload, ...]] = deque(maxlen=config.keep_versions)
        self._locations: list[StorageLocation] | None = None
        """All locations that may be in use; None until the backend is asked."""

    def publish(self, manifest: WeightManifest, state: StateDict) -> PublishedWeights:
        """Store a version, return how to fetch it, and delete versions that are not needed.

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
        chain = (*base.chain, payload) if base else (payload,)
        if self._config.full_every > 1:
            self._last = _StoredVersion(manifest, _copy_state(manifest, state, self._last), chain)
        self._kept.append(chain)
        self._drop_unneeded(location)
        return PublishedWeights(manifest, chain)

    def fetch(self, published: PublishedWeights) -> FetchedWeights:
        """Return the tensors as they were published; do not write to them.

        Raises:
            WeightSyncError: the version is missing, damaged, or unavailable for `timeout_s`.
        """
        version = published.manifest.version
        operation = f"fetching weights version {version} from {self._storage.description}"
        deadline = RetryDeadline(operation, self._config.timeout_s)
        last_fetch = self._last
        num_applied = _num_applied(last_fetch, published.location)
        try:
            fetched = self._fetch_chain(
                published, last_fetch if num_applied else None, num_applied, deadline
            )
        except WeightSyncError as error:
            if not num_applied:
                raise
            _log.warning("fetching weights version %d again from the start: %s", version, error)
            fetched = self._fetch_chain(published, None, 0, deadline)
        if self._config.full_every > 1:
            self._last = _StoredVersion(published.manifest, fetched.state, published.location)
        return fetched

    def _fetch_chain(
        self,
        published: PublishedWeights,
        base: _StoredVersion | None,
        num_applied: int,
        deadline: RetryDeadline,
    ) -> FetchedWeights:
        """Apply the payloads after the first `num_applied` to `base`, and verify the result."""
        state = dict(base.state) if base else {}
        content_hash = base.manifest.content_hash if base else None
        changed_names: set[str] = set()
        chain: tuple[StoredPayload, ...] = published.location[num_applied:]
        for stored_version in chain:
            payload = decode_payload(deadline.call(partial(self._read, stored_version)))
            if payload.parent_hash is None:
                state = dict(payload.parts)
            else:
                state = apply_delta(state, content_hash or "nothing", payload)
            content_hash = payload.content_hash
            changed_names.update(payload.parts)
        verify(published.manifest, state, base.entries if base else None, changed_names)
        num_bytes = sum(stored_version.num_bytes for stored_version in chain)
        return FetchedWeights(state, num_bytes, deadline.elapsed_s)

    def _read(self, stored: StoredPayload) -> Sequence[np.ndarray]:
        return self._storage.get(stored.location, stored.num_bytes)

    def _find_base(self, manifest: WeightManifest) -> _StoredVersion | None:
        """Return the version from which `manifest` may be published as a difference."""
        last_fetch = self._last
        if last_fetch is None or manifest.version % self._config.full_every == 0:
            return None
        if manifest.version != last_fetch.manifest.version + 1:
            return None
        return last_fetch if _layout(last_fetch.manifest) == _layout(manifest) else None

    def _drop_unneeded(self, newest: StorageLocation) -> None:
        """Delete payloads that no kept version needs; failures are retried after the next one."""
        needed = [stored_version.location for chain in self._kept for stored_version in chain]
        try:
            if self._locations is None:
                locations = call_with_limit(self._storage.list_locations, self.drop_timeout_s)
                self._locations = list(locations)
            if newest not in self._locations:
                self._locations.append(newest)
            for location in [each for each in self._locations if each not in needed]:
                call_with_limit(partial(self._storage.drop, location), self.drop_timeout_s)
                self._locations.remove(location)
        except (WeightSyncError, OSError) as error:
            _log.warning("old weights are not deleted yet: %s", error)


def _make_payload(
    manifest: WeightManifest, state: StateDict, base: _StoredVersion | None
) -> Payload:
    if base is None:
        return Payload(manifest.version, manifest.content_hash, None, state)
    base_entries = base.entries
    changed_names = [entry.name for entry in manifest.tensors if entry != base_entries[entry.name]]
    differences = encode_delta(base.state, state, changed_names)
    return Payload(manifest.version, manifest.content_hash, base.manifest.content_hash, differences)


def _copy_state(
    manifest: WeightManifest, state: StateDict, last: _StoredVersion | None
) -> dict[str, torch.Tensor]:
    """Return copies of the tensors, which the optimizer may write to; unchanged ones are shared."""
    last_entries = last.entries if last else {}
    return {
        entry.name: last.state[entry.name]
        if last and last_entries.get(entry.name) == entry
        else state[entry.name].detach().clone()
        for entry in manifest.tensors
    }


def _num_applied(last: _StoredVersion | None, chain: tuple[StoredPayload, ...]) -> int:
    """Return the number of payloads of the chain that `last` includes; 0 if not a part."""
    if last is None:
        return 0
    hashes = [stored_version.content_hash for stored_version in chain]
    last_hash = last.manifest.content_hash
    return len(hashes) - hashes[::-1].index(last_hash) if last_hash in hashes else 0


def _layout(manifest: WeightManifest) -> list[tuple[str, str, tuple[int, ...]]]:
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

    def call(self, attempt: Callable[[], ResultT]) -> ResultT:
        """Return the result of `attempt`; retry while the store is unavailable.

        Raises:
            WeightSyncError: the time limit has passed, or a retry cannot help.
        """
        pauses_s = doubling(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        num_attempts = 0
        while True:
            num_attempts += 1
            try:
                return call_with_limit(attempt, self._timeout_s - self.elapsed_s)
            except StoreUnavailableError as error:
                reason = error
            # Jitter, so that the workers that wait for a store do not all return at once.
            pause_s = next(pauses_s) * random.uniform(0.5, 1.0)
            if self.elapsed_s + pause_s >= self._timeout_s:
                raise WeightSyncError(
                    f"{self._operation} failed for {self.elapsed_s:.1f} s, {num_attempts} attempts "
                    f"(weights.timeout_s = {self._timeout_s:g}); last error: {reason}; check that "
                    "the store is up, or raise weights.timeout_s"
                ) from reason
            time.sleep(pause_s)


def call_with_limit(attempt: Callable[[], ResultT], timeout_s: float) -> ResultT:
    """Return the result of `attempt`; its thread is abandoned if it does not finish in time.

    Raises:
        StoreUnavailableError: it did not finish in time.
    """
    outcome: Future[ResultT] = Future()

    def run() -> None:
        try:
            outcome.set_result(attempt())
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="weight-store", daemon=True).start()
    try:
        return outcome.result(timeout=max(timeout_s, 0.0))
    except TimeoutError:
        if outcome.done():  # The attempt raised TimeoutError, or finished just at the deadline.
            return outcome.result()
        raise StoreUnavailableError(f"no response within {timeout_s:.1f} s") from None
