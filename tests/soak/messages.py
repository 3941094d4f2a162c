"""Messages that no client should send: too large, invalid, or incomplete.

Each function returns the outcome for the log. A server may refuse a message in any way, as long as
the server and all other sessions continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import grpc
import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from ludus.env.limits import MAX_MESSAGE_BYTES
from ludus.env.messages.protobuf import ENVIRONMENT_KEY
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
RESPONSE_TIMEOUT_S = 30.0
_TOO_LARGE = MAX_MESSAGE_BYTES + 2**20

Send = Callable[["Receiver", random.Random], Awaitable[str]]


class Receiver:
    """The addresses and the token of a server or gateway."""

    def __init__(self, http: str, grpc_address: str, path: str, token: str) -> None:
        self.http = http
        self.grpc = grpc_address.removeprefix("grpc://")
        self.path = path
        """Prefix of /reset and /ws in a gateway; "" for a server."""
        self.token = token
        self.headers = {"authorization": f"Bearer {token}"}

    @property
    def socket(self) -> str:
        """Address of /ws."""
        return self.http.replace("http", "ws", 1) + self.path + "/ws"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata for gRPC."""
        name = self.path.rpartition("/")[2]
        parts = (("authorization", f"Bearer {self.token}"),)
        return (*parts, (ENVIRONMENT_KEY, name)) if name else parts

    @property
    def http_port(self) -> int:
        """HTTP port."""
        return int(self.http.rpartition(":")[2])

    @property
    def grpc_port(self) -> int:
        """gRPC port."""
        return int(self.grpc.rpartition(":")[2])


async def send_and_describe(send: Send, address: Receiver, rng: random.Random) -> str:
    """Send a message and return the outcome, which may be a closed connection."""
    try:
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            return await send(address, rng)
    except (OSError, httpx.HTTPError, WebSocketException, asyncio.IncompleteReadError) as error:
        return type(error).__name__
    except grpc.RpcError as error:
        return str(error.code()) if isinstance(error, grpc.aio.AioRpcError) else "RpcError"
    except TimeoutError:
        return "no response"


async def send_large_body(address: Receiver, rng: random.Random) -> str:
    """Send a body above the size limit."""
    async with httpx.AsyncClient(headers=address.headers, timeout=RESPONSE_TIMEOUT_S) as http:
        response = await http.post(
            f"{address.http}{address.path}/reset", content=b'{"player": "' + b"x" * _TOO_LARGE
        )
        return str(response.status_code)


async def send_large_headers(address: Receiver, rng: random.Random) -> str:
    """Send headers above the size limit."""
    async with httpx.AsyncClient(headers=address.headers, timeout=RESPONSE_TIMEOUT_S) as http:
        response = await http.get(f"{address.http}/health", headers={"x-much": "y" * 80_000})
        return str(response.status_code)


async def send_large_frame(address: Receiver, rng: random.Random) -> str:
    """Send a WebSocket message above the size limit."""
    async with connect(
        address.socket, additional_headers=address.headers, open_timeout=RESPONSE_TIMEOUT_S
    ) as socket:
        await socket.send("x" * _TOO_LARGE)
        await socket.recv()
    return "answered"


async def send_large_call(address: Receiver, rng: random.Random) -> str:
    """Send a gRPC message above the size limit."""
    step = pb.StepRequest(session_id="none", action_json=b"x" * _TOO_LARGE)
    return await _send_calls(address, [pb.Call(call_id=1, step=step)])


async def send_strange_frames(address: Receiver, rng: random.Random) -> str:
    """Send WebSocket messages outside the protocol."""
    frames: list[str | bytes] = [
        "no json",
        '{"type": "nonsense"}',
        '{"type": "step", "data": 7}',
        "[" * 20_000,
        rng.randbytes(512),
        '{"type": "step", "data": {"action": {"payload": 7}}}',
    ]
    async with connect(
        address.socket, additional_headers=address.headers, open_timeout=RESPONSE_TIMEOUT_S
    ) as socket:
        for frame in rng.sample(frames, 3):
            await socket.send(frame)
            await socket.recv()
    return "answered"


async def send_strange_calls(address: Receiver, rng: random.Random) -> str:
    """Send gRPC calls with unknown ids, and empty calls."""
    unknown_id = "".join(rng.choices("abcdefghijkmnpqrstuvwxyz.-_", k=rng.choice((1, 90, 400))))
    calls = [
        pb.Call(call_id=1),
        pb.Call(call_id=2, state=pb.StateRequest(session_id=unknown_id)),
        pb.Call(call_id=3, close=pb.CloseRequest(session_id=unknown_id)),
        pb.Call(call_id=4, step=pb.StepRequest(session_id=unknown_id, action_json=b"{")),
        pb.Call(call_id=4, detach=pb.DetachRequest(session_id=unknown_id)),
    ]
    return await _send_calls(address, calls)


async def send_strange_bodies(address: Receiver, rng: random.Random) -> str:
    """Send HTTP bodies that are not JSON, or unknown JSON."""
    bodies = [b"{", b"[]", rng.randbytes(300), b'{"action": 1}', b'{"seed": "x"}', b"[" * 50_000]
    async with httpx.AsyncClient(headers=address.headers, timeout=RESPONSE_TIMEOUT_S) as http:
        url = f"{address.http}{address.path}/{rng.choice(('reset', 'step', 'mcp'))}"
        response = await http.post(url, content=rng.choice(bodies))
        return str(response.status_code)


async def send_noise(address: Receiver, rng: random.Random) -> str:
    """Send random bytes."""
    port = rng.choice((address.http_port, address.grpc_port))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(rng.choice((b"", HTTP2_PREFACE)) + rng.randbytes(rng.choice((10, 1000, 100_000))))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(65_536), 5.0)
    writer.transport.abort()
    return "aborted"


async def send_wrong_token(address: Receiver, rng: random.Random) -> str:
    """Send a call with an unknown token."""
    async with httpx.AsyncClient(timeout=RESPONSE_TIMEOUT_S) as http:
        headers = {"authorization": f"Bearer {rng.randbytes(16).hex()}"}
        response = await http.post(f"{address.http}{address.path}/reset", json={}, headers=headers)
        return str(response.status_code)


async def send_partial_message(address: Receiver, rng: random.Random) -> str:
    """Send the beginning of a message, wait, and close the connection."""
    request_head = (
        f"POST {address.path}/reset HTTP/1.1\r\nhost: localhost\r\n"
        f"authorization: Bearer {address.token}"
    )
    handshake = (
        f"GET {address.path}/ws HTTP/1.1\r\nhost: localhost\r\n"
        "upgrade: websocket\r\nconnection: upgrade\r\n"
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13"
        f"\r\nauthorization: Bearer {address.token}\r\n\r\n"
    )
    beginnings = [
        (address.http_port, request_head.encode()),
        (address.http_port, f"{request_head}\r\ncontent-length: 1000\r\n\r\n{{".encode()),
        (address.http_port, handshake.encode()),
        (address.http_port, handshake.encode() + b"\x81\xfe\x10\x00half a frame"),
        (address.grpc_port, HTTP2_PREFACE[: rng.randrange(1, len(HTTP2_PREFACE))]),
        (address.grpc_port, HTTP2_PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
    ]
    port, beginning = rng.choice(beginnings)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(beginning)
    await asyncio.sleep(rng.uniform(0.1, 15.0))
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()
    return "disconnected"


async def _send_calls(address: Receiver, calls: list[pb.Call]) -> str:
    """Send the calls on a new stream; return the number of replies."""
    channel_options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address.grpc, options=channel_options) as channel:
        stream = env_pb2_grpc.EnvServiceStub(channel).Connect(metadata=address.metadata)
        await stream.write(pb.CallBatch(calls=calls))
        response = await stream.read()
        stream.cancel()
        return "ended" if response is grpc.aio.EOF else f"{len(response.replies)} replies"


OVERSIZED: dict[str, Send] = {
    "large body": send_large_body,
    "large headers": send_large_headers,
    "large frame": send_large_frame,
    "large call": send_large_call,
}
MALFORMED: dict[str, Send] = {
    "strange frames": send_strange_frames,
    "strange calls": send_strange_calls,
    "strange bodies": send_strange_bodies,
    "noise": send_noise,
    "wrong token": send_wrong_token,
}
HALF_SENT: dict[str, Send] = {"message": send_partial_message}
