"""A loopback server refuses web pages whose host name resolves to this machine."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from ludus.env.security.hosts import is_allowed_host, is_loopback_name
from tests.env.served import serve
from tests.gateway.gateways import make_gateway

FOREIGN_HOST = {"host": "evil.example"}


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8000", "127.0.0.2", "[::1]", "[::1]:80"],
)
def test_names_of_loopback_are_allowed(host: str) -> None:
    assert is_allowed_host(host, ())


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "evil.localhost", ""),
        *("127.0.0.1.evil.example", "127.0.0.1,evil.example", "evil@localhost", "localhost:80:80"),
        *(
            "10.0.0.1",
            "[fe80::1]",
            "::1:80",
            "localhost/",
            "localhost:evil",
            "[::1]evil",
            "0.0.0.0",
        ),
    ],
)
def test_other_names_are_refused(host: str) -> None:
    assert not is_allowed_host(host, ("proxy.example",))


def test_given_names_are_allowed_with_any_port() -> None:
    assert is_allowed_host("Proxy.Example:443", ("proxy.example",))
    assert is_allowed_host("[fe80::1]:80", ("[fe80::1]",))


@pytest.mark.parametrize("name", ["::ffff:127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_every_form_of_a_loopback_address_is_recognised(name: str) -> None:
    assert is_loopback_name(name)


async def test_server_refuses_foreign_host_names_on_every_port() -> None:
    async with serve(admin_port=0) as server, httpx.AsyncClient(timeout=60) as client:
        for path in ("/metadata", "/state", "/metrics", "/health"):
            response = await client.get(server.http_address + path, headers=FOREIGN_HOST)
            assert response.status_code == 403
            detail = response.json()["detail"]
            assert detail["code"] == "PERMISSION_DENIED"
            assert "allow_host" in detail["message"]
        for address in (server.http_address, server.addresses.admin):
            response = await client.post(f"{address}/drain", headers=FOREIGN_HOST)
            assert response.status_code == 403
        # A form of a page of another origin names the right host, but also its origin.
        response = await client.post(
            f"{server.addresses.admin}/drain", headers={"origin": "https://evil.example"}
        )
        assert response.status_code == 403
        assert not server.core.load.is_draining


async def test_server_refuses_foreign_host_names_of_websockets() -> None:
    async with serve() as server:
        url = server.http_address.replace("http", "ws") + "/ws"
        port = url.split(":")[2].split("/")[0]
        with pytest.raises(InvalidStatus) as error_info:
            async with connect(f"ws://evil.example:{port}/ws", host="127.0.0.1", port=int(port)):
                pass
        assert error_info.value.response.status_code == 403
        assert server.core.load.num_sessions == 0


async def request_status(port: int, target: str, *headers: str) -> int:
    """Return the status of a GET request with this target in its first line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"GET {target} HTTP/1.1", *headers, "connection: close", "", ""]
    writer.write("\r\n".join(lines).encode())
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1])


async def test_host_of_an_absolute_url_replaces_the_header() -> None:
    async with serve() as server:
        port = int(server.http_address.rpartition(":")[2])
        for host, header, status in (
            ("evil.example", "localhost", 403),
            ("evil.example:80", "localhost", 403),
            ("localhost@evil.example", "localhost", 403),
            ("[2001:db8::1]:80", "localhost", 403),
            ("localhost:80", "evil.example", 200),
            ("[::1]:80", "evil.example", 200),
        ):
            url = f"http://{host}/metadata"
            assert await request_status(port, url, f"host: {header}") == status
            assert await request_status(port, url, f"host: {header}", "host: localhost") == status


async def test_every_origin_must_be_local() -> None:
    async with serve() as server:
        port = int(server.http_address.rpartition(":")[2])
        local, foreign = "origin: http://localhost", "origin: http://evil.example"
        for origins, status in (
            ([local, foreign], 403),
            ([foreign, local], 403),
            ([local, local], 200),
            ([f"{local} http://evil.example"], 403),
            (["origin: null"], 403),
        ):
            status_code = await request_status(port, "/metadata", "host: localhost", *origins)
            assert status_code == status, origins


async def test_server_accepts_given_host_names() -> None:
    async with serve(allow_host=("proxy.example",)) as server, httpx.AsyncClient() as client:
        for host, status in (("proxy.example", 200), ("proxy.example:80", 200), ("other", 403)):
            url = f"{server.http_address}/metadata"
            assert (await client.get(url, headers={"host": host})).status_code == status


async def test_server_for_other_machines_accepts_every_host_name() -> None:
    async with serve(host="0.0.0.0", token="secret") as server, httpx.AsyncClient() as client:
        url = server.http_address.replace("0.0.0.0", "127.0.0.1")
        headers = FOREIGN_HOST | {"authorization": "Bearer secret"}
        assert (await client.get(f"{url}/metadata", headers=headers)).status_code == 200


async def test_gateway_refuses_foreign_host_names_on_every_port() -> None:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        server = await stack.enter_async_context(serve(session_key="k" * 32))
        gateway = await stack.enter_async_context(make_gateway(server, admin_port=0))
        for path in ("/v1/envs", "/metrics", "/healthz"):
            response = await client.get(gateway.http_address + path, headers=FOREIGN_HOST)
            assert response.status_code == 403
        response = await client.post(f"{gateway.admin_address}/drain", headers=FOREIGN_HOST)
        assert response.status_code == 403
        assert (await client.get(f"{gateway.http_address}/v1/envs")).status_code == 200
