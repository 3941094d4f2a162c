"""Sessions over plain HTTP: kept by cookie or header, otherwise new for each call."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from websockets.asyncio.client import connect

from ludus.env.client import AsyncEnvClient
from ludus.env.http import app as app_module
from ludus.env.http.app import build_app
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import make_local_host
from ludus.env.sessions.interface import OpenArgs
from ludus.env.sessions.options import ServerOptions
from ludus.proto.errors import InvalidCallError
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.polling import wait_until
from tests.env.served import serve


def open_visitor(server) -> httpx.AsyncClient:
    """Open a client that keeps cookies, like OpenEnv 0.1."""
    return httpx.AsyncClient(base_url=server.http_address, timeout=60)


def open_client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def make_core(factory=CountingEnv, **options) -> SessionCore:
    return SessionCore(make_local_host(factory), ServerOptions(**options))


async def add_to_total(client: AsyncEnvClient, number: int, **kwargs) -> int:
    reply = await client.post("/step", json={"action": {"add": number}}, **kwargs)
    assert reply.status_code == 200, reply.text
    return reply.json()["observation"]["total"]


@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_clients_with_cookies_have_separate_sessions(factory) -> None:
    async with serve(factory) as server, open_visitor(server) as ada, open_visitor(server) as bob:
        assert (await ada.post("/reset", json={})).json()["observation"]["total"] == 0
        await bob.post("/reset", json={})
        assert [await add_to_total(ada, 1), await add_to_total(ada, 1)] == [1, 2]
        assert await add_to_total(bob, 3) == 3
        assert await add_to_total(ada, 1) == 3
        state = (await ada.get("/state")).json()
        assert (state["step_count"], state["total"]) == (3, 3)
        assert (await ada.post("/reset", json={})).json()["observation"]["total"] == 0
        assert await add_to_total(bob, 3) == 6
        assert server.core.load.num_sessions == 2


async def test_session_cookie_is_http_only_and_limited_to_the_server_path() -> None:
    async with open_client(build_app(make_core())) as client:
        reply = await client.post("/reset")
        cookie = reply.headers["set-cookie"]
        assert cookie.startswith(f"ludus_session={reply.headers['x-session-id']}; ")
        assert cookie.endswith("; HttpOnly; SameSite=Lax; Path=/")
    mounted_app = Starlette(routes=[Mount("/envs/count", build_app(make_core()))])
    async with open_client(mounted_app) as client:
        reply = await client.post("/envs/count/reset")
        assert reply.headers["set-cookie"].endswith("; Path=/envs/count")
        reply = await client.post("/envs/count/step", json={"add": 2})
        assert reply.json()["observation"]["total"] == 2


async def test_session_id_header_selects_the_session() -> None:
    async with open_client(build_app(make_core())) as client:
        id_headers = {"x-session-id": (await client.post("/reset")).headers["x-session-id"]}
        client.cookies.clear()
        assert await add_to_total(client, 1, headers=id_headers) == 1
        client.cookies.clear()
        assert await add_to_total(client, 1, headers=id_headers) == 2
        client.cookies.clear()
        assert await add_to_total(client, 1) == 1, "without a name it is a fresh environment"


async def test_a_lost_session_is_reported_lost_until_the_next_reset() -> None:
    core = make_core()
    async with open_client(build_app(core)) as client:
        session_id = (await client.post("/reset")).headers["x-session-id"]
        await add_to_total(client, 1)
        await core.close(session_id)
        for call in (client.post("/step", json={"add": 1}), client.get("/state")):
            reply = await call
            assert (reply.status_code, reply.json()["detail"]["code"]) == (410, "SESSION_LOST")
        new_reply = await client.post("/reset")
        assert new_reply.headers["x-session-id"] != session_id
        assert await add_to_total(client, 2) == 2


@pytest.mark.parametrize("path", ["/close", "/session"])
async def test_client_can_close_a_session(path: str) -> None:
    core = make_core()
    async with open_client(build_app(core)) as client:
        await client.post("/reset")
        assert core.load.num_sessions == 1
        reply = await client.request("POST" if path == "/close" else "DELETE", path)
        assert (reply.json(), core.load.num_sessions) == ({"closed": True}, 0)
        assert "ludus_session" not in client.cookies
        reply = await client.post("/close")
        assert reply.json() == {"closed": False}


async def test_unused_session_ends_early_and_used_session_remains(core_clock) -> None:
    core = make_core()
    sweep_task = asyncio.create_task(core.close_idle_forever())
    app = build_app(core, unused_timeout_s=60)
    async with open_client(app) as client:
        await client.post("/reset")
        await add_to_total(client, 1)
        async with open_client(app) as visitor:
            await visitor.post("/reset")
        assert core.load.num_sessions == 2
        core_clock.move_on(60)
        await wait_until(lambda: core.load.num_sessions == 1)
        assert await add_to_total(client, 1) == 2
    sweep_task.cancel()


async def test_a_group_larger_than_the_server_ends_no_unused_session() -> None:
    async with serve(max_sessions=2) as server:
        for _ in range(2):
            async with open_visitor(server) as visitor:
                assert (await visitor.post("/reset", json={})).status_code == 200
        async with await AsyncEnvClient.connect(server.grpc_address) as client:
            with pytest.raises(InvalidCallError):
                await client.open_group(3)
        assert server.core.load.num_sessions == 2


@pytest.mark.slow
async def test_full_server_closes_only_unused_http_sessions() -> None:
    async with serve(max_sessions=2) as server, open_visitor(server) as client:
        await client.post("/reset", json={})
        await add_to_total(client, 1)
        for _ in range(5):
            async with open_visitor(server) as visitor:
                assert (await visitor.post("/reset", json={})).status_code == 200
        assert server.core.load.num_sessions == 2
        async with connect(server.http_address.replace("http", "ws") + "/ws") as socket:
            await socket.send('{"type":"reset"}')
            assert '"total":0' in await socket.recv()
            async with open_visitor(server) as refused_visitor:
                reply = await refused_visitor.post("/reset", json={})
                assert reply.status_code == 503
                assert reply.json()["detail"]["code"] == "CAPACITY_REACHED"
                assert int(reply.headers["retry-after"]) >= 1
        assert await add_to_total(client, 1) == 2


async def test_bare_actions_of_the_first_openenv_version_are_accepted() -> None:
    async with open_client(build_app(make_core())) as client:
        await client.post("/reset", json={})
        assert (await client.post("/step", json={"add": 2})).json()["observation"]["total"] == 2
        body = {"action": {"add": 2}, "timeout_s": 15, "request_id": "r"}
        assert (await client.post("/step", json=body)).json()["observation"]["total"] == 4
        reply = await client.post("/step", json={})
        assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["add"])


async def test_a_step_longer_than_its_limit_ends_the_session_with_a_typed_error() -> None:
    async with open_client(build_app(make_core(ThreadedCountingEnv))) as client:
        await client.post("/reset", json={})
        reply = await client.post("/step", json={"action": {"add": 99}, "timeout_s": 0.05})
        assert (reply.status_code, reply.json()["detail"]["code"]) == (504, "TIMEOUT")
        assert (await client.get("/state")).status_code == 410


@pytest.mark.parametrize(
    ("action", "status", "code"),
    [
        ({"add": 13}, 500, "EXECUTION_ERROR"),
        ({"add": 0}, 422, "ILLEGAL_ACTION"),
    ],
)
async def test_errors_have_a_code_and_the_session_continues(action, status: int, code: str) -> None:
    async with open_client(build_app(make_core())) as client:
        await client.post("/reset", json={})
        reply = await client.post("/step", json={"action": action})
        assert (reply.status_code, reply.json()["detail"]["code"]) == (status, code)
        assert await add_to_total(client, 1) == 1


async def test_a_step_after_the_end_is_a_conflict() -> None:
    async with open_client(build_app(make_core())) as client:
        await client.post("/reset", json={})
        await add_to_total(client, 7)
        reply = await client.post("/step", json={"add": 1})
        assert (reply.status_code, reply.json()["detail"]["code"]) == (409, "EPISODE_OVER")


async def test_legacy_mode_shares_one_session_between_requests_without_cookies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENENV_LEGACY_HTTP", "1")
    core = make_core()
    async with open_client(build_app(core)) as curl, open_client(build_app(core)) as other_client:

        async def call(path: str, **json):
            curl.cookies.clear()
            return (await curl.post(path, json=json)).json()["observation"]["total"]

        assert [await call("/reset"), await call("/step", add=1), await call("/step", add=1)] == [
            0,
            1,
            2,
        ]
        await other_client.post("/reset", json={})
        assert await call("/reset") == 0
        assert core.load.num_sessions == 2, "the previous default is given up"
        assert await add_to_total(other_client, 3) == 3


async def test_legacy_mode_keeps_separate_sessions_for_clients_with_cookies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENENV_LEGACY_HTTP", "true")
    async with serve() as server, open_visitor(server) as ada, open_visitor(server) as bob:
        await ada.post("/reset", json={})
        assert await add_to_total(ada, 1) == 1
        await bob.post("/reset", json={})
        assert [await add_to_total(bob, 2), await add_to_total(ada, 1)] == [2, 2]


@pytest.mark.parametrize(
    "body",
    [
        b'{"action": {"add": NaN}}',
        b'{"action": {"add": "\\ud800"}}',
        b'{"add": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"add": ' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"add": 1e999}',
        b'{"add": 123456789012345678901234567890}',
        b'{"action": null}',
        b"\x00\xff",
        b"[1]",
    ],
)
async def test_invalid_json_is_refused_and_the_session_continues(body) -> None:
    async with open_client(build_app(make_core())) as client:
        await client.post("/reset")
        reply = await client.post(
            "/step", content=body, headers={"content-type": "application/json"}
        )
        assert reply.status_code in (400, 422), reply.text
        assert len(reply.content) < 100_000
        reply = await client.post(
            "/reset", content=body, headers={"content-type": "application/json"}
        )
        assert reply.status_code in (200, 400, 422), reply.text
        assert await add_to_total(client, 1) == 1


async def test_request_body_beyond_the_size_limit_is_refused() -> None:
    async def chunks():
        for _ in range(18):
            yield b" " * 1024 * 1024

    async with open_client(build_app(make_core())) as client:
        headers = {"content-type": "application/json"}
        reply = await client.post("/step", content=chunks(), headers=headers)
        assert reply.status_code == 413


async def test_local_server_refuses_requests_from_foreign_origins() -> None:
    async with serve() as server, open_visitor(server) as client:
        reply = await client.post("/reset", headers={"origin": "https://elsewhere.example"})
        assert (reply.status_code, server.core.load.num_sessions) == (403, 0)
        reply = await client.post("/reset", headers={"origin": "http://localhost:3000"})
        assert reply.status_code == 200


async def test_overlong_session_id_is_reported_as_lost_in_a_short_response() -> None:
    async with open_client(build_app(make_core())) as client:
        reply = await client.get("/state", headers={"x-session-id": "x" * 5000})
        assert (reply.status_code, len(reply.text) < 500) == (410, True)


async def test_unused_http_sessions_make_room_for_a_group() -> None:
    core = make_core(max_sessions=2)
    async with open_client(build_app(core)) as client:
        for _ in range(2):
            await client.post("/reset")
            client.cookies.clear()
        group = await core.open_group(OpenArgs(), 2)
        assert core.load.num_sessions == 2
        assert (await core.state(group[0].session_id)).startswith(b"{")


async def test_incomplete_request_body_times_out_and_the_connection_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_module, "BODY_TIMEOUT_S", 0.1)
    async with serve() as server:
        host, port = server.http_address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        header = b"POST /step HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(header + b"content-length: 10\r\n\r\n{")
        response = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert response.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"TIMEOUT"' in response
