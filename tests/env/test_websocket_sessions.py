"""Opening, attaching and closing of sessions on `/ws`."""

import asyncio
import gc
import json
import threading

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from ludus.env.asgi.socket import AsgiSocket, SocketGoneError
from ludus.env.http.app import build_app
from ludus.env.security.tracing import get_request_id
from ludus.proto.errors import CapacityError
from tests.env.counting_env import CountingEnv, Misbehavior, ThreadedCountingEnv, UnrulyEnv
from tests.env.polling import advance_loop_clock, limit_steps, run_pending_tasks, wait_until
from tests.env.served import serve
from tests.env.served_app import make_core, serve_app


def open_socket(authority: str, query: str = ""):
    return connect(f"ws://{authority}/ws{query}", compression=None, ping_interval=None)


async def send(socket, message):
    await socket.send(json.dumps(message))
    return json.loads(await asyncio.wait_for(socket.recv(), 60))


async def wait_for_close(socket) -> tuple[int, str]:
    """Wait until the server closes the socket; return the close code and reason."""
    with pytest.raises(ConnectionClosed):
        await asyncio.wait_for(socket.recv(), 60)
    return socket.close_code, socket.close_reason


@pytest.fixture(params=[CountingEnv, ThreadedCountingEnv])
def factory(request: pytest.FixtureRequest):
    return request.param


async def test_a_connection_is_accepted_and_waits_for_a_free_session(factory) -> None:
    core = make_core(factory, max_sessions=1, wait_for_slot_s=60)
    async with serve_app(build_app(core)) as authority:
        first_socket = await open_socket(authority)
        await send(first_socket, {"type": "reset"})
        async with open_socket(authority) as next_socket:
            task = asyncio.create_task(send(next_socket, {"type": "reset", "data": {"start": 3}}))
            await wait_until(lambda: core.load.num_waiting == 1)
            await first_socket.close()
            assert (await task)["data"]["observation"]["total"] == 3


async def test_disconnected_client_stops_waiting_for_a_session(factory) -> None:
    core = make_core(factory, max_sessions=1, wait_for_slot_s=60)
    async with serve_app(build_app(core)) as authority, open_socket(authority) as first_socket:
        await send(first_socket, {"type": "reset"})
        next_socket = await open_socket(authority)
        await next_socket.send('{"type":"reset"}')
        await wait_until(lambda: core.load.num_waiting == 1)
        next_socket.transport.abort()
        await wait_until(lambda: core.load.num_waiting == 0)
        assert core.load.num_sessions == 1


async def test_session_is_refused_when_the_wait_times_out() -> None:
    core = make_core(max_sessions=1, wait_for_slot_s=0.1)
    async with (
        serve_app(build_app(core)) as authority,
        open_socket(authority) as first_socket,
        open_socket(authority) as next_socket,
    ):
        await send(first_socket, {"type": "state"})
        reply = await send(next_socket, {"type": "reset"})
        assert reply["data"]["code"] == "CAPACITY_REACHED"
        assert (await wait_for_close(next_socket))[0] == 1000


@pytest.mark.slow
async def test_idle_session_closes_the_socket_with_a_reason(factory, core_clock) -> None:
    core = make_core(factory, idle_timeout_s=60)
    sweep_task = asyncio.create_task(core.close_idle_forever())
    async with serve_app(build_app(core)) as authority, open_socket(authority) as socket:
        await send(socket, {"type": "reset"})
        core_clock.advance(60)
        assert await wait_for_close(socket) == (1001, "it was idle for 60 s")
        assert core.load.num_sessions == 0
    sweep_task.cancel()


async def test_step_timeout_gets_an_error_reply_before_the_socket_closes() -> None:
    core = make_core(ThreadedCountingEnv)
    async with serve_app(build_app(core)) as authority, open_socket(authority) as socket:
        await send(socket, {"type": "reset"})
        limit_steps(core, 0.25)
        reply = await send(socket, {"type": "step", "data": {"add": 99}})
        assert reply["data"]["code"] == "TIMEOUT"
        assert await wait_for_close(socket) == (1011, "a step took longer than 0.25 s")


async def test_server_shutdown_closes_the_socket_with_a_reason(factory) -> None:
    core = make_core(factory)
    async with serve_app(build_app(core)) as authority, open_socket(authority) as socket:
        await send(socket, {"type": "reset"})
        await core.shut_down()
        assert await wait_for_close(socket) == (1001, "the server is shutting down")
    async with serve(factory) as server:
        socket = await open_socket(server.http_address.removeprefix("http://"))
        await send(socket, {"type": "reset"})
    assert await wait_for_close(socket) == (1001, "the server is shutting down")


@pytest.mark.slow
async def test_mcp_session_allows_one_attached_socket_and_outlives_the_socket(factory) -> None:
    core = make_core(factory)
    app = build_app(core)
    async with (
        serve_app(app) as authority,
        httpx.AsyncClient(base_url=f"http://{authority}", timeout=60) as client,
    ):

        async def call(method: str, **params):
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return (await client.post("/mcp", json=body)).json()["result"]

        session_id = (await call("openenv/session/create"))["session_id"]
        async with open_socket(authority, f"?session_id={session_id}") as socket:
            await send(socket, {"type": "reset"})
            assert (await send(socket, {"type": "step", "data": {"add": 2}}))["type"]
            async with open_socket(authority, f"?session_id={session_id}") as next_socket:
                error = json.loads(await next_socket.recv())["data"]
                assert error["code"] == "SESSION_ERROR"
                assert error["message"].endswith("already has an attached WebSocket")
                assert (await wait_for_close(next_socket))[0] == 1000
            assert core.load.num_sessions == 1
        async with open_socket(authority, f"?session_id={session_id}") as socket:
            state = (await send(socket, {"type": "state"}))["data"]
            assert (state["step_count"], state["total"]) == (1, 2)
            result = await call("openenv/session/close", session_id=session_id)
            assert result == {"session_id": session_id, "closed": False, "closing": True}
            assert (await send(socket, {"type": "state"}))["data"]["total"] == 2
        await wait_until(lambda: core.load.num_sessions == 0)
        async with open_socket(authority, f"?session_id={session_id}") as socket:
            response = json.loads(await socket.recv())
            assert response["data"] == {
                "message": f"Unknown session_id: {session_id}",
                "code": "SESSION_ERROR",
            }
            assert (await wait_for_close(socket))[0] == 1000


async def test_non_reading_client_has_bounded_buffer_and_blocks_no_other_client() -> None:
    core = make_core()
    async with serve_app(build_app(core)) as authority, open_socket(authority) as other_socket:
        host, _, port = authority.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        reader._transport.pause_reading()
        writer.write(
            b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        note = json.dumps({"type": "reset", "data": {"note": "x" * 60_000}}).encode()
        header = b"\x81\xfe" + len(note).to_bytes(2, "big") + b"\x00" * 4
        for _ in range(200):
            writer.write(header + note)
        await wait_until(lambda: core.load.num_sessions == 2)
        await send(other_socket, {"type": "reset"})
        for _ in range(20):
            await send(other_socket, {"type": "state"})
        assert writer.transport.get_write_buffer_size() > 0, "the server did not stop reading"
        writer.transport.abort()
        await wait_until(lambda: core.load.num_sessions == 1)


async def test_half_open_connection_is_closed_and_the_session_is_freed() -> None:
    core = make_core()
    app = build_app(core)
    async with serve_app(app, ws_ping_interval=60, ws_ping_timeout=60) as authority:
        socket = await open_socket(authority)
        await send(socket, {"type": "reset"})
        socket.transport.pause_reading()  # a client that does not read sends no pongs
        advance_loop_clock(61)
        await run_pending_tasks()
        advance_loop_clock(61)
        await wait_until(lambda: core.load.num_sessions == 0)
        socket.transport.abort()


async def test_replies_to_pipelined_messages_keep_the_order(factory) -> None:
    core = make_core(factory)
    async with serve_app(build_app(core)) as authority, open_socket(authority) as socket:
        messages = [{"type": "reset"}]
        messages += [{"type": "step", "data": {"add": 1}}, {"type": "state"}, {"type": "nope"}] * 4
        for message in messages:
            await socket.send(json.dumps(message))
        replies = [json.loads(await socket.recv()) for _ in messages]
        totals = [reply["data"]["observation"]["total"] for reply in replies[1::3]]
        assert totals == [1, 2, 3, 4]
        assert [reply["data"]["total"] for reply in replies[2::3]] == [1, 2, 3, 4]
        assert {reply["type"] for reply in replies[3::3]} == {"error"}


class StuckEnv(ThreadedCountingEnv):
    """An environment whose steps block until the test sets an event."""

    start_event = threading.Event()
    return_event = threading.Event()

    def step(self, action):
        self.start_event.set()
        self.return_event.wait(60)
        return super().step(action)


async def test_disconnect_during_a_step_frees_the_session_immediately() -> None:
    core = make_core(StuckEnv, max_sessions=1)
    async with serve_app(build_app(core)) as authority:
        socket = await open_socket(authority)
        await send(socket, {"type": "reset"})
        await socket.send('{"type":"step","data":{"add":1}}')
        await wait_until(StuckEnv.start_event.is_set)
        socket.transport.abort()
        await wait_until(lambda: core.load.num_sessions == 0)
        StuckEnv.return_event.set()


@pytest.mark.slow
async def test_worker_exit_closes_session_sockets_with_a_reason() -> None:
    options = {"isolation": "pool", "num_workers": 1, "max_sessions": 4}
    async with serve(UnrulyEnv, **options) as server:
        authority = server.http_address.removeprefix("http://")
        async with open_socket(authority) as unruly_socket, open_socket(authority) as other_socket:
            for socket in (unruly_socket, other_socket):
                await send(socket, {"type": "reset"})
            reply = await send(unruly_socket, {"type": "step", "data": {"add": Misbehavior.EXIT}})
            assert reply["data"]["code"] == "SESSION_LOST"
            for socket in (unruly_socket, other_socket):
                code, reason = await wait_for_close(socket)
                assert (code, "worker" in reason) == (1011, True), reason
        async with open_socket(authority) as socket:
            assert (await send(socket, {"type": "reset"}))["type"] == "observation"


class RequestIdEnv(CountingEnv):
    """An environment whose observations contain the request id of the call."""

    def _observe(self, note: str = ""):
        return super()._observe(note or get_request_id())


async def test_the_request_id_of_a_connection_reaches_the_environment() -> None:
    headers = {"x-request-id": "r-7"}
    async with (
        serve_app(build_app(make_core(RequestIdEnv))) as authority,
        connect(f"ws://{authority}/ws", additional_headers=headers) as socket,
        httpx.AsyncClient(base_url=f"http://{authority}", timeout=60) as client,
    ):
        for message in ({"type": "reset"}, {"type": "step", "data": {"add": 1}}):
            reply = await send(socket, message)
            assert reply["data"]["metadata"] == {"note": "r-7"}
        for name in ("h-1", "h-2"):
            reply = await client.post("/reset", headers={"x-request-id": name})
            assert reply.json()["metadata"] == {"note": name}


async def test_refusal_during_a_disconnect_logs_no_unhandled_exception() -> None:
    log_messages = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: log_messages.append(context["message"]))

    async def receive():
        return {"type": "websocket.disconnect"}

    async def refuse() -> None:
        raise CapacityError("full")

    with pytest.raises(SocketGoneError):
        await AsgiSocket({}, receive, None).run_while_connected(refuse())
    gc.collect()
    assert log_messages == []
