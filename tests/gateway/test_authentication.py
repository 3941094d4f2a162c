"""Token authentication over HTTP, WebSocket and gRPC."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import websockets
from fastapi import FastAPI, Request, WebSocket
from hypothesis import given
from hypothesis import strategies as st

from ludus.proto.errors import AuthenticationError
from ludus.services.gateway.tenancy.access import AuthFailure, TenantAccess
from ludus.services.gateway.tenancy.tenants import get_current_tenant
from ludus.services.gateway.wires.http_app import build_gateway_app
from ludus.services.gateway.wires.middleware import (
    AuthenticationInterceptor,
    AuthenticationMiddleware,
)
from tests.gateway.gateways import NAME, count_sessions, run_gateway
from tests.gateway.http_server import serve_app

ALICE = "a11ce-a11ce-a11ce-a11ce"
ADMIN = "adm1n-adm1n-adm1n-adm1n"


@pytest.fixture
def access(tmp_path: Path) -> TenantAccess:
    path = tmp_path / "tenants.toml"
    path.write_text(
        "".join(
            f'[[tenants]]\nname = "{name}"\nscopes = {scopes}\n'
            f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
            for name, scopes, token in (
                ("alice", '["step"]', ALICE),
                ("root", '["admin", "step"]', ADMIN),
                ("operator", '["admin"]', ADMIN[::-1]),
            )
        )
    )
    return TenantAccess.from_file(path)


def make_headers(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


# -- HTTP and WebSocket ----------------------------------------------------------------------


def build_app() -> FastAPI:
    """Return an application that mounts an environment below /envs, like a gateway."""
    app = FastAPI()
    environment = FastAPI()

    @environment.get("/who")
    async def get_caller(request: Request) -> dict[str, Any]:
        return {
            "tenant": get_current_tenant().name,
            "path": request.scope["path"],
            "raw_path": request.scope["raw_path"].decode(),
            "root_path": request.scope["root_path"],
        }

    @environment.websocket("/ws")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(get_current_tenant().name)
        await websocket.close()

    @app.get("/health")
    async def health() -> str:
        return "healthy"

    @app.post("/drain")
    @app.get("/admin/servers")
    async def admin() -> str:
        return get_current_tenant().name

    app.mount("/envs/cards", environment)
    return app


@pytest.fixture
async def port(access: TenantAccess) -> AsyncIterator[int]:
    async with serve_app(AuthenticationMiddleware(build_app(), access)) as port:
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


@pytest.mark.slow
async def test_http_authenticates_tenants_for_all_token_formats(
    client: httpx.AsyncClient, port: int
) -> None:
    requests = (
        client.get("/envs/cards/who", headers=make_headers(ALICE)),
        client.get("/envs/cards/who", auth=("anybody", ALICE)),
        client.get(f"http://{ALICE}@127.0.0.1:{port}/envs/cards/who"),
        client.get(f"http://alice:{ALICE}@127.0.0.1:{port}/envs/cards/who"),
    )
    for response in await asyncio.gather(*requests):
        assert response.json() == {
            "tenant": "alice",
            "path": "/envs/cards/who",
            "raw_path": "/envs/cards/who",
            "root_path": "/envs/cards",
        }


@pytest.mark.slow
async def test_http_refusal_is_typed_json(client: httpx.AsyncClient) -> None:
    for headers in ({}, make_headers("wrong"), {"authorization": "nonsense"}):
        response = await client.get("/envs/cards/who", headers=headers)
        assert response.status_code == 401
        assert response.json()["detail"]["code"] == "UNAUTHENTICATED"
        assert response.headers["www-authenticate"] == 'Bearer, Basic realm="ludus"'


async def test_two_authorization_headers_are_refused(client: httpx.AsyncClient) -> None:
    headers = [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {ADMIN}")]
    assert (await client.get("/envs/cards/who", headers=headers)).status_code == 401


async def test_probes_need_no_token(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == "healthy"
    assert (await client.get("/health", headers=make_headers("wrong"))).json() == "healthy"


@pytest.mark.slow
async def test_admin_paths_need_the_admin_scope(client: httpx.AsyncClient) -> None:
    for method, path in (("POST", "/drain"), ("GET", "/admin/servers")):
        refusal = await client.request(method, path, headers=make_headers(ALICE))
        assert (refusal.status_code, refusal.json()["detail"]["code"]) == (403, "PERMISSION_DENIED")
        assert ALICE not in refusal.text
        admin_response = await client.request(method, path, headers=make_headers(ADMIN))
        assert admin_response.json() == "root"
    headers = make_headers(ADMIN[::-1])
    assert (await client.get("/envs/cards/who", headers=headers)).status_code == 403


@pytest.mark.slow
async def test_wrong_tokens_do_not_lock_clients_out(client: httpx.AsyncClient) -> None:
    for _ in range(50):
        assert (
            await client.get("/envs/cards/who", headers=make_headers("wrong"))
        ).status_code == 401
    assert (await client.get("/envs/cards/who", headers=make_headers(ALICE))).status_code == 200


async def test_websocket_requires_a_token(port: int) -> None:
    address = f"127.0.0.1:{port}"
    for url, headers in (
        (f"ws://{address}/envs/cards/ws", make_headers(ALICE)),
        (f"ws://alice:{ALICE}@{address}/envs/cards/ws", {}),
    ):
        async with websockets.connect(url, additional_headers=headers) as socket:
            assert await socket.recv() == "alice"
    with pytest.raises(websockets.InvalidStatus) as error:
        await websockets.connect(f"ws://{address}/envs/cards/ws")
    assert error.value.response.status_code == 401
    assert b"UNAUTHENTICATED" in (error.value.response.body or b"")


async def test_gateway_without_tokens_serves_all_requests() -> None:
    app = AuthenticationMiddleware(build_app(), TenantAccess())
    async with (
        serve_app(app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        assert (await client.get("/envs/cards/who")).json()["tenant"] == ""
        assert (await client.post("/drain")).json() == ""


async def test_app_without_authentication_middleware_refuses_requests() -> None:
    async with run_gateway() as (gateway, servers):
        app = build_gateway_app(gateway.environments, gateway.metrics, lambda: [b"k" * 32])
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as client:
            response = await client.post(f"/envs/{NAME}/reset")
        assert (response.status_code, count_sessions(servers)) == (401, 0)
    with pytest.raises(AuthenticationError, match="behind AuthenticationMiddleware"):
        get_current_tenant()


async def test_proxy_prefix_does_not_change_path_permissions(access: TenantAccess) -> None:
    passed_paths: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed_paths.append(scope["path"])

    messages: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError("the middleware read the request body")

    headers = [(b"authorization", f"Bearer {ALICE}".encode())]
    for path in ("/proxy/health", "/proxy/drain", "/proxy/envs/cards"):
        scope = {"type": "http", "path": path, "root_path": "/proxy", "headers": headers}
        await AuthenticationMiddleware(app, access)(scope, receive, send)
    assert passed_paths == ["/proxy/health", "/proxy/envs/cards"]
    assert messages[0]["status"] == 403


# -- gRPC ------------------------------------------------------------------------------------


async def get_caller(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return get_current_tenant().name.encode()


async def write_caller(requests: Any, context: grpc.aio.ServicerContext) -> None:
    async for request in requests:
        await context.write(request + get_current_tenant().name.encode())


class CallerService(grpc.GenericRpcHandler):
    """A gRPC service that returns the tenant name of the caller."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return {
            "/test/Who": grpc.unary_unary_rpc_method_handler(get_caller),
            "/test/Write": grpc.stream_stream_rpc_method_handler(write_caller),
        }.get(call.method)


@asynccontextmanager
async def open_grpc_channel(access: TenantAccess) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[AuthenticationInterceptor(access)])
    server.add_generic_rpc_handlers((CallerService(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


@pytest.fixture
async def channel(access: TenantAccess) -> AsyncIterator[grpc.aio.Channel]:
    async with open_grpc_channel(access) as channel:
        yield channel


def make_metadata(authorization: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", authorization),)


async def call_service(
    channel: grpc.aio.Channel, authorization: str | None, method: str = "/test/Who"
) -> bytes:
    metadata = make_metadata(authorization) if authorization is not None else ()
    return await channel.unary_unary(method)(b"x", metadata=metadata, timeout=60)


async def test_grpc_authenticates_tenants_of_unary_calls_and_streams(
    channel: grpc.aio.Channel,
) -> None:
    assert await call_service(channel, f"Bearer {ALICE}") == b"alice"
    basic_credentials = base64.b64encode(f"x:{ADMIN}".encode()).decode()
    assert await call_service(channel, f"Basic {basic_credentials}") == b"root"
    stream = channel.stream_stream("/test/Write")(metadata=make_metadata(f"Bearer {ALICE}"))
    for word in (b"one ", b"two "):
        await stream.write(word)
        assert await stream.read() == word + b"alice"
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_grpc_refusal_has_a_status_code(channel: grpc.aio.Channel) -> None:
    for authorization in (None, "Bearer wrong", "nonsense", ""):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call_service(channel, authorization)
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert dict(error.value.trailing_metadata() or ())["ludus-code"] == "UNAUTHENTICATED"
    stream = channel.stream_stream("/test/Write")()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.read()
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call_service(channel, f"Bearer {ADMIN[::-1]}")
    assert error.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_unknown_grpc_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call_service(channel, None, "/test/Nothing")
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_grpc_reports_every_refusal(channel: grpc.aio.Channel, access: TenantAccess) -> None:
    failures: list[AuthFailure] = []
    access.on_failure = failures.append
    for authorization in ("Bearer wrong", None, "nonsense", f"Bearer {ADMIN[::-1]}"):
        with pytest.raises(grpc.aio.AioRpcError):
            await call_service(channel, authorization)
    assert [str(failure) for failure in failures] == ["unknown", "missing", "malformed", "scope"]


async def test_concurrent_calls_have_separate_tenants(channel: grpc.aio.Channel) -> None:
    calls = [call_service(channel, f"Bearer {token}") for token in (ALICE, ADMIN) * 20]
    assert await asyncio.gather(*calls) == [b"alice", b"root"] * 20


# -- logs ------------------------------------------------------------------------------------


async def test_logs_contain_no_token_at_any_level(
    access: TenantAccess, caplog: pytest.LogCaptureFixture
) -> None:
    wrong_token = "wr0ng-wr0ng-wr0ng-wr0ng"
    basic_credentials = base64.b64encode(f"alice:{ALICE}".encode()).decode()
    caplog.set_level(logging.DEBUG)
    loggers = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "websockets.server")
    for name in (*loggers, "websockets", "starlette", "fastapi", "grpc", "grpc._cython", "ludus"):
        caplog.set_level(logging.DEBUG, name)
    # Logs of the clients httpx and websockets.client are not checked.
    app = AuthenticationMiddleware(build_app(), access)
    async with serve_app(app, log_level="trace") as port, open_grpc_channel(access) as channel:
        for token in (ALICE, wrong_token):
            await send_raw_request(
                port, f"GET /envs/cards/who HTTP/1.1\r\nauthorization: Bearer {token}"
            )
            upgrade = "upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
            upgrade += "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="
            header = f"authorization: Basic {basic_credentials}"
            await send_raw_request(port, f"GET /envs/cards/ws HTTP/1.1\r\n{upgrade}\r\n{header}")
            await send_raw_request(port, f"GET / broken \x00\r\nauthorization: Bearer {token}")
            try:
                await call_service(channel, f"Bearer {token}")
            except grpc.aio.AioRpcError as error:
                assert wrong_token not in str(error)
    assert "WebSocket /envs/cards/ws" in caplog.text  # connections are logged
    for secret in (ALICE, wrong_token, basic_credentials):
        assert secret not in caplog.text


async def send_raw_request(port: int, head: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\nhost: localhost\r\n\r\n".encode())
    async with asyncio.timeout(60):
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.02)
    writer.close()


# -- random input ----------------------------------------------------------------------------

SINGLE_TOKEN_ACCESS = TenantAccess.from_token(ALICE)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"authorization", b"host", b"cookie"]),
        st.binary(max_size=60)
        | st.builds(lambda secret: b"Basic " + base64.b64encode(secret), st.binary(max_size=40))
        | st.builds(lambda secret: b"Bearer " + secret, st.binary(max_size=40)),
    ),
    max_size=3,
)


@pytest.mark.slow
@given(
    st.sampled_from(["http", "websocket"]),
    st.text(max_size=30),
    st.sampled_from(["", "/proxy"]),
    HEADERS,
)
async def test_random_requests_are_refused_without_an_exception(
    kind: str, path: str, root_path: str, headers: list[tuple[bytes, bytes]]
) -> None:
    messages: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"].removeprefix(root_path) in {"/health", "/healthz", "/readyz"}

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    scope = {
        "type": kind,
        "path": root_path + path,
        "root_path": root_path,
        "headers": headers,
        "extensions": {"websocket.http.response": {}},
    }
    await AuthenticationMiddleware(app, SINGLE_TOKEN_ACCESS)(scope, receive, send)
    assert not messages or messages[0]["status"] == 401
