"""A source of agent-sandbox servers: one pod per session, claimed from a warm pool.

    waiting opens --wake--> SandboxSource --create--> SandboxClaim --controller--> pod
    fleet <--publish-- claims with an address <--ListFollower-- API server
    ended sessions --wake--> SandboxSource --delete--> SandboxClaim and its pod

A gateway claims one sandbox per requested session, places one session on each sandbox, and deletes
the claim after that session has ended. A session therefore never sees the data of another session.
All gateways list all claims, so that each of them can route calls to any session. A gateway places
sessions only on sandboxes that it claimed itself.

The gateway does not notice every end of a session: a session may time out on its server, or end
through another gateway, and the gateway that claimed the sandbox may have died. Gateways therefore
poll the number of sessions. If a server reports no session for `max_unused_s`, the first gateway
that notices deletes the claim. The controller deletes any other claim when the ids of its sessions
have expired. A claim is owned by its pool, so it is deleted with the pool.
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

from ludus.env.types import JsonObject
from ludus.proto.errors import ClusterError
from ludus.services.gateway.config import SandboxEnvironment
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.fleet.sources import PublishCallback, ServerEndpoint
from ludus.services.gateway.kubernetes.follower import ListFollower
from ludus.services.kubernetes.api import EventType, KubernetesApi, WatchEvent, make_resource_path

_log = logging.getLogger(__name__)

API_VERSION = "extensions.agents.x-k8s.io/v1beta1"
POOL_LABEL, GATEWAY_LABEL = "ludus.dev/warm-pool", "ludus.dev/gateway"
_NOT_FOUND = 404
_RETRY_S = 1.0
"""Delay after a failed request, in seconds."""
STOP_TIMEOUT_S = 2.0
_MAX_PARALLEL_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class SandboxClaim:
    """A sandbox claim, as seen by one gateway."""

    name: str
    is_from_this_gateway: bool
    """True if this gateway, and not another, created the claim."""
    host: str = ""
    """IP address of the claim's pod; empty while it has none."""
    pod_name: str = ""
    """Name of the claim's pod, which is the id of its server; empty while it has none."""
    is_ready: bool = False
    is_ending: bool = False
    reason: str = ""
    """The controller's message about the state of the claim."""

    def make_endpoint(self, port: int) -> ServerEndpoint:
        """Return the endpoint of the claim's server, for a single session."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return ServerEndpoint(
            key=self.name,
            grpc_address=f"grpc://{host}:{port}",
            http_address="",
            is_ready=self.is_ready,
            is_terminating=self.is_ending,
            server_id=self.pod_name,
            pod_name=self.pod_name,
            max_opens=1 if self.is_from_this_gateway else 0,
        )


def parse_claim(claim_object: JsonObject, identity: str) -> SandboxClaim:
    """Parse a SandboxClaim object, as seen by the gateway `identity`."""
    metadata, status = claim_object["metadata"], claim_object.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    ready_condition = conditions.get("Ready", {})
    sandbox = status.get("sandbox") or {}
    addresses = sandbox.get("podIPs") or [""]
    return SandboxClaim(
        metadata["name"],
        is_from_this_gateway=(metadata.get("labels") or {}).get(GATEWAY_LABEL) == identity,
        host=addresses[0],
        pod_name=sandbox.get("name", ""),  # a sandbox and its pod have the same name
        is_ready=ready_condition.get("status") == "True",
        is_ending=metadata.get("deletionTimestamp") is not None,
        reason=ready_condition.get("message", ""),
    )


class SandboxSource:
    """An `EndpointSource` that creates and deletes claims of one warm pool on demand.

    Args:
        api: API client, which `close` closes.
        find_link: returns the link to a claim's server, by the claim's name.
        read_num_requested: returns the number of sessions that waiting opens requested.
        lifetime_s: maximum lifetime of a claim, in seconds.
        max_unused_s: seconds without a session after which a claim is deleted.
        check_interval_s: seconds between two checks for claims to create or delete.
    """

    def __init__(
        self,
        api: KubernetesApi,
        environment: SandboxEnvironment,
        find_link: Callable[[str], ServerLink | None],
        read_num_requested: Callable[[], int],
        lifetime_s: float,
        *,
        max_unused_s: float = 30.0,
        check_interval_s: float = 1.0,
    ) -> None:
        self._api = api
        self._environment, self._pool_name = environment, environment.warm_pool
        self._find_link, self._read_num_requested = find_link, read_num_requested
        self._lifetime = timedelta(seconds=lifetime_s)
        self._max_unused_s, self._check_interval_s = max_unused_s, check_interval_s
        self._identity = f"{socket.gethostname()[-50:].strip('-.')}-{secrets.token_hex(4)}"
        self._path = make_resource_path(API_VERSION, environment.namespace, "sandboxclaims")
        self._follower = ListFollower(
            api,
            self._path,
            f"{POOL_LABEL}={self._pool_name}",
            f"claims of {environment.namespace}/{self._pool_name}",
            self._handle_list,
            self._handle_event,
            on_failure=self._record_follow_failure,
        )
        self._claims: dict[str, SandboxClaim] = {}
        self.new_names: set[str] = set()
        """Names of the claims that are being created."""
        self._is_listed = False
        self._published_endpoints: list[ServerEndpoint] | None = None
        self._publish: PublishCallback | None = None
        self._problem = ""
        self._retry_at_s = 0.0
        self._wake_event = asyncio.Event()
        self._request_slots = asyncio.Semaphore(_MAX_PARALLEL_REQUESTS)
        self._tasks: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Check the demand now, because an open started to wait or a session ended."""
        self._wake_event.set()

    def explain_shortage(self) -> str:
        """Return the reason why no sandbox became ready, with a remedy."""
        if self._problem:
            return self._problem
        claims = [claim for claim in self._list_unused_claims() if not claim.is_ready]
        reason = next((claim.reason for claim in claims if claim.reason), "no reason given")
        return (
            f"no sandbox of warm pool '{self._pool_name}' became ready in time (waiting claims:"
            f" {len(claims)}; {reason}); see: kubectl get sandboxclaims,sandboxwarmpools,pods"
        )

    async def watch(self, publish: PublishCallback) -> None:
        """Publish the claimed sandboxes, and create and delete claims, until cancelled."""
        self._publish = publish
        claim_task = asyncio.create_task(self._manage_claims_forever())
        try:
            await self._follower.run()
        finally:
            claim_task.cancel()
            await asyncio.gather(claim_task, return_exceptions=True)
            # No other gateway would use the unused claims.
            claims = self._list_unused_claims()
            self._start_deletes([claim for claim in claims if claim.name not in self.new_names])
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)

    async def close(self) -> None:
        """Close all requests to the cluster."""
        for task in self._tasks:
            task.cancel()
        await self._api.close()

    # -- listed claims ----------------------------------------------------------------

    def _handle_list(self, claim_objects: Sequence[JsonObject]) -> None:
        claims = [parse_claim(claim_object, self._identity) for claim_object in claim_objects]
        new_claims = {name: claim for name, claim in self._claims.items() if name in self.new_names}
        self._claims = new_claims | {claim.name: claim for claim in claims}
        self._is_listed, self._problem = True, ""
        self._publish_changes()

    def _handle_event(self, event: WatchEvent) -> None:
        claim = parse_claim(event.object, self._identity)
        if event.type == EventType.DELETED:
            self._claims.pop(claim.name, None)
        else:
            old_claim = self._claims.get(claim.name)
            is_ending = claim.is_ending or (old_claim is not None and old_claim.is_ending)
            self._claims[claim.name] = replace(claim, is_ending=is_ending)
        self._publish_changes()

    def _publish_changes(self) -> None:
        assert self._publish is not None, "`watch` has started"
        port = self._environment.grpc_port
        endpoints = [claim.make_endpoint(port) for claim in self._claims.values() if claim.host]
        if endpoints != self._published_endpoints:
            self._published_endpoints = endpoints
            self._publish(endpoints)

    def _record_follow_failure(self, error: ClusterError) -> None:
        if self._is_listed:
            return
        self._problem = f"cannot claim a sandbox: {error}"
        if error.status == _NOT_FOUND:
            self._problem = (
                f"this cluster does not have agent-sandbox with its extensions ({API_VERSION});"
                " install it, or set mode: shared"
            )
            # Publish an empty list, so that the gateway's other environments do not wait for one.
            self._publish_changes()

    # -- creation and deletion of claims -----------------------------------------------

    async def _manage_claims_forever(self) -> None:
        """Create requested claims and delete unused ones, when woken and at intervals."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake_event.clear()
            if self._is_listed and loop.time() >= self._retry_at_s:
                claims = [claim for claim in self._claims.values() if self._should_delete(claim)]
                self._start_deletes(claims)
                self._start_claims(self._read_num_requested() - len(self._list_unused_claims()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake_event.wait(), self._check_interval_s)

    def _list_unused_claims(self) -> list[SandboxClaim]:
        """Return the claims of this gateway on which no session was placed yet."""
        return [
            claim
            for claim in self._claims.values()
            if claim.is_from_this_gateway
            and not claim.is_ending
            and not _is_used(self._find_link(claim.name))
        ]

    def _should_delete(self, claim: SandboxClaim) -> bool:
        link = self._find_link(claim.name)
        if link is None or claim.is_ending:
            return False
        if link.is_used_up:
            return True
        if link.is_connected:
            return link.unused_s > self._max_unused_s
        # A gateway that cannot reach pods must not delete claims that other gateways use.
        may_delete = claim.is_from_this_gateway or not claim.is_ready
        unused_s = asyncio.get_running_loop().time() - link.last_used_s
        return may_delete and unused_s > self._max_unused_s

    def _start_claims(self, num_claims: int) -> None:
        if num_claims <= 0:
            return
        names = [f"{self._pool_name[:52]}-{secrets.token_hex(5)}" for _ in range(num_claims)]
        self._claims |= {name: SandboxClaim(name, is_from_this_gateway=True) for name in names}
        self.new_names.update(names)
        self._start_task(self._create_claims(names))

    async def _create_claims(self, names: list[str]) -> None:
        path = make_resource_path(
            API_VERSION, self._environment.namespace, "sandboxwarmpools", self._pool_name
        )
        try:
            # Read each time: if the pool was replaced, claims with its old uid would be deleted.
            pool = await self._api.read(path)
        except ClusterError as error:
            self._record_failure(error, names)
        else:
            await asyncio.gather(*(self._create_claim(name, pool) for name in names))
        self.new_names.difference_update(names)

    async def _create_claim(self, name: str, pool: JsonObject) -> None:
        try:
            async with self._request_slots:
                await self._api.create(self._path, self._make_claim_object(name, pool))
            self._problem = ""
        except ClusterError as error:
            self._record_failure(error, [name])

    def _make_claim_object(self, name: str, pool: JsonObject) -> JsonObject:
        shutdown_time = (datetime.now(UTC) + self._lifetime).strftime("%Y-%m-%dT%H:%M:%SZ")
        owner = {"apiVersion": API_VERSION, "kind": "SandboxWarmPool", "name": self._pool_name}
        return {
            "apiVersion": API_VERSION,
            "kind": "SandboxClaim",
            "metadata": {
                "name": name,
                "namespace": self._environment.namespace,
                "labels": {POOL_LABEL: self._pool_name, GATEWAY_LABEL: self._identity},
                "ownerReferences": [owner | {"uid": pool["metadata"]["uid"]}],
            },
            "spec": {
                "warmPoolRef": {"name": self._pool_name},
                "lifecycle": {"shutdownPolicy": "Delete", "shutdownTime": shutdown_time},
            },
        }

    def _start_deletes(self, claims: Iterable[SandboxClaim]) -> None:
        for claim in claims:
            self._claims[claim.name] = replace(claim, is_ending=True)
            self._start_task(self._delete_claim(claim))
        self._publish_changes()  # so that no session is placed on a deleted claim

    async def _delete_claim(self, claim: SandboxClaim) -> None:
        try:
            async with self._request_slots:
                await self._api.delete(f"{self._path}/{claim.name}")
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                if claim.name in self._claims:
                    self._claims[claim.name] = claim
                self._record_failure(error, ())

    def _record_failure(self, error: ClusterError, names: Iterable[str]) -> None:
        for name in names:
            self._claims.pop(name, None)
        if not self._problem:
            _log.warning("cannot change claims of warm pool '%s': %s", self._pool_name, error)
        self._problem = f"cannot claim a sandbox of warm pool '{self._pool_name}': {error}"
        self._retry_at_s = asyncio.get_running_loop().time() + _RETRY_S

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_used(link: ServerLink | None) -> bool:
    return link is not None and link.num_placed_sessions > 0
