"""Sessions over plain HTTP, which a cookie or a header selects."""

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


def make_http_client(server) -> httpx.AsyncClient:
    """Return a client that keeps cookies, like the client of OpenEnv 0.1."""
    return httpx.AsyncClient(base_url=server.http_address, timeout=60)


def make_asgi_client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def make_core(factory=CountingEnv, **options) -> SessionCore:
    return SessionCore(make_local_host(factory), ServerOptions(**options))


async def add_to_total(client: httpx.AsyncClient, number: int, **kwargs) -> int:
    response = await client.post("/step", json={"action": {"add": number}}, **kwargs)
    assert response.status_code == 200, response.text
    return response.json()["observation"]["total"]


@pytest.mark.slow
@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_clients_with_cookies_have_separate_sessions(factory) -> None:
    async with (
        serve(factory) as server,
        make_http_client(server) as ada,
        make_http_client(server) as bob,
    ):
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
    async with make_asgi_client(build_app(make_core())) as client:
        response = await client.post("/reset")
        cookie = response.headers["set-cookie"]
        assert cookie.startswith(f"ludus_session={response.headers['x-session-id']}; ")
        assert cookie.endswith("; HttpOnly; SameSite=Lax; Path=/")
    mounted_app = Starlette(routes=[Mount("/envs/count", build_app(make_core()))])
    async with make_asgi_client(mounted_app) as client:
        response = await client.post("/envs/count/reset")
        assert response.headers["set-cookie"].endswith("; Path=/envs/count")
        response = await client.post("/envs/count/step", json={"add": 2})
        assert response.json()["observation"]["total"] == 2


async def test_session_id_header_selects_the_session() -> None:
    async with make_asgi_client(build_app(make_core())) as client:
        id_headers = {"x-session-id": (await client.post("/reset")).headers["x-session-id"]}
        client.cookies.clear()
        assert await add_to_total(client, 1, headers=id_headers) == 1
        client.cookies.clear()
        assert await add_to_total(client, 1, headers=id_headers) == 2
        client.cookies.clear()
        assert await add_to_total(client, 1) == 1, (
            "a request without an id used an existing session"
        )


async def test_a_lost_session_is_reported_lost_until_the_next_reset() -> None:
    core = make_core()
    async with make_asgi_client(build_app(core)) as client:
        session_id = (await client.post("/reset")).headers["x-session-id"]
        await add_to_total(client, 1)
        await core.close(session_id)
        for call in (client.post("/step", json={"add": 1}), client.get("/state")):
            response = await call
            assert (response.status_code, response.json()["detail"]["code"]) == (
                410,
                "SESSION_LOST",
            )
        new_response = await client.post("/reset")
        assert new_response.headers["x-session-id"] != session_id
        assert await add_to_total(client, 2) == 2


@pytest.mark.parametrize("path", ["/close", "/session"])
async def test_client_can_close_a_session(path: str) -> None:
    core = make_core()
    async with make_asgi_client(build_app(core)) as client:
        await client.post("/reset")
        assert core.load.num_sessions == 1
        response = await client.request("POST" if path == "/close" else "DELETE", path)
        assert (response.json(), core.load.num_sessions) == ({"closed": True}, 0)
        assert "ludus_session" not in client.cookies
        response = await client.post("/close")
        assert response.json() == {"closed": False}


async def test_unused_session_times_out_before_a_used_session(core_clock) -> None:
    core = make_core()
    sweep_task = asyncio.create_task(core.close_idle_forever())
    app = build_app(core, unused_timeout_s=60)
    async with make_asgi_client(app) as client:
        await client.post("/reset")
        await add_to_total(client, 1)
        async with make_asgi_client(app) as unused_client:
            await unused_client.post("/reset")
        assert core.load.num_sessions == 2
        core_clock.advance(60)
        await wait_until(lambda: core.load.num_sessions == 1)
        assert await add_to_total(client, 1) == 2
    sweep_task.cancel()


@pytest.mark.slow
async def test_a_group_larger_than_the_server_ends_no_unused_session() -> None:
    async with serve(max_sessions=2) as server:
        for _ in range(2):
            async with make_http_client(server) as unused_client:
                assert (await unused_client.post("/reset", json={})).status_code == 200
        async with await AsyncEnvClient.connect(server.grpc_address) as client:
            with pytest.raises(InvalidCallError):
                await client.open_group(3)
        assert server.core.load.num_sessions == 2


@pytest.mark.slow
async def test_full_server_closes_only_unused_http_sessions() -> None:
    async with serve(max_sessions=2) as server, make_http_client(server) as client:
        await client.post("/reset", json={})
        await add_to_total(client, 1)
        for _ in range(5):
            async with make_http_client(server) as unused_client:
                assert (await unused_client.post("/reset", json={})).status_code == 200
        assert server.core.load.num_sessions == 2
        async with connect(server.http_address.replace("http", "ws") + "/ws") as socket:
            await socket.send('{"type":"reset"}')
            assert '"total":0' in await socket.recv()
            async with make_http_client(server) as refused_client:
                response = await refused_client.post("/reset", json={})
                assert response.status_code == 503
                assert response.json()["detail"]["code"] == "CAPACITY_REACHED"
                assert int(response.headers["retry-after"]) >= 1
        assert await add_to_total(client, 1) == 2


async def test_unwrapped_actions_of_early_openenv_clients_are_accepted() -> None:
    async with make_asgi_client(build_app(make_core())) as client:
        await client.post("/reset", json={})
        assert (await client.post("/step", json={"add": 2})).json()["observation"]["total"] == 2
        body = {"action": {"add": 2}, "timeout_s": 15, "request_id": "r"}
        assert (await client.post("/step", json=body)).json()["observation"]["total"] == 4
        response = await client.post("/step", json={})
        assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["add"])


async def test_a_step_longer_than_its_limit_ends_the_session_with_a_typed_error() -> None:
    async with make_asgi_client(build_app(make_core(ThreadedCountingEnv))) as client:
        await client.post("/reset", json={})
        response = await client.post("/step", json={"action": {"add": 99}, "timeout_s": 0.05})
        assert (response.status_code, response.json()["detail"]["code"]) == (504, "TIMEOUT")
        assert (await client.get("/state")).status_code == 410


@pytest.mark.parametrize(
    ("action", "status", "code"),
    [
        ({"add": 13}, 500, "EXECUTION_ERROR"),
        ({"add": 0}, 422, "ILLEGAL_ACTION"),
    ],
)
async def test_errors_have_a_code_and_the_session_continues(action, status: int, code: str) -> None:
    async with make_asgi_client(build_app(make_core())) as client:
        await client.post("/reset", json={})
        response = await client.post("/step", json={"action": action})
        assert (response.status_code, response.json()["detail"]["code"]) == (status, code)
        assert await add_to_total(client, 1) == 1


async def test_step_after_the_end_of_an_episode_is_a_conflict() -> None:
    async with make_asgi_client(build_app(make_core())) as client:
        await client.post("/reset", json={})
        await add_to_total(client, 7)
        response = await client.post("/step", json={"add": 1})
        assert (response.status_code, response.json()["detail"]["code"]) == (409, "EPISODE_OVER")


async def test_legacy_mode_shares_one_session_between_requests_without_cookies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENENV_LEGACY_HTTP", "1")
    core = make_core()
    async with (
        make_asgi_client(build_app(core)) as cookieless_client,
        make_asgi_client(build_app(core)) as other_client,
    ):

        async def call_without_cookies(path: str, **json):
            cookieless_client.cookies.clear()
            return (await cookieless_client.post(path, json=json)).json()["observation"]["total"]

        totals = [
            await call_without_cookies("/reset"),
            await call_without_cookies("/step", add=1),
            await call_without_cookies("/step", add=1),
        ]
        assert totals == [0, 1, 2]
        await other_client.post("/reset", json={})
        assert await call_without_cookies("/reset") == 0
        assert core.load.num_sessions == 2, "the previous default session is still open"
        assert await add_to_total(other_client, 3) == 3


@pytest.mark.slow
async def test_legacy_mode_keeps_separate_sessions_for_clients_with_cookies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENENV_LEGACY_HTTP", "true")
    async with serve() as server, make_http_client(server) as ada, make_http_client(server) as bob:
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
    async with make_asgi_client(build_app(make_core())) as client:
        await client.post("/reset")
        response = await client.post(
            "/step", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code in (400, 422), response.text
        assert len(response.content) < 100_000
        response = await client.post(
            "/reset", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code in (200, 400, 422), response.text
        assert await add_to_total(client, 1) == 1


async def test_request_body_beyond_the_size_limit_is_refused() -> None:
    async def generate_chunks():
        for _ in range(18):
            yield b" " * 1024 * 1024

    async with make_asgi_client(build_app(make_core())) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/step", content=generate_chunks(), headers=headers)
        assert response.status_code == 413


@pytest.mark.parametrize(("method", "path"), [("POST", "/close"), ("DELETE", "/session")])
async def test_closing_an_unknown_session_is_reported(method: str, path: str) -> None:
    async with make_asgi_client(build_app(make_core())) as client:
        response = await client.request(method, path, headers={"x-session-id": "nobody"})
        assert response.status_code == 404
        detail = response.json()["detail"]
        assert (detail["code"], "nobody" in detail["message"]) == ("SESSION_ERROR", True)
        session_id = (await client.post("/reset", json={})).headers["x-session-id"]
        for _ in range(2):  # a session that has ended is known
            response = await client.request(method, path, headers={"x-session-id": session_id})
            assert (response.status_code, response.json()) == (200, {"closed": True})


@pytest.mark.slow
async def test_local_server_refuses_requests_from_foreign_origins() -> None:
    async with serve() as server, make_http_client(server) as client:
        response = await client.post("/reset", headers={"origin": "https://elsewhere.example"})
        assert (response.status_code, server.core.load.num_sessions) == (403, 0)
        response = await client.post("/reset", headers={"origin": "http://localhost:3000"})
        assert response.status_code == 200


async def test_overlong_session_id_is_reported_as_lost_in_a_short_response() -> None:
    async with make_asgi_client(build_app(make_core())) as client:
        response = await client.get("/state", headers={"x-session-id": "x" * 5000})
        assert (response.status_code, len(response.text) < 500) == (410, True)


async def test_unused_http_sessions_make_room_for_a_group() -> None:
    core = make_core(max_sessions=2)
    async with make_asgi_client(build_app(core)) as client:
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
        header = b"POST /step HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(header + b"content-length: 10\r\n\r\n{")
        response = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert response.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"TIMEOUT"' in response


async def test_paths_behind_a_prefix_need_no_redirect() -> None:
    async with make_asgi_client(build_app(make_core())) as client:
        response = await client.post("/reset/")
        assert response.status_code == 200 and response.json()["done"] is False
        docs = await client.get("/docs")
        assert docs.status_code == 200 and "'openapi.json'" in docs.text


async def test_body_that_is_not_json_has_its_own_status_and_code() -> None:
    async with make_asgi_client(build_app(make_core())) as client:
        headers = {"content-type": "application/json"}
        for path in ("/reset", "/step"):
            response = await client.post(path, content=b"{", headers=headers)
            assert response.status_code == 400, response.text
            assert response.json()["detail"]["code"] == "INVALID_JSON"
