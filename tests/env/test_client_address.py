"""Server addresses, TLS, and the secrecy of credentials."""

import asyncio
import gc
import json
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import trustme
import uvicorn
from fastapi import FastAPI

from ludus.env.client import AsyncEnvClient, ConnectOptions, EnvClient
from ludus.env.http.app import build_app
from ludus.env.security.tls import build_client_context
from ludus.env.transports.address import RemoteServer, parse_address
from ludus.env.transports.http import HttpClient
from ludus.proto.errors import (
    AuthenticationError,
    CapacityError,
    ConfigError,
    RateLimitError,
    UnavailableError,
)
from tests.env.flaky_proxy import FlakyProxy
from tests.env.grpc_served import serve_grpc
from tests.env.polling import wait_until
from tests.env.quiet_edge import QuietEdge
from tests.env.served import serve

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def certificate_authority():
    return trustme.CA()


@pytest.fixture
def ca_file(certificate_authority, tmp_path):
    path = tmp_path / "ca.pem"
    certificate_authority.cert_pem.write_to_path(str(path))
    return str(path)


async def test_address_is_parsed_into_parts() -> None:
    address = parse_address("https://ann:p%40ss@gw.example:8443/envs/catch/")
    assert str(address) == "https://gw.example:8443/envs/catch"
    assert address.websocket_url == "wss://gw.example:8443/envs/catch"
    assert address.credentials == "Basic YW5uOnBAc3M="
    assert parse_address("grpc://gw:1/catch").environment_name == "catch"
    assert parse_address("ws://127.0.0.1:8000/ws").websocket_url == "ws://127.0.0.1:8000"
    assert parse_address("grpc://[::1]:1").authority == "[::1]:1"


@pytest.mark.parametrize(
    "address",
    [
        "localhost:8000",
        "ftp://host:1",
        "grpc://",
        "grpc://host:1/a/b",
        "http://host:1/?a=1",
        "http://[::1",
        "http://host:99999",
        "grpc://host:port",
    ],
)
async def test_malformed_address_raises_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="expected an address like"):
        await AsyncEnvClient.connect(address)


@pytest.mark.parametrize(
    "address",
    [
        "http://ann:hunter2@127.0.0.1:1/x",
        "ftp://ann:hunter2@host",
        "ann:hunter2@host:1",
        "grpc://ann:hunter2@127.0.0.1:1",
    ],
)
async def test_error_messages_contain_no_credentials(address: str) -> None:
    with pytest.raises((ConfigError, UnavailableError)) as error_info:
        await AsyncEnvClient.connect(address, ConnectOptions(connect_timeout_s=0.2))
    text = f"{error_info.value!r} {error_info.value.__cause__!r}"
    assert "hunter2" not in text
    assert "host" in text or "127.0.0.1" in text


async def test_repr_of_options_contains_no_credentials() -> None:
    address = parse_address("http://ann:hunter2@host:1")
    text = repr(RemoteServer(address))
    text += repr(RemoteServer(parse_address("http://host:1"), ConnectOptions(token="hunter3")))
    assert "hunter" not in text
    assert "YW5u" not in text
    with pytest.raises(ConfigError, match="one way to authenticate"):
        await AsyncEnvClient.connect("http://ann:hunter2@host:1", ConnectOptions(token="hunter3"))


@pytest.mark.slow
async def test_grpc_works_over_tls(certificate_authority, ca_file) -> None:
    certificate = certificate_authority.issue_cert("localhost")
    chain = b"".join(part.bytes() for part in certificate.cert_chain_pems)
    credentials = grpc.ssl_server_credentials([(certificate.private_key_pem.bytes(), chain)])
    async with serve_grpc(credentials=credentials) as server:
        async with await AsyncEnvClient.connect(
            server.address, ConnectOptions(ca_file=ca_file)
        ) as client:
            session, _ = await client.open()
            assert (await session.step({"add": 1})).reward == 1.0
        with pytest.raises(UnavailableError):
            await AsyncEnvClient.connect(server.address, ConnectOptions(connect_timeout_s=0.5))


async def test_connect_retries_describe_while_the_server_restarts() -> None:
    class RestartingEdge(QuietEdge):
        num_requests = 0

        async def Describe(self, request, context):
            self.num_requests += 1
            if self.num_requests == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is restarting")
            return await super().Describe(request, context)

    async with (
        serve_grpc() as server,
        RestartingEdge(server.address) as edge,
        await AsyncEnvClient.connect(edge.address) as client,
    ):
        assert (edge.num_requests, (await client.describe()).name) == (2, "counting")


@pytest.mark.slow
async def test_http_and_websocket_work_over_tls(certificate_authority, ca_file) -> None:
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate_authority.issue_cert("127.0.0.1").configure_cert(server_context)
    async with serve() as server, FlakyProxy(server.http_address, ssl=server_context) as proxy:
        for scheme in ("https", "wss"):
            address = proxy.address.replace("http://", f"{scheme}://")
            async with await AsyncEnvClient.connect(
                address, ConnectOptions(ca_file=ca_file)
            ) as client:
                session, _ = await client.open()
                assert (await session.step({"add": 1})).reward == 1.0
            with pytest.raises(UnavailableError, match="certificate"):
                await AsyncEnvClient.connect(address, ConnectOptions(connect_timeout_s=0.2))


async def test_unusable_ca_file_raises_config_error(tmp_path) -> None:
    missing_file = tmp_path / "nothing.pem"
    for scheme in ("https", "grpcs"):
        with pytest.raises(ConfigError, match=r"nothing\.pem"):
            await AsyncEnvClient.connect(
                f"{scheme}://localhost:1", ConnectOptions(ca_file=str(missing_file))
            )
    missing_file.write_text("not a certificate")
    with pytest.raises(ConfigError, match="PEM"):
        build_client_context(str(missing_file))


@pytest.mark.slow
async def test_wrong_password_fails_and_token_works_on_every_wire() -> None:
    async with serve(token="secret") as server:
        for address in (server.http_address, server.grpc_address):
            with pytest.raises(AuthenticationError):
                await AsyncEnvClient.connect(address.replace("://", "://ann:wrong@"))
            async with await AsyncEnvClient.connect(
                address, ConnectOptions(token="secret")
            ) as client:
                await client.open()


@asynccontextmanager
async def respond_with(status_line: str, headers: str = "", body: str = "") -> AsyncIterator[str]:
    """Start a server that sends this response to every request, and yield its address."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        header = f"HTTP/1.1 {status_line}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        writer.write(f"{header}{headers}\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("status_line", ["500 Error", "502 Bad Gateway", "504 Gateway Timeout"])
async def test_error_of_a_proxy_does_not_count_as_a_missing_path(status_line: str) -> None:
    async with respond_with(status_line) as address:
        with pytest.raises(UnavailableError, match=f"got HTTP status {status_line[:3]}"):
            await AsyncEnvClient.connect(address, ConnectOptions(connect_timeout_s=0.2))


async def test_client_waits_until_a_proxy_reaches_its_server() -> None:
    async with (
        serve() as server,
        respond_with("502 Bad Gateway") as address,
        FlakyProxy(address) as proxy,
    ):
        connect_task = asyncio.create_task(AsyncEnvClient.connect(proxy.address))
        await wait_until(lambda: proxy.num_connections >= 3)
        proxy.set_upstream(server.http_address)
        async with await connect_task as client:
            assert client.transport.has_extensions


async def test_redirect_is_reported_and_not_followed() -> None:
    async with respond_with("307 Moved", "location: http://elsewhere.example/\r\n") as address:
        with pytest.raises(ConfigError, match=r"redirect to http://elsewhere\.example/"):
            await AsyncEnvClient.connect(address, ConnectOptions(connect_timeout_s=60))


async def test_http_errors_preserve_the_retry_delay() -> None:
    server = respond_with("429 Too Many Requests", "retry-after: 7\r\n")
    async with server as address:
        with pytest.raises(RateLimitError, match="429") as error_info:
            await AsyncEnvClient.connect(address, ConnectOptions(connect_timeout_s=0.1))
    assert error_info.value.retry_after_s == 7
    body = '{"detail": {"code": "CAPACITY_REACHED", "message": "full", "retry_after_s": 2.5}}'
    async with respond_with("503 Service Unavailable", body=body) as address:
        with pytest.raises(CapacityError, match="full") as error_info:
            await AsyncEnvClient.connect(address, ConnectOptions(connect_timeout_s=0.1))
    assert error_info.value.retry_after_s == 2.5


async def test_client_preserves_the_path_before_the_endpoints() -> None:
    """Gateways serve an environment below a path: http://gateway/envs/NAME."""
    async with serve() as server:
        outer_app = FastAPI()
        outer_app.mount("/envs/counting", build_app(server.core))
        config = uvicorn.Config(
            outer_app, port=0, log_config=None, lifespan="off", ws="websockets-sansio"
        )
        uvicorn_server = uvicorn.Server(config)
        server_task = asyncio.create_task(uvicorn_server.serve())
        while not uvicorn_server.started:
            await asyncio.sleep(0.01)
        port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
        address = f"http://127.0.0.1:{port}/envs/counting"
        async with await AsyncEnvClient.connect(address) as client:
            session, _ = await client.open()
            assert (await session.step({"add": 1})).reward == 1.0
        uvicorn_server.should_exit = True
        await server_task


@pytest.mark.slow
async def test_failed_requests_of_one_attempt_are_one_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    barrier = threading.Barrier(3)

    def fail(*_: Any) -> None:
        barrier.wait(10)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(HttpClient, "_send", fail)
    for _ in range(20):
        with pytest.raises(UnavailableError, match="could not reach an environment server"):
            await asyncio.to_thread(
                EnvClient.connect, "http://127.0.0.1:9", ConnectOptions(connect_timeout_s=0)
            )
    gc.collect()
    assert caplog.records == []


@pytest.mark.parametrize(
    "reply",
    [
        b"\0\0\x12\4\0\0\0\0\0SETTINGS",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n\xff\xfe\0{",
        b'HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\\ud800": ',
        b"HTTP/1.1 banana\r\n\r\n",
        b"",
    ],
)
async def test_another_program_at_the_address_is_one_error(reply: bytes) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        with pytest.raises(UnavailableError, match="could not reach an environment server"):
            await AsyncEnvClient.connect(address, ConnectOptions(connect_timeout_s=0))


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ({"name": ["a"]}, "'name': Input should be a valid string"),
        ({"name": "a", "ludus": [1]}, "'ludus' must be an object"),
        ({"name": "a", "ludus": {"max_sessions": "many"}}, "'max_sessions'"),
        ({"name": "a", "ludus": {"tools": 1}, "paths": 5}, "'tools'"),
    ],
)
async def test_description_of_wrong_types_is_one_error(
    description: dict[str, object], reason: str
) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(description).encode())
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        client = await AsyncEnvClient.connect(address)
        with pytest.raises(ConfigError, match=f"description is not valid: {reason}"):
            await client.describe()


async def test_address_of_a_page_of_the_server_is_refused_by_its_path() -> None:
    async with serve() as server:
        with pytest.raises(ConfigError, match=r"remove or correct the path /docs"):
            await AsyncEnvClient.connect(f"{server.http_address}/docs")
