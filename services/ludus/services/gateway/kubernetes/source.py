"""The environment servers behind a Service of a Kubernetes cluster.

    Following --slices that changed--> slices by name --merge by pod--> publish(endpoints)

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
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pydantic import Field, ValidationError

from ludus.env.security.session_ids import pod_server_id
from ludus.proto.errors import ConfigError
from ludus.services.gateway.fleet.endpoints import Endpoint, Publish
from ludus.services.gateway.kubernetes.following import Following, FollowOptions
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
_H2C = "kubernetes.io/h2c"
"""What a Service says of a port where HTTP/2 is spoken without TLS, as gRPC is."""
"""The names of a Service's ports."""
_GRPC_PORT_OFFSET = 10_000
"""What an environment server adds to its HTTP port unless told otherwise."""
_FAMILIES = {"FQDN": 0, "IPv6": 1, "IPv4": 2}
"""A pod of a dual-stack Service is reached at its address of the highest rank."""


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
    app_protocol: str | None = None


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
        options: FollowOptions | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._service = f"{namespace}/{service}"
        self._following = Following(
            api,
            resource_path(_API_VERSION, namespace, "endpointslices"),
            f"kubernetes.io/service-name={service}",
            f"endpoints of {self._service}",
            self._take_list,
            self._take,
            options=options,
            sleep=sleep,
        )
        self._slices: dict[str, SliceEndpoints] = {}
        self._published: dict[str, Endpoint] | None = None
        self._publish: Publish | None = None

    async def watch(self, publish: Publish) -> None:
        """Publish the whole list after the first LIST and on each change, for ever.

        Raises:
            ConfigError: from the start, none of the Service's ports can be the servers'. Later
                on, a slice that cannot be read is logged and keeps its last readable state.
        """
        self._publish = publish
        await self._following.run()

    async def close(self) -> None:
        """Do nothing: what runs is `watch`, which ends when it is cancelled."""

    def _take_list(self, items: Sequence[JsonObject]) -> None:
        slices: dict[str, SliceEndpoints] = {}
        problems: list[ConfigError] = []
        for item in items:
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
        self._publish_changes()

    def _take(self, event: WatchEvent) -> None:
        if event.type == EventType.DELETED:
            self._slices.pop(_name_of(event.object), None)
        else:
            try:
                read = slice_endpoints(event.object)
            except ConfigError as error:
                _log.error("%s: %s", self._service, error)
                return
            self._slices[read.name] = read
        self._publish_changes()

    def _publish_changes(self) -> None:
        found = merged(self._slices.values())
        if found != self._published:
            assert self._publish is not None, "it is watched"
            self._published = found
            self._publish(tuple(found.values()))


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


def _ports_of(read: _EndpointSlice) -> tuple[int | None, int]:
    """The HTTP port, if it is told, and the gRPC port.

    The latter by name or protocol, else as an environment server chooses it beside the former,
    which is the one with the name or the only one.
    """
    ports = {port.name or "": port.port for port in read.ports or () if port.port}
    speaking = [port.port for port in read.ports or () if port.app_protocol == _H2C]
    grpc_port = ports.get(_GRPC) or next(iter(speaking), None)
    http_port = ports.get(_HTTP)
    if grpc_port is None and http_port is None and len(ports) == 1:
        (http_port,) = ports.values()
    if grpc_port is None and http_port is not None:
        grpc_port = http_port + _GRPC_PORT_OFFSET
    if grpc_port is None or grpc_port > 65_535:
        names = ", ".join(f"{name or 'unnamed'}={port}" for name, port in ports.items())
        raise ConfigError(
            f"expected a port named {_GRPC!r} or {_HTTP!r} in EndpointSlice"
            f" {read.metadata.name}, or a single one, got {names or 'none'}; name the Service's"
            " ports so"
        )
    return http_port, grpc_port


def _endpoint(member: _Member, http_port: int | None, grpc_port: int) -> Endpoint:
    address = member.addresses[0]
    host = f"[{address}]" if ":" in address else address
    state = member.conditions
    is_terminating = state.terminating is True
    pod = member.target_ref
    http_address = f"http://{host}:{http_port}" if http_port is not None else ""
    grpc_address = f"grpc://{host}:{grpc_port}"
    server_id = pod_server_id(pod.uid) if pod is not None and pod.uid else ""
    return Endpoint(
        key=server_id or http_address or grpc_address,
        grpc_address=grpc_address,
        http_address=http_address,
        # publishNotReadyAddresses makes `ready` true whatever happens; `serving` tells.
        is_ready=state.ready is not False and state.serving is not False and not is_terminating,
        is_terminating=is_terminating,
        server_id=server_id,
        pod_name=pod.name if pod is not None and pod.kind == "Pod" else "",
    )


def _name_of(found: JsonObject) -> str:
    return str((found.get("metadata") or {}).get("name", ""))
