"""A weight store: versions go in at the learner and come out at the workers, whole or not at all.

    learner                                                          worker
    manifest, tensors                                                manifest, tensors
       |  complete, or the difference from        what it holds + the differences since,
       |  the version before                      or the newest complete one + all since
       v                                                                ^
    payload  -->  files of a folder | objects of a bucket | objects of Ray

A version is complete when its number is a multiple of `full_every`, or when there is nothing
to build on. A worker that joins late so fetches one complete version and at most
`full_every - 1` differences. What is published names its whole chain, so a worker asks the
store for nothing but bytes.

Both ends keep the last version's tensors when differences travel: that memory is their price.
Whatever goes wrong ends in a result or a WeightSyncError after `timeout_s` at the latest.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ludus.proto.config import WeightStoreConfig
from ludus.proto.errors import WeightSyncError
from ludus.trainer.core.interfaces import FetchedWeights, PublishedWeights, StateDict
from ludus.trainer.core.types import TensorEntry, WeightManifest
from ludus.trainer.weights.delta import apply_delta, encode_delta
from ludus.trainer.weights.manifest import verify
from ludus.trainer.weights.payload import Payload, from_buffers, to_buffers
from ludus.trainer.weights.retry_deadline import RetryDeadline, answer_within

_log = logging.getLogger(__name__)

_DROP_TIMEOUT_S = 5.0


class StorageBackend(Protocol):
    """Where payloads lie: the one part in which stores differ.

    Every method may be called from any thread, and raises StoreUnavailableError for what may
    pass by itself, another WeightSyncError for what will not.
    """

    @property
    def place(self) -> str:
        """What messages call it."""

    def put(self, name: str, buffers: Sequence[np.ndarray]) -> Any:
        """Where the buffers lie now: all of them, one after another, under one name."""

    def get(self, location: Any, num_bytes: int) -> Sequence[np.ndarray]:
        """The buffers of `put`, or one that holds them all."""

    def drop(self, location: Any) -> None:
        """Forget what lies there."""

    def leftovers(self) -> Sequence[Any]:
        """Where payloads of earlier processes lie."""


@dataclass(frozen=True, slots=True)
class Link:
    """One payload of a chain."""

    version: int
    content_hash: str
    """Of the version that it makes."""
    num_bytes: int
    location: Any


@dataclass(frozen=True, slots=True)
class _Held:
    manifest: WeightManifest
    state: StateDict
    chain: tuple[Link, ...]
    """What it was made from, the complete version first."""

    @property
    def entries(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.manifest.tensors}


class VersionStore:
    """Carries versions over a storage backend; one object publishes or fetches, never both."""

    def __init__(self, storage: StorageBackend, config: WeightStoreConfig) -> None:
        self._storage = storage
        self._config = config
        self._last: _Held | None = None
        """What was published or fetched last; None where nothing builds on it."""
        self._kept: deque[tuple[Link, ...]] = deque(maxlen=config.keep_versions)
        self._stored: list[Any] | None = None
        """All locations that may hold something; None before the backend was asked."""

    def publish(self, manifest: WeightManifest, state: StateDict) -> PublishedWeights:
        """The version, complete and fetchable; older ones that nothing needs are dropped.

        Raises:
            WeightSyncError: the store did not take it within `timeout_s`.
        """
        doing = f"publishing weights version {manifest.version} to {self._storage.place}"
        deadline = RetryDeadline(doing, self._config.timeout_s)
        base = self._base_of(manifest)
        buffers = to_buffers(_payload(manifest, state, base))
        name = f"v{manifest.version:08d}-{manifest.content_hash[:12]}"
        name += ".delta.safetensors" if base else ".safetensors"
        location = deadline.call(partial(self._storage.put, name, buffers))
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        link = Link(manifest.version, manifest.content_hash, num_bytes, location)
        chain = (*base.chain, link) if base else (link,)
        if self._config.full_every > 1:
            self._last = _Held(manifest, _own_copy(manifest, state, self._last), chain)
        self._kept.append(chain)
        self._drop_unneeded(location)
        return PublishedWeights(manifest, chain)

    def fetch(self, published: PublishedWeights) -> FetchedWeights:
        """The tensors as they were published; nobody may write to them.

        Raises:
            WeightSyncError: missing, cut off or altered, or away for longer than `timeout_s`.
        """
        version = published.manifest.version
        deadline = RetryDeadline(
            f"fetching weights version {version} from {self._storage.place}", self._config.timeout_s
        )
        held = self._last
        num_known = _num_links_held(held, published.location)
        try:
            fetched = self._climb(published, held if num_known else None, num_known, deadline)
        except WeightSyncError as error:
            if not num_known:
                raise
            _log.warning("weights version %d is fetched again from the start: %s", version, error)
            fetched = self._climb(published, None, 0, deadline)
        if self._config.full_every > 1:
            self._last = _Held(published.manifest, fetched.state, published.location)
        return fetched

    def _climb(
        self,
        published: PublishedWeights,
        held: _Held | None,
        num_known: int,
        deadline: RetryDeadline,
    ) -> FetchedWeights:
        """What `held` and the links after it come to, verified."""
        state = dict(held.state) if held else {}
        content_hash = held.manifest.content_hash if held else None
        altered: set[str] = set()
        links: tuple[Link, ...] = published.location[num_known:]
        for link in links:
            payload = from_buffers(deadline.call(partial(self._read, link)))
            if payload.parent_hash is None:
                state = dict(payload.parts)
            else:
                state = apply_delta(state, content_hash or "nothing", payload)
            content_hash = payload.content_hash
            altered.update(payload.parts)
        verify(published.manifest, state, held.entries if held else None, altered)
        num_bytes = sum(link.num_bytes for link in links)
        return FetchedWeights(state, num_bytes, deadline.spent_s)

    def _read(self, link: Link) -> Sequence[np.ndarray]:
        return self._storage.get(link.location, link.num_bytes)

    def _base_of(self, manifest: WeightManifest) -> _Held | None:
        """The version that `manifest` may be a difference from."""
        last = self._last
        if last is None or manifest.version % self._config.full_every == 0:
            return None
        if manifest.version != last.manifest.version + 1:
            return None
        return last if _layout(last.manifest) == _layout(manifest) else None

    def _drop_unneeded(self, newest: Any) -> None:
        """Drop what no kept version builds on; what fails is tried again after the next one."""
        needed = [link.location for chain in self._kept for link in chain]
        try:
            if self._stored is None:
                self._stored = list(answer_within(self._storage.leftovers, _DROP_TIMEOUT_S))
            if newest not in self._stored:
                self._stored.append(newest)
            for location in [one for one in self._stored if one not in needed]:
                answer_within(partial(self._storage.drop, location), _DROP_TIMEOUT_S)
                self._stored.remove(location)
        except (WeightSyncError, OSError) as error:
            _log.warning("old weights are not dropped yet: %s", error)


def _payload(manifest: WeightManifest, state: StateDict, base: _Held | None) -> Payload:
    if base is None:
        return Payload(manifest.version, manifest.content_hash, None, state)
    before = base.entries
    changed = [entry.name for entry in manifest.tensors if entry != before[entry.name]]
    differences = encode_delta(base.state, state, changed)
    return Payload(manifest.version, manifest.content_hash, base.manifest.content_hash, differences)


def _own_copy(
    manifest: WeightManifest, state: StateDict, last: _Held | None
) -> dict[str, torch.Tensor]:
    """The tensors, apart from those that the optimizer will write to."""
    before = last.entries if last else {}
    return {
        entry.name: last.state[entry.name]
        if last and before.get(entry.name) == entry
        else state[entry.name].detach().clone()
        for entry in manifest.tensors
    }


def _num_links_held(held: _Held | None, chain: tuple[Link, ...]) -> int:
    """How many links of the chain lead to what is held; 0 when it is not part of it."""
    if held is None:
        return 0
    hashes = [link.content_hash for link in chain]
    own = held.manifest.content_hash
    return len(hashes) - hashes[::-1].index(own) if own in hashes else 0


def _layout(manifest: WeightManifest) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(entry.name, entry.dtype, entry.shape) for entry in manifest.tensors]
