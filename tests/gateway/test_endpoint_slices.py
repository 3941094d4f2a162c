"""Parsing of EndpointSlices into server endpoints."""

from __future__ import annotations

import sys

import pytest

from ludus.env.security.session_ids import SessionKey, make_pod_server_id
from ludus.proto.errors import ConfigError
from ludus.services.gateway.fleet.sources import ServerEndpoint
from ludus.services.gateway.kubernetes.source import merge_slices, parse_slice
from tests.gateway.cluster_objects import make_endpoint_slice, make_server_id, member


@pytest.mark.parametrize(
    ("conditions", "is_ready", "is_terminating"),
    [
        ({"ready": True}, True, False),
        ({"ready": None, "serving": None, "terminating": None}, True, False),
        ({"ready": False, "serving": False}, False, False),
        ({"ready": True, "serving": False}, False, False),
        ({"ready": False, "serving": True, "terminating": True}, False, True),
        ({"ready": True, "serving": True, "terminating": True}, False, True),
        ({"ready": False, "serving": False, "terminating": True}, False, True),
    ],
)
def test_conditions_set_readiness_and_termination(
    conditions: dict[str, bool | None], is_ready: bool, is_terminating: bool
) -> None:
    slice_object = make_endpoint_slice("s1", member("a", **conditions))
    (endpoint,) = parse_slice(slice_object).endpoints
    assert (endpoint.is_ready, endpoint.is_terminating) == (is_ready, is_terminating)


def merge_objects(*objects: dict[str, object]) -> dict[str, ServerEndpoint]:
    return merge_slices(parse_slice(slice_object) for slice_object in objects)


def set_version(slice_object: dict[str, object], version: int) -> dict[str, object]:
    return {
        **slice_object,
        "metadata": {**slice_object["metadata"], "resourceVersion": str(version)},
    }


def test_pod_in_two_slices_uses_the_newer_slice() -> None:
    older_slice = set_version(
        make_endpoint_slice("s2", member("a", ready=False, serving=False)), 99
    )
    newer_slice = set_version(make_endpoint_slice("s1", member("a")), 100)
    for slices in ((older_slice, newer_slice), (newer_slice, older_slice)):
        assert [endpoint.is_ready for endpoint in merge_objects(*slices).values()] == [True]


def test_pod_terminating_in_any_slice_gets_no_new_sessions() -> None:
    stale_slice = set_version(make_endpoint_slice("s1", member("a")), 100)
    terminating_slice = set_version(
        make_endpoint_slice("s2", member("a", ready=False, terminating=True)), 50
    )
    (endpoint,) = merge_objects(stale_slice, terminating_slice).values()
    assert (endpoint.is_ready, endpoint.is_terminating) == (False, True)


def test_ipv6_address_is_bracketed_and_ipv4_is_preferred() -> None:
    ipv6_slice = make_endpoint_slice("six", member("a", "fd00::7"), family="IPv6")
    ipv4_slice = make_endpoint_slice("four", member("a", "10.0.0.7"), family="IPv4")
    assert merge_objects(ipv6_slice)[make_server_id("a")].grpc_address == "grpc://[fd00::7]:18000"
    assert (
        merge_objects(ipv6_slice, ipv4_slice)[make_server_id("a")].http_address
        == "http://10.0.0.7:8000"
    )


def test_endpoint_without_a_pod_is_identified_by_address() -> None:
    manual_endpoint = {"addresses": ["10.9.9.9"]}
    (endpoint,) = merge_objects(make_endpoint_slice("s1", manual_endpoint)).values()
    assert (endpoint.key, endpoint.server_id) == ("http://10.9.9.9:8000", "")
    assert endpoint.is_ready


def test_pod_uid_is_valid_in_a_session_id() -> None:
    server_id = make_pod_server_id("8C5F7A3E-0b1d-4c7e-9a55-2f7d1c0e4b6a")
    key = SessionKey.random()
    assert server_id == "8c5f7a3e0b1d4c7e9a552f7d1c0e4b6a"
    assert key.read(key.sign("blackjack", server_id)).server_id == server_id
    with pytest.raises(ConfigError, match="POD_UID"):
        make_pod_server_id("")


@pytest.mark.parametrize(
    ("ports", "http_port", "grpc_port"),
    [
        ({"http": 80, "grpc": 90}, 80, 90),
        ({"http": 8000}, 8000, 18000),
        ({"": 8000}, 8000, 18000),
        ({"metrics": 9090, "http": 8000, "grpc": 18000}, 8000, 18000),
        ({"web": 8000}, 8000, 18000),
        ({"grpc": 90}, None, 90),
        ({"metrics": 9090, "grpc": 90}, None, 90),
    ],
)
def test_ports_are_found_by_name_or_server_defaults(
    ports: dict[str, int], http_port: int | None, grpc_port: int
) -> None:
    slice_object = make_endpoint_slice("s1", member("a"), ports=ports)
    (endpoint,) = parse_slice(slice_object).endpoints
    assert endpoint.http_address == (f"http://10.0.0.1:{http_port}" if http_port else "")
    assert endpoint.grpc_address == f"grpc://10.0.0.1:{grpc_port}"


def test_grpc_port_is_found_by_app_protocol() -> None:
    slice_object = make_endpoint_slice("s1", member("a"), ports={"metrics": 9090, "play": 90})
    slice_object["ports"][1]["appProtocol"] = "kubernetes.io/h2c"
    (endpoint,) = parse_slice(slice_object).endpoints
    assert endpoint.grpc_address == "grpc://10.0.0.1:90"


@pytest.mark.parametrize("ports", [{}, {"web": 8000, "metrics": 9090}, {"http": 60_000}])
def test_unusable_ports_error_lists_the_ports(
    ports: dict[str, int],
) -> None:
    with pytest.raises(ConfigError, match="a port named 'grpc' or 'http'"):
        parse_slice(make_endpoint_slice("s1", member("a"), ports=ports))


def test_slice_change_parses_only_that_slice() -> None:
    slices = []
    for slice_index in range(20):
        members = [member(f"pod-{slice_index}-{pod_index}") for pod_index in range(100)]
        slices.append(set_version(make_endpoint_slice(f"s{slice_index}", *members), slice_index))
    parsed_slices = [parse_slice(slice_object) for slice_object in slices]
    num_calls = 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        parsed_slices[7] = parse_slice(slices[7])
        endpoints = merge_slices(parsed_slices)
    finally:
        sys.setprofile(None)
    assert len(endpoints) == 2000
    assert num_calls < 5_000
