"""The environment servers behind a Service of a Kubernetes cluster.

    API server --LIST, then WATCH--> slices by name --merge by pod--> publish(endpoints)

A Service's endpoints are spread over EndpointSlices of about 100 pods each; while they are
rebalanced, a pod stands in two slices or, for an instant, with old conditions. Each change
therefore rebuilds the whole list from all slices: for 2,000 pods that is about a millisecond,
half of it for reading the slice.

Nothing is published before the first LIST has succeeded, so a gateway that waits for the
first list to become ready never routes on half of one. After that an unreachable API server
changes nothing: the last good list stays, and sessions continue. Who waits for whom: nobody
waits for the source; it waits for the API server.

What a pod's conditions mean here:

    ready  serving  terminating
    true   true     false        takes new sessions (`ready` unknown counts as true)
    any    false    false        unready: keeps its sessions, takes no new ones
    any    any      true         terminating: keeps its sessions until it is gone
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace

from pydantic import Field, ValidationError

from ludus.env.backoff import doubling
from ludus.env.security.session_ids import server_id_of
from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.gateway.fleet.endpoints import Endpoint, Publish
from ludus.services.kubernetes.api import (
    EventType,
    JsonObject,
    KubernetesApi,
    ObjectPart,
    WatchEvent,
    resource_path,
)

_log = logging.getLogger(__name__)

_API_VERSION = "discovery.k8s.io/v1"
_HTTP, _GRPC = "http", "grpc"
"""The names of a Service's ports."""
_GRPC_PORT_OFFSET = 10_000
"""What an environment server adds to its HTTP port unless told otherwise."""
_FAMILIES = {"FQDN": 0, "IPv6": 1, "IPv4": 2}
"""A pod of a dual-stack Service is reached at its address of the highest rank."""
_STEADY_S = 10.0
"""A watch that lasted so long, or said something, was a good one."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How patient the source is."""

    watch_timeout_s: int = 300
    """The server is asked to end a watch after 80 to 100 % of this, so that gateways which
    started together do not come back together."""
    first_retry_s: float = 0.5
    max_retry_s: float = 30.0


class _Reference(ObjectPart):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Conditions(ObjectPart):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Member(ObjectPart):
    addresses: list[str] = Field(min_length=1)
    conditions: _Conditions = _Conditions()
    target_ref: _Reference | None = None


class _Port(ObjectPart):
    name: str | None = None
    port: int | None = None


class _Metadata(ObjectPart):
    name: str
    resource_version: str = ""


class _EndpointSlice(ObjectPart):
    metadata: _Metadata
    address_type: str = "IPv4"
    endpoints: list[_Member] | None = None
    ports: list[_Port] | None = None


@dataclass(frozen=True, slots=True)
class SliceEndpoints:
    """The endpoints of one EndpointSlice."""

    name: str
    family_rank: int
    revision: int
    """Which of two slices that hold the same pod is the newer one."""
    endpoints: tuple[Endpoint, ...]


class EndpointSliceSource:
    """The pods behind a Service, as an `EndpointSource`.

    Args:
        api: shared with others, and closed by whoever made it.
        service: the environment's (headless) Service, in `namespace`.
        sleep: what waits between two tries.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        service: str,
        options: SourceOptions | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._options = options or SourceOptions()
        self._service = f"{namespace}/{service}"
        self._path = resource_path(_API_VERSION, namespace, "endpointslices")
        self._query = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._slices: dict[str, SliceEndpoints] = {}
        self._published: dict[str, Endpoint] | None = None
        self._version = ""
        """Where a watch continues; empty when the list has to be read again."""
        self._sleep = sleep
        self._problem = -1
        """The status of the failure that was told; -1 while there is none."""

    async def watch(self, publish: Publish) -> None:
        """Publish the whole list after the first LIST and on each change, for ever.

        Raises:
            ConfigError: from the start, none of the Service's ports can be the servers'. Later
                on, a slice that cannot be read is logged and keeps its last readable state.
        """
        options = self._options
        pauses = doubling(options.first_retry_s, options.max_retry_s)
        while True:
            started_s, before = time.monotonic(), self._version
            failed: ClusterError | None = None
            try:
                if not self._version:
                    await self._list(publish)
                await self._follow(publish)
            except ClusterError as error:
                failed = error
                self._note(error)
            if self._version != before or time.monotonic() - started_s >= _STEADY_S:
                pauses = doubling(options.first_retry_s, options.max_retry_s)
                if failed is None:
                    continue
            asked_s = failed.retry_after_s if failed is not None else 0.0
            pause_s = min(max(next(pauses), asked_s), options.max_retry_s)
            await self._sleep(pause_s * random.uniform(0.5, 1.0))

    async def close(self) -> None:
        """Do nothing: what runs is `watch`, which ends when it is cancelled."""

    async def _list(self, publish: Publish) -> None:
        found = await self._api.read(self._path, self._query)
        self._note_answer()
        slices: dict[str, SliceEndpoints] = {}
        problems: list[ConfigError] = []
        for item in found.get("items") or ():
            try:
                read = slice_endpoints(item)
                slices[read.name] = read
            except ConfigError as error:
                problems.append(error)
                name = _name_of(item)
                if name in self._slices:
                    slices[name] = self._slices[name]
        if problems and self._published is None and not slices:
            raise problems[0]
        for problem in problems:
            _log.error("%s: %s", self._service, problem)
        self._slices = slices
        self._version = str((found.get("metadata") or {}).get("resourceVersion", ""))
        self._publish_changes(publish)

    async def _follow(self, publish: Publish) -> None:
        watch = self._api.watch(
            self._path,
            version=self._version,
            timeout_s=max(1, round(self._options.watch_timeout_s * random.uniform(0.8, 1.0))),
            query=self._query,
        )
        async with aclosing(watch) as events:
            async for event in events:
                self._note_answer()
                self._take(event)
                self._publish_changes(publish)

    def _take(self, event: WatchEvent) -> None:
        metadata = event.object.get("metadata") or {}
        self._version = str(metadata.get("resourceVersion") or self._version)
        if event.type == EventType.BOOKMARK:
            return
        if event.type == EventType.DELETED:
            self._slices.pop(_name_of(event.object), None)
            return
        try:
            read = slice_endpoints(event.object)
        except ConfigError as error:
            _log.error("%s: %s", self._service, error)
            return
        self._slices[read.name] = read

    def _publish_changes(self, publish: Publish) -> None:
        found = merged(self._slices.values())
        if found != self._published:
            self._published = found
            publish(tuple(found.values()))

    def _note(self, error: ClusterError) -> None:
        if error.status == 410:
            _log.info("%s changed too much since the last look; listing again", self._service)
            self._version = ""
        elif error.status != self._problem:
            self._problem = error.status
            _log.warning("%s keeps its last known endpoints: %s", self._service, error)

    def _note_answer(self) -> None:
        if self._problem >= 0:
            self._problem = -1
            _log.info("%s: the API server answers again", self._service)


def slice_endpoints(found: JsonObject) -> SliceEndpoints:
    """The endpoints that an EndpointSlice object speaks of.

    Raises:
        ConfigError: it cannot be read, or names no port that could be the servers'.
    """
    try:
        read = _EndpointSlice.model_validate(found)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(
            f"expected an EndpointSlice of {_API_VERSION}, got {_name_of(found)!r} with"
            f" {problem['msg']} at {'.'.join(map(str, problem['loc']))}"
        ) from error
    endpoints: tuple[Endpoint, ...] = ()
    if read.endpoints:
        http_port, grpc_port = _ports_of(read)
        endpoints = tuple(_endpoint(member, http_port, grpc_port) for member in read.endpoints)
    version = read.metadata.resource_version
    return SliceEndpoints(
        name=read.metadata.name,
        family_rank=_FAMILIES.get(read.address_type, 0),
        # Versions of one kind grow, and only here does it matter which of two is greater.
        revision=int(version) if version.isdecimal() else 0,
        endpoints=endpoints,
    )


def merged(slices: Iterable[SliceEndpoints]) -> dict[str, Endpoint]:
    """Each pod of the slices once, by key.

    The newest slice that holds a pod is believed; that a pod terminates is believed of any,
    because no pod comes back from that.
    """
    found: dict[str, Endpoint] = {}
    terminating: set[str] = set()
    for part in sorted(slices, key=lambda part: (part.family_rank, part.revision)):
        for endpoint in part.endpoints:
            found[endpoint.key] = endpoint
            if endpoint.is_terminating:
                terminating.add(endpoint.key)
    for key in terminating:
        if not found[key].is_terminating:
            found[key] = replace(found[key], is_ready=False, is_terminating=True)
    return found


def _ports_of(read: _EndpointSlice) -> tuple[int, int]:
    """The HTTP and the gRPC port: by name, else as an environment server chooses them."""
    ports = {port.name or "": port.port for port in read.ports or () if port.port}
    http_port = ports.get(_HTTP)
    if http_port is None and len(ports) == 1:
        http_port = ports.get("")  # the one port of a Service needs no name
    grpc_port = ports.get(_GRPC)
    if grpc_port is None and http_port is not None:
        grpc_port = http_port + _GRPC_PORT_OFFSET
    if http_port is None or grpc_port is None or grpc_port > 65_535:
        names = ", ".join(f"{name or 'unnamed'}={port}" for name, port in ports.items())
        raise ConfigError(
            f"expected ports named {_HTTP!r} and {_GRPC!r} in EndpointSlice"
            f" {read.metadata.name}, got {names or 'none'}; name the Service's ports so"
        )
    return http_port, grpc_port


def _endpoint(member: _Member, http_port: int, grpc_port: int) -> Endpoint:
    address = member.addresses[0]
    host = f"[{address}]" if ":" in address else address
    state = member.conditions
    is_terminating = state.terminating is True
    pod = member.target_ref
    http_address = f"http://{host}:{http_port}"
    server_id = server_id_of(pod.uid) if pod is not None and pod.uid else ""
    return Endpoint(
        key=server_id or http_address,
        grpc_address=f"grpc://{host}:{grpc_port}",
        http_address=http_address,
        # publishNotReadyAddresses makes `ready` true whatever happens; `serving` tells.
        is_ready=state.ready is not False and state.serving is not False and not is_terminating,
        is_terminating=is_terminating,
        server_id=server_id,
        pod_name=pod.name if pod is not None and pod.kind == "Pod" else "",
    )


def _name_of(found: JsonObject) -> str:
    return str((found.get("metadata") or {}).get("name", ""))
