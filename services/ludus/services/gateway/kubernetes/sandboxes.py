"""Servers of agent-sandbox: a pod for each session, claimed from a warm pool.

    opens that wait --wake--> SandboxSource --create--> SandboxClaim --controller--> a pod
    fleet <--publish-- claims with an address <--Following-- API server
    sessions that ended --wake--> SandboxSource --delete--> SandboxClaim, and its pod with it

A gateway claims as many sandboxes as opens wait in its queue, places one session on each, and
deletes the claim when that session has ended, so that no session meets what another left. All
gateways list the claims of all: any of them routes to a session, but places none on a claim of
another, and none is claimed twice.

What ends on the server alone (idle, lingered, played through another gateway), and what a
gateway that died has left, is seen in the server's own count: a claim whose server has said for
`unused_after_s` that it holds no session is deleted by whichever gateway notices first. What is
left even then, the controller ends when the ids of such sessions have expired. Claims belong to
their pool and go with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import Field, ValidationError

from ludus.proto.errors import ClusterError
from ludus.services.gateway.config import SandboxEnvironment
from ludus.services.gateway.fleet.endpoints import Endpoint, Publish
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.kubernetes.following import Following
from ludus.services.kubernetes.api import (
    EventType,
    JsonObject,
    KubernetesApi,
    ObjectPart,
    WatchEvent,
    resource_path,
)

_log = logging.getLogger(__name__)

API_VERSION = "extensions.agents.x-k8s.io/v1beta1"
POOL_LABEL, GATEWAY_LABEL = "ludus.dev/warm-pool", "ludus.dev/gateway"
_NOT_FOUND = 404
_POOLS = "sandboxwarmpools"
_RETRY_S = 1.0
"""After a request that failed."""
_LEAVE_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """How patient the source is."""

    unused_after_s: float = 30.0
    """A claim without a session for so long is deleted."""
    look_each_s: float = 1.0
    """Between two looks for such claims."""
    max_parallel_requests: int = 16


class _Metadata(ObjectPart):
    name: str
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Condition(ObjectPart):
    type: str
    status: str
    message: str = ""


class _Sandbox(ObjectPart):
    pod_ips: list[str] | None = Field(None, alias="podIPs")


class _Status(ObjectPart):
    conditions: list[_Condition] | None = None
    sandbox: _Sandbox | None = None


class _Found(ObjectPart):
    metadata: _Metadata
    status: _Status = _Status()


@dataclass(frozen=True, slots=True)
class SandboxClaim:
    """A claim as a gateway sees it."""

    name: str
    is_own: bool
    """This gateway made it."""
    host: str = ""
    """Where its pod is; empty while it has none."""
    is_ready: bool = False
    is_ending: bool = False
    reason: str = ""
    """What the controller says of its state."""

    def endpoint(self, port: int) -> Endpoint:
        """Its server, on which one session is ever placed."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return Endpoint(
            key=self.name,
            grpc_address=f"grpc://{host}:{port}",
            http_address="",
            is_ready=self.is_ready,
            is_terminating=self.is_ending,
            max_opens=1 if self.is_own else 0,
        )


def read_claim(found: JsonObject, identity: str) -> SandboxClaim:
    """The claim in an object.

    Raises:
        ValidationError: it is none.
    """
    read = _Found.model_validate(found)
    conditions = read.status.conditions or ()
    ready = next((one for one in conditions if one.type == "Ready"), None)
    addresses = (read.status.sandbox and read.status.sandbox.pod_ips) or [""]
    return SandboxClaim(
        read.metadata.name,
        is_own=(read.metadata.labels or {}).get(GATEWAY_LABEL) == identity,
        host=addresses[0],
        is_ready=ready is not None and ready.status == "True",
        is_ending=read.metadata.deletion_timestamp is not None,
        reason=ready.message if ready is not None else "",
    )


class SandboxSource:
    """The claims of one warm pool as an `EndpointSource`, made and ended as sessions need them.

    Args:
        api: closed with the source.
        link_of: the link to the server of a claim.
        num_wanted: sessions that opens wait for.
        lifetime_s: how long a claim lasts at most.
    """

    def __init__(
        self,
        api: KubernetesApi,
        environment: SandboxEnvironment,
        link_of: Callable[[str], ServerLink | None],
        num_wanted: Callable[[], int],
        lifetime_s: float,
        options: SandboxOptions | None = None,
    ) -> None:
        self._api = api
        self._environment, self._pool = environment, environment.warm_pool
        self._link_of, self._num_wanted = link_of, num_wanted
        self._lifetime = timedelta(seconds=lifetime_s)
        self._options = options or SandboxOptions()
        self._identity = f"{socket.gethostname()[-50:].strip('-.')}-{secrets.token_hex(4)}"
        self._path = resource_path(API_VERSION, environment.namespace, "sandboxclaims")
        self._following = Following(
            api,
            self._path,
            f"{POOL_LABEL}={self._pool}",
            f"claims of {environment.namespace}/{self._pool}",
            self._take_list,
            self._take,
            on_failure=self._note_unfollowed,
        )
        self._claims: dict[str, SandboxClaim] = {}
        self._creating: set[str] = set()
        self._is_listed = False
        self._published: list[Endpoint] | None = None
        self._publish: Publish | None = None
        self._problem = ""
        self._retry_at_s = 0.0
        self._woken = asyncio.Event()
        self._requests = asyncio.Semaphore(self._options.max_parallel_requests)
        self._tasks: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Look at once: an open began to wait, or a session has ended."""
        self._woken.set()

    def shortage(self) -> str:
        """Why opens still wait."""
        if self._problem:
            return self._problem
        waiting = [one for one in self._spare() if not one.is_ready]
        said = next((one.reason for one in waiting if one.reason), "nothing said why")
        return (
            f"expected a sandbox of warm pool '{self._pool}' in time, got none (claims that wait:"
            f" {len(waiting)}; {said}); see: kubectl get sandboxclaims,sandboxwarmpools,pods"
        )

    async def watch(self, publish: Publish) -> None:
        """Publish the sandboxes that are claimed, and claim and end them, for ever."""
        self._publish = publish
        keeping = asyncio.create_task(self._keep())
        try:
            await self._following.run()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            # Another gateway places nothing on these.
            self._end([one for one in self._spare() if one.name not in self._creating])
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_LEAVE_WITHIN_S)

    async def close(self) -> None:
        """End all requests to the cluster."""
        for task in self._tasks:
            task.cancel()
        await self._api.close()

    # -- what there is -----------------------------------------------------------------

    def _take_list(self, items: Sequence[JsonObject]) -> None:
        found = [one for one in map(self._read, items) if one is not None]
        coming = {name: one for name, one in self._claims.items() if name in self._creating}
        self._claims = coming | {one.name: one for one in found}
        self._is_listed, self._problem = True, ""
        self._publish_changes()

    def _take(self, event: WatchEvent) -> None:
        claim = self._read(event.object)
        if claim is None:
            return
        if event.type == EventType.DELETED:
            self._claims.pop(claim.name, None)
        else:
            before = self._claims.get(claim.name)
            is_ending = claim.is_ending or (before is not None and before.is_ending)
            self._claims[claim.name] = replace(claim, is_ending=is_ending)
        self._publish_changes()

    def _read(self, found: JsonObject) -> SandboxClaim | None:
        try:
            return read_claim(found, self._identity)
        except ValidationError as error:
            _log.error("expected a SandboxClaim of %s, got: %s", API_VERSION, error)
            return None

    def _publish_changes(self) -> None:
        assert self._publish is not None, "it is watched"
        port = self._environment.grpc_port
        endpoints = [one.endpoint(port) for one in self._claims.values() if one.host]
        if endpoints != self._published:
            self._published = endpoints
            self._publish(endpoints)

    def _note_unfollowed(self, error: ClusterError) -> None:
        if self._is_listed:
            return
        self._problem = f"no sandbox can be claimed: {error}"
        if error.status == _NOT_FOUND:
            self._problem = (
                f"expected agent-sandbox with its extensions ({API_VERSION}) in this cluster, found"
                " none; install it, or set mode: shared"
            )
            self._publish_changes()  # the gateway's other environments need not wait

    # -- what there should be ----------------------------------------------------------

    async def _keep(self) -> None:
        """Claim what is wanted and end what is over, when woken and at intervals, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            self._woken.clear()
            if self._is_listed and loop.time() >= self._retry_at_s:
                self._end([one for one in self._claims.values() if self._is_over(one)])
                self._claim(self._num_wanted() - len(self._spare()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self._options.look_each_s)

    def _spare(self) -> list[SandboxClaim]:
        """This gateway's claims that no session was placed on yet."""
        return [
            one
            for one in self._claims.values()
            if one.is_own and not one.is_ending and not _is_used(self._link_of(one.name))
        ]

    def _is_over(self, claim: SandboxClaim) -> bool:
        link = self._link_of(claim.name)
        if link is None or claim.is_ending:
            return False
        if link.has_ended:
            return True
        if link.is_connected:
            return link.unused_s > self._options.unused_after_s
        # A gateway that is cut off from pods must not end what others reach.
        is_known = claim.is_own or not claim.is_ready
        unused_s = asyncio.get_running_loop().time() - link.used_s
        return is_known and unused_s > self._options.unused_after_s

    def _claim(self, num_claims: int) -> None:
        if num_claims <= 0:
            return
        names = [f"{self._pool[:52]}-{secrets.token_hex(5)}" for _ in range(num_claims)]
        self._claims |= {name: SandboxClaim(name, is_own=True) for name in names}
        self._creating.update(names)
        self._start(self._create(names))

    async def _create(self, names: list[str]) -> None:
        place = self._environment.namespace
        try:
            # Read each time: of a pool that was made anew, claims of the old one would be removed.
            pool = await self._api.read(resource_path(API_VERSION, place, _POOLS, self._pool))
        except ClusterError as error:
            self._note_refusal(error, names)
        else:
            await asyncio.gather(*(self._create_one(name, pool) for name in names))
        self._creating.difference_update(names)

    async def _create_one(self, name: str, pool: JsonObject) -> None:
        try:
            async with self._requests:
                await self._api.create(self._path, self._body(name, pool))
            self._problem = ""
        except ClusterError as error:
            self._note_refusal(error, [name])

    def _body(self, name: str, pool: JsonObject) -> JsonObject:
        end = datetime.now(UTC) + self._lifetime
        owner = {"apiVersion": API_VERSION, "kind": "SandboxWarmPool", "name": self._pool}
        return {
            "apiVersion": API_VERSION,
            "kind": "SandboxClaim",
            "metadata": {
                "name": name,
                "namespace": self._environment.namespace,
                "labels": {POOL_LABEL: self._pool, GATEWAY_LABEL: self._identity},
                "ownerReferences": [owner | {"uid": pool["metadata"]["uid"]}],
            },
            "spec": {
                "warmPoolRef": {"name": self._pool},
                "lifecycle": {
                    "shutdownPolicy": "Delete",
                    "shutdownTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
                },
            },
        }

    def _end(self, claims: Iterable[SandboxClaim]) -> None:
        for claim in claims:
            self._claims[claim.name] = replace(claim, is_ending=True)
            self._start(self._delete(claim))
        self._publish_changes()  # nothing is placed there any more

    async def _delete(self, claim: SandboxClaim) -> None:
        try:
            async with self._requests:
                await self._api.delete(f"{self._path}/{claim.name}")
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                if claim.name in self._claims:
                    self._claims[claim.name] = claim
                self._note_refusal(error, ())

    def _note_refusal(self, error: ClusterError, names: Iterable[str]) -> None:
        for name in names:
            self._claims.pop(name, None)
        if not self._problem:
            _log.warning("claims of warm pool '%s': %s", self._pool, error)
        self._problem = f"no sandbox can be claimed from warm pool '{self._pool}': {error}"
        self._retry_at_s = asyncio.get_running_loop().time() + _RETRY_S

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_used(link: ServerLink | None) -> bool:
    return link is not None and link.num_placed > 0
