"""A source for the environment servers behind a Kubernetes Service.

    ListFollower --changed slices--> slices by name --merge by pod--> publish(endpoints)

A Service's endpoints are spread over EndpointSlices of about 100 pods each. During a rebalance a
pod may be in two slices, or briefly have old conditions. Each change therefore rebuilds the whole
list from all slices. For 2,000 pods this takes about a millisecond, half of it to parse the slice.

Nothing is published before the first LIST has succeeded, so a gateway never becomes ready with an
incomplete list. After that an unreachable API server changes nothing: the last list stays valid,
and sessions continue.

Meaning of a pod's conditions:

    ready  serving  terminating
    true   true     false        accepts new sessions (`ready` unknown counts as true)
    any    false    false        unready: keeps its sessions, accepts no new ones
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
from ludus.services.gateway.fleet.endpoints import Publish, ServerEndpoint
from ludus.services.gateway.kubernetes.follower import FollowOptions, ListFollower
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
"""Names of a Service's ports."""
_H2C = "kubernetes.io/h2c"
"""The appProtocol of a port for HTTP/2 without TLS, which gRPC uses."""
_GRPC_PORT_OFFSET = 10_000
"""Default difference between a server's gRPC port and its HTTP port."""
_FAMILY_RANKS = {"FQDN": 0, "IPv6": 1, "IPv4": 2}
"""Rank of address types; a dual-stack pod is reached at the address with the highest rank."""


class _PodReference(ObjectPart):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _MemberConditions(ObjectPart):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _SliceMember(ObjectPart):
    addresses: list[str] = Field(min_length=1)
    conditions: _MemberConditions = _MemberConditions()
    target_ref: _PodReference | None = None


class _SlicePort(ObjectPart):
    name: str | None = None
    port: int | None = None
    app_protocol: str | None = None


class _SliceMetadata(ObjectPart):
    name: str
    resource_version: str = ""


class _EndpointSlice(ObjectPart):
    metadata: _SliceMetadata
    address_type: str = "IPv4"
    endpoints: list[_SliceMember] | None = None
    ports: list[_SlicePort] | None = None


@dataclass(frozen=True, slots=True)
class SliceEndpoints:
    """The endpoints of one EndpointSlice."""

    name: str
    family_rank: int
    revision: int
    """Version of the slice; if two slices contain a pod, the higher version is newer."""
    endpoints: tuple[ServerEndpoint, ...]


class EndpointSliceSource:
    """An `EndpointSource` for the pods behind a Service.

    Args:
        api: shared client; its creator closes it.
        service: the environment's headless Service in `namespace`.
        sleep: waits between two attempts.
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
        self._follower = ListFollower(
            api,
            resource_path(_API_VERSION, namespace, "endpointslices"),
            f"kubernetes.io/service-name={service}",
            f"endpoints of {self._service}",
            self._handle_list,
            self._handle_event,
            options=options,
            sleep=sleep,
        )
        self._slices: dict[str, SliceEndpoints] = {}
        self._published: dict[str, ServerEndpoint] | None = None
        self._publish: Publish | None = None

    async def watch(self, publish: Publish) -> None:
        """Publish the whole list after the first LIST and after each change, until cancelled.

        Raises:
            ConfigError: the first LIST contains no valid slice. A slice that is not valid later
                is logged and keeps its last valid state.
        """
        self._publish = publish
        await self._follower.run()

    async def close(self) -> None:
        """Do nothing, because only `watch` runs, and its caller cancels it."""

    def _handle_list(self, items: Sequence[JsonObject]) -> None:
        slices: dict[str, SliceEndpoints] = {}
        problems: list[ConfigError] = []
        for item in items:
            try:
                endpoint_slice = parse_slice(item)
                slices[endpoint_slice.name] = endpoint_slice
            except ConfigError as error:
                problems.append(error)
                name = _read_name(item)
                if name in self._slices:
                    slices[name] = self._slices[name]
        if problems and self._published is None and not slices:
            raise problems[0]
        for problem in problems:
            _log.error("%s: %s", self._service, problem)
        self._slices = slices
        self._publish_changes()

    def _handle_event(self, event: WatchEvent) -> None:
        if event.type == EventType.DELETED:
            self._slices.pop(_read_name(event.object), None)
        else:
            try:
                endpoint_slice = parse_slice(event.object)
            except ConfigError as error:
                _log.error("%s: %s", self._service, error)
                return
            self._slices[endpoint_slice.name] = endpoint_slice
        self._publish_changes()

    def _publish_changes(self) -> None:
        endpoints = merge_slices(self._slices.values())
        if endpoints != self._published:
            assert self._publish is not None, "`watch` has started"
            self._published = endpoints
            self._publish(tuple(endpoints.values()))


def parse_slice(raw: JsonObject) -> SliceEndpoints:
    """Parse the endpoints of an EndpointSlice object.

    Raises:
        ConfigError: the object is not valid, or has no port that could be the servers' port.
    """
    try:
        slice_object = _EndpointSlice.model_validate(raw)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(
            f"expected an EndpointSlice of {_API_VERSION}, got {_read_name(raw)!r} with"
            f" {problem['msg']} at {'.'.join(map(str, problem['loc']))}"
        ) from error
    endpoints: tuple[ServerEndpoint, ...] = ()
    if slice_object.endpoints:
        http_port, grpc_port = _choose_ports(slice_object)
        endpoints = tuple(
            _make_endpoint(member, http_port, grpc_port) for member in slice_object.endpoints
        )
    version = slice_object.metadata.resource_version
    return SliceEndpoints(
        name=slice_object.metadata.name,
        family_rank=_FAMILY_RANKS.get(slice_object.address_type, 0),
        # Versions of one kind of object increase.
        revision=int(version) if version.isdecimal() else 0,
        endpoints=endpoints,
    )


def merge_slices(slices: Iterable[SliceEndpoints]) -> dict[str, ServerEndpoint]:
    """Merge the slices into one endpoint per pod, by key.

    The newest slice with a pod counts. A pod that terminates in any slice counts as terminating,
    because termination is final.
    """
    result: dict[str, ServerEndpoint] = {}
    terminating: set[str] = set()
    for slice_ in sorted(slices, key=lambda slice_: (slice_.family_rank, slice_.revision)):
        for endpoint in slice_.endpoints:
            result[endpoint.key] = endpoint
            if endpoint.is_terminating:
                terminating.add(endpoint.key)
    for key in terminating:
        if not result[key].is_terminating:
            result[key] = replace(result[key], is_ready=False, is_terminating=True)
    return result


def _choose_ports(parsed: _EndpointSlice) -> tuple[int | None, int]:
    """Return the HTTP port, if known, and the gRPC port.

    The HTTP port is the port with its name, or the only port. The gRPC port is the port with its
    name or protocol, otherwise the HTTP port plus the default offset.
    """
    ports = {port.name or "": port.port for port in parsed.ports or () if port.port}
    h2c_ports = [port.port for port in parsed.ports or () if port.app_protocol == _H2C]
    grpc_port = ports.get(_GRPC) or next(iter(h2c_ports), None)
    http_port = ports.get(_HTTP)
    if grpc_port is None and http_port is None and len(ports) == 1:
        (http_port,) = ports.values()
    if grpc_port is None and http_port is not None:
        grpc_port = http_port + _GRPC_PORT_OFFSET
    if grpc_port is None or grpc_port > 65_535:
        names = ", ".join(f"{name or 'unnamed'}={port}" for name, port in ports.items())
        raise ConfigError(
            f"EndpointSlice {parsed.metadata.name} needs a port named {_GRPC!r} or {_HTTP!r}, or"
            f" only one port, got {names or 'none'}; rename the Service's ports"
        )
    return http_port, grpc_port


def _make_endpoint(member: _SliceMember, http_port: int | None, grpc_port: int) -> ServerEndpoint:
    address = member.addresses[0]
    host = f"[{address}]" if ":" in address else address
    conditions = member.conditions
    is_terminating = conditions.terminating is True
    pod = member.target_ref
    http_address = f"http://{host}:{http_port}" if http_port is not None else ""
    grpc_address = f"grpc://{host}:{grpc_port}"
    server_id = pod_server_id(pod.uid) if pod is not None and pod.uid else ""
    return ServerEndpoint(
        key=server_id or http_address or grpc_address,
        grpc_address=grpc_address,
        http_address=http_address,
        # publishNotReadyAddresses makes `ready` always true, so `serving` decides.
        is_ready=conditions.ready is not False
        and conditions.serving is not False
        and not is_terminating,
        is_terminating=is_terminating,
        server_id=server_id,
        pod_name=pod.name if pod is not None and pod.kind == "Pod" else "",
    )


def _read_name(raw: JsonObject) -> str:
    return str((raw.get("metadata") or {}).get("name", ""))
