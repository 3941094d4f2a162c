"""Leader election among gateways with a Lease of coordination.k8s.io.

    every gateway --GET--> Lease --free, expired or mine?--> PUT with the resourceVersion read

Two gateways never lead at the same time, and no gateway relies on another machine's clock:

- The API server accepts only one of two PUTs with the same resourceVersion.
- A holder leads until 2/3 of the duration after it *sent* its last accepted PUT. This is a
  deadline, not a flag, so leadership also ends if the API server is unreachable or the event loop
  stalls.
- Another gateway takes over at the earliest one full duration after it last *saw* the Lease
  change. This gateway saw the change after the holder had sent its PUT, so the holder has
  already stopped leading. The times in the Lease are only for people; wrong clocks do no harm.

A process that freezes between the check of `is_leader` and its action may act too late. The
leader only annotates pods, which two gateways may do at once. Do not use this class for anything
else.
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
from datetime import UTC, datetime

from ludus.env.types import JsonObject
from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes.api import KubernetesApi, make_resource_path

_log = logging.getLogger(__name__)

_API_VERSION = "coordination.k8s.io/v1"
_NOT_FOUND, _CONFLICT = 404, 409
_LEADING_FRACTION = 2 / 3
_RELEASE_TIMEOUT_S = 2.0
LEASE_DURATION_S = 15
"""Seconds after its last renewal until another contender may take the Lease."""


class Leadership:
    """A contender for one Lease: `async with Leadership(...) as leadership`.

    Args:
        name: name of the Lease; the same for all contenders.
        contender: readable name of this contender, such as the pod's name. A random suffix is
            added, because two contenders with the same name would both lead.
        renew_interval_s: seconds between two renewals, or between two checks of another holder's
            Lease. Must be less than 2/3 of `LEASE_DURATION_S`.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        name: str,
        contender: str,
        *,
        renew_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = f"{contender}_{secrets.token_hex(4)}"
        self._api = api
        self._namespace, self._name = namespace, name
        self._leases_path = make_resource_path(_API_VERSION, namespace, "leases")
        self._lease_path = f"{self._leases_path}/{name}"
        self._renew_interval_s = renew_interval_s
        self._clock = clock
        self._leading_until_s = -math.inf
        self._lease_version = ""
        self._last_change_s = -math.inf
        self._was_leader = False
        self._has_api_responded = True
        self._task: asyncio.Task[None] | None = None

    @property
    def is_leader(self) -> bool:
        """True while this contender may act as the leader."""
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
        """Try once to take or renew the Lease, and return whether this contender leads."""
        timeout_s = self._renew_interval_s
        if self.is_leader:
            timeout_s = min(timeout_s, max(0.0, self._leading_until_s - self._clock()))
        try:
            async with asyncio.timeout(timeout_s):
                await self._try_to_lead()
            self._has_api_responded = True
        except (ClusterError, ConfigError, TimeoutError) as error:
            if self._has_api_responded:
                reason = str(error) or f"no response within {timeout_s:.1f} s"
                _log.warning("lease %s/%s: %s", self._namespace, self._name, reason)
            self._has_api_responded = False
        self._log_leadership_change()
        return self.is_leader

    async def release(self) -> None:
        """Stop leading, and release the Lease if the API server responds."""
        self._leading_until_s = -math.inf
        self._log_leadership_change()
        # If the release fails, the Lease expires.
        with contextlib.suppress(ClusterError, ConfigError, TimeoutError):
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                lease = await self._read_lease()
                if lease is not None and lease["spec"].get("holderIdentity") == self.identity:
                    body = self._make_lease(lease, is_released=True)
                    await self._api.replace(self._lease_path, body)

    async def _compete_forever(self) -> None:
        while True:
            await self.compete()
            await asyncio.sleep(self._choose_pause_s())

    def _choose_pause_s(self) -> float:
        renew_interval_s = self._renew_interval_s
        if not self.is_leader:
            return renew_interval_s * random.uniform(0.9, 1.1)
        if not self._has_api_responded:
            renew_interval_s /= 5  # retry sooner, because the deadline is close
        return min(renew_interval_s, max(0.0, self._leading_until_s - self._clock()))

    async def _try_to_lead(self) -> None:
        lease = await self._read_lease()
        if lease is not None and not self._may_take_lease(lease):
            self._leading_until_s = -math.inf
            return
        sent_s = self._clock()
        try:
            body = self._make_lease(lease)
            if lease is None:
                lease = await self._api.create(self._leases_path, body)
            else:
                lease = await self._api.replace(self._lease_path, body)
        except ClusterError as error:
            if error.status != _CONFLICT:
                raise
            return  # another contender was faster; the next attempt reads its Lease
        self._record_version(lease)
        self._leading_until_s = sent_s + LEASE_DURATION_S * _LEADING_FRACTION

    async def _read_lease(self) -> JsonObject | None:
        try:
            lease = await self._api.read(self._lease_path)
        except ClusterError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        lease.setdefault("spec", {})
        self._record_version(lease)
        return lease

    def _record_version(self, lease: JsonObject) -> None:
        # The clock is read after the response, because a time that is too late is safe and one that
        # is too early is not.
        if lease["metadata"]["resourceVersion"] != self._lease_version:
            self._lease_version = lease["metadata"]["resourceVersion"]
            self._last_change_s = self._clock()

    def _may_take_lease(self, lease: JsonObject) -> bool:
        holder = lease["spec"].get("holderIdentity")
        if not holder or holder == self.identity:
            return True
        duration_s = lease["spec"].get("leaseDurationSeconds") or LEASE_DURATION_S
        return bool(self._clock() >= self._last_change_s + duration_s)

    def _make_lease(self, lease: JsonObject | None, *, is_released: bool = False) -> JsonObject:
        """Build the Lease to store, either held by this contender or released."""
        old_spec = lease["spec"] if lease is not None else {}
        now_text = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new_holder = old_spec.get("holderIdentity") != self.identity
        spec: JsonObject = {
            "leaseDurationSeconds": 1 if is_released else LEASE_DURATION_S,
            "renewTime": now_text,
            "acquireTime": now_text if is_new_holder else old_spec.get("acquireTime") or now_text,
            "leaseTransitions": (old_spec.get("leaseTransitions") or 0)
            + (lease is not None and is_new_holder),
        }
        if not is_released:
            spec["holderIdentity"] = self.identity
        # A PUT replaces the whole object, so the metadata keeps the labels set by the chart.
        metadata = lease["metadata"] if lease is not None else {"name": self._name}
        return {"apiVersion": _API_VERSION, "kind": "Lease", "metadata": metadata, "spec": spec}

    def _log_leadership_change(self) -> None:
        if self.is_leader != self._was_leader:
            self._was_leader = not self._was_leader
            _log.info("%s %s", self.identity, "leads" if self._was_leader else "no longer leads")
