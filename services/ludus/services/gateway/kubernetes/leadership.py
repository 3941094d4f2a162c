"""One gateway of several leads: it holds a Lease of coordination.k8s.io.

    every gateway --GET--> Lease --free, expired or mine?--> PUT with the resourceVersion read

Two never lead at once, without trusting anybody's clock but one's own:

- The API server accepts one of two PUTs that stand on the same resourceVersion.
- A holder leads until 2/3 of the duration after it *sent* its last accepted PUT: a deadline,
  not a flag, so an unreachable API server or a stalled event loop ends it by itself.
- The others take a Lease over no earlier than its whole duration after they last *saw* it
  change. They saw it change after the PUT was sent, hence the holder stopped first. The times
  written in the Lease are for people to read; clocks that disagree do no harm.

A process that is frozen between asking `is_leader` and acting on it may act too late. What a
leader does here (annotating pods) is harmless done twice; nothing else may rest on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError

from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes.api import (
    JsonObject,
    KubernetesApi,
    ObjectPart,
    resource_path,
)

_log = logging.getLogger(__name__)

_API_VERSION = "coordination.k8s.io/v1"
_NOT_FOUND, _CONFLICT = 404, 409
_LEADING_SHARE = 2 / 3
_RELEASE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """Times of a Lease; all contenders should have the same."""

    lease_duration_s: int = 15
    """How long the others leave a silent holder alone."""
    renew_s: float = 5.0
    """Between two renewals, and between two looks at somebody else's Lease."""

    def __post_init__(self) -> None:
        if not 0 < self.renew_s < self.lease_duration_s * _LEADING_SHARE:
            raise ConfigError(
                f"expected renew_s between 0 and {_LEADING_SHARE:.2f} of lease_duration_s"
                f" ({self.lease_duration_s}), got {self.renew_s}; renew more often"
            )


class _Metadata(ObjectPart):
    resource_version: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Spec(ObjectPart):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    lease_transitions: int | None = None


class _Lease(ObjectPart):
    metadata: _Metadata
    spec: _Spec = _Spec()


class Leadership:
    """A contender for one Lease: `async with Leadership(...) as leadership`.

    Args:
        name: the Lease's; the same for all contenders.
        contender: who this is, for people: the pod's name. A random part is added, because
            two contenders of one name would both lead.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        name: str,
        contender: str,
        *,
        options: LeaseOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = f"{contender}_{secrets.token_hex(4)}"
        self._api = api
        self._namespace, self._name = namespace, name
        self._options = options or LeaseOptions()
        self._clock = clock
        self._leading_until_s = -math.inf
        self._seen_version = ""
        self._seen_change_s = -math.inf
        self._was_leader = False
        self._is_healthy = True
        self._task: asyncio.Task[None] | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this one may act as the leader at this moment."""
        return self._clock() < self._leading_until_s

    async def __aenter__(self) -> Leadership:
        self._task = asyncio.create_task(self._compete_forever())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.release()

    async def compete(self) -> bool:
        """Whether this one leads, after one attempt to take or keep the Lease."""
        limit_s = self._options.renew_s
        if self.is_leader:
            limit_s = min(limit_s, max(0.0, self._leading_until_s - self._clock()))
        try:
            async with asyncio.timeout(limit_s):
                await self._attempt()
            self._is_healthy = True
        except (ClusterError, ConfigError, TimeoutError) as error:
            if self._is_healthy:
                reason = str(error) or f"no answer within {limit_s:.1f} s"
                _log.warning("the lease %s/%s: %s", self._namespace, self._name, reason)
            self._is_healthy = False
        self._log_change()
        return self.is_leader

    async def release(self) -> None:
        """Stop leading, and let the others take over at once if the API server answers."""
        self._leading_until_s = -math.inf
        self._log_change()
        with contextlib.suppress(ClusterError, ConfigError, TimeoutError):  # else it runs out
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                found = await self._read()
                if found is not None and found.spec.holder_identity == self.identity:
                    await self._api.replace(self._path(self._name), self._body(found, free=True))

    async def _compete_forever(self) -> None:
        while True:
            await self.compete()
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        renew_s = self._options.renew_s
        if not self.is_leader:
            return renew_s * random.uniform(0.9, 1.1)
        if not self._is_healthy:
            renew_s /= 5  # the deadline is near
        return min(renew_s, max(0.0, self._leading_until_s - self._clock()))

    async def _attempt(self) -> None:
        sent_s = self._clock()
        found = await self._read()
        if found is not None and not self._may_take(found):
            self._leading_until_s = -math.inf
            return
        sent_s = self._clock()
        try:
            if found is None:
                stored = await self._api.create(self._path(), self._body(None))
            else:
                stored = await self._api.replace(self._path(self._name), self._body(found))
        except ClusterError as error:
            if error.status != _CONFLICT:
                raise
            return  # somebody was faster; the next look shows who
        self._see(_read_lease(stored))
        self._leading_until_s = sent_s + self._options.lease_duration_s * _LEADING_SHARE

    async def _read(self) -> _Lease | None:
        try:
            found = _read_lease(await self._api.read(self._path(self._name)))
        except ClusterError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        self._see(found)
        return found

    def _see(self, found: _Lease) -> None:
        # The time is taken after the answer: too late is safe, too early is not.
        if found.metadata.resource_version != self._seen_version:
            self._seen_version = found.metadata.resource_version
            self._seen_change_s = self._clock()

    def _may_take(self, found: _Lease) -> bool:
        holder = found.spec.holder_identity
        if not holder or holder == self.identity:
            return True
        duration_s = found.spec.lease_duration_seconds or self._options.lease_duration_s
        return self._clock() >= self._seen_change_s + duration_s

    def _body(self, found: _Lease | None, *, free: bool = False) -> JsonObject:
        """The Lease to store: held by this one, or by nobody."""
        before = found.spec if found is not None else _Spec()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new = before.holder_identity != self.identity
        transitions = before.lease_transitions or 0
        spec: JsonObject = {
            "leaseDurationSeconds": 1 if free else self._options.lease_duration_s,
            "renewTime": now,
            "acquireTime": now if is_new else before.acquire_time or now,
            "leaseTransitions": transitions + (found is not None and is_new),
        }
        if not free:
            spec["holderIdentity"] = self.identity
        metadata: JsonObject = {"name": self._name, "namespace": self._namespace}
        if found is not None:
            # All of it is replaced, and whoever made the Lease knows it by its labels.
            metadata["labels"] = found.metadata.labels or {}
            metadata["annotations"] = found.metadata.annotations or {}
            metadata["resourceVersion"] = found.metadata.resource_version
        return {
            "apiVersion": _API_VERSION,
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }

    def _path(self, name: str = "") -> str:
        return resource_path(_API_VERSION, self._namespace, "leases", name)

    def _log_change(self) -> None:
        if self.is_leader != self._was_leader:
            self._was_leader = not self._was_leader
            what = "leads" if self._was_leader else "does not lead any more"
            _log.info("%s %s", self.identity, what)


def _read_lease(found: JsonObject) -> _Lease:
    try:
        return _Lease.model_validate(found)
    except ValidationError as error:
        raise ClusterError(
            f"expected a Lease of {_API_VERSION}, got one with {error.error_count()} wrong fields"
        ) from error
