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

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ANSWER_WITHIN_S = 30.0
_TOO_LARGE = MAX_MESSAGE_BYTES + 2**20

Send = Callable[["Address", random.Random], Awaitable[str]]


class Address:
    """The receiver of a message, and the token."""

    def __init__(self, http: str, grpc_address: str, path: str, token: str) -> None:
        self.http = http
        self.grpc = grpc_address.removeprefix("grpc://")
        self.path = path
        """Path before /reset and /ws; "" for a server."""
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


async def attempt(send: Send, address: Address, draw: random.Random) -> str:
    """Send a message and return the outcome; a closed connection is an outcome too."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await send(address, draw)
    except (OSError, httpx.HTTPError, WebSocketException, asyncio.IncompleteReadError) as error:
        return type(error).__name__
    except grpc.RpcError as error:
        return str(error.code()) if isinstance(error, grpc.aio.AioRpcError) else "RpcError"
    except TimeoutError:
        return "no answer"


async def large_body(address: Address, draw: random.Random) -> str:
    """Send a body above the size limit."""
    async with httpx.AsyncClient(headers=address.headers, timeout=ANSWER_WITHIN_S) as http:
        answer = await http.post(
            f"{address.http}{address.path}/reset", content=b'{"player": "' + b"x" * _TOO_LARGE
        )
        return str(answer.status_code)


async def large_headers(address: Address, draw: random.Random) -> str:
    """Send headers above the size limit."""
    async with httpx.AsyncClient(headers=address.headers, timeout=ANSWER_WITHIN_S) as http:
        answer = await http.get(f"{address.http}/health", headers={"x-much": "y" * 80_000})
        return str(answer.status_code)


async def large_frame(address: Address, draw: random.Random) -> str:
    """Send a WebSocket message above the size limit."""
    async with connect(
        address.socket, additional_headers=address.headers, open_timeout=ANSWER_WITHIN_S
    ) as socket:
        await socket.send("x" * _TOO_LARGE)
        await socket.recv()
    return "answered"


async def large_call(address: Address, draw: random.Random) -> str:
    """Send a gRPC message above the size limit."""
    step = pb.StepRequest(session_id="none", action_json=b"x" * _TOO_LARGE)
    return await _stream(address, [pb.Call(call_id=1, step=step)])


async def strange_frames(address: Address, draw: random.Random) -> str:
    """Send WebSocket messages outside the protocol."""
    frames: list[str | bytes] = [
        "no json",
        '{"type": "nonsense"}',
        '{"type": "step", "data": 7}',
        "[" * 20_000,
        draw.randbytes(512),
        '{"type": "step", "data": {"action": {"payload": 7}}}',
    ]
    async with connect(
        address.socket, additional_headers=address.headers, open_timeout=ANSWER_WITHIN_S
    ) as socket:
        for frame in draw.sample(frames, 3):
            await socket.send(frame)
            await socket.recv()
    return "answered"


async def strange_calls(address: Address, draw: random.Random) -> str:
    """Send gRPC calls with unknown ids, and empty calls."""
    forged = "".join(draw.choices("abcdefghijkmnpqrstuvwxyz.-_", k=draw.choice((1, 90, 400))))
    calls = [
        pb.Call(call_id=1),
        pb.Call(call_id=2, state=pb.StateRequest(session_id=forged)),
        pb.Call(call_id=3, close=pb.CloseRequest(session_id=forged)),
        pb.Call(call_id=4, step=pb.StepRequest(session_id=forged, action_json=b"{")),
        pb.Call(call_id=4, detach=pb.DetachRequest(session_id=forged)),
    ]
    return await _stream(address, calls)


async def strange_bodies(address: Address, draw: random.Random) -> str:
    """Send HTTP bodies that are not JSON, or unknown JSON."""
    bodies = [b"{", b"[]", draw.randbytes(300), b'{"action": 1}', b'{"seed": "x"}', b"[" * 50_000]
    async with httpx.AsyncClient(headers=address.headers, timeout=ANSWER_WITHIN_S) as http:
        url = f"{address.http}{address.path}/{draw.choice(('reset', 'step', 'mcp'))}"
        answer = await http.post(url, content=draw.choice(bodies))
        return str(answer.status_code)


async def noise(address: Address, draw: random.Random) -> str:
    """Send random bytes."""
    port = draw.choice((address.http_port, address.grpc_port))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(draw.choice((b"", PREFACE)) + draw.randbytes(draw.choice((10, 1000, 100_000))))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(65_536), 5.0)
    writer.transport.abort()
    return "cut off"


async def wrong_token(address: Address, draw: random.Random) -> str:
    """Send a call with an unknown token."""
    async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S) as http:
        headers = {"authorization": f"Bearer {draw.randbytes(16).hex()}"}
        answer = await http.post(f"{address.http}{address.path}/reset", json={}, headers=headers)
        return str(answer.status_code)


async def half_sent(address: Address, draw: random.Random) -> str:
    """Send the beginning of a message, wait, and close the connection."""
    head = f"POST {address.path}/reset HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {address.token}"
    shake = (
        f"GET {address.path}/ws HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade"
        "\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13"
        f"\r\nauthorization: Bearer {address.token}\r\n\r\n"
    )
    starts = [
        (address.http_port, head.encode()),
        (address.http_port, f"{head}\r\ncontent-length: 1000\r\n\r\n{{".encode()),
        (address.http_port, shake.encode()),
        (address.http_port, shake.encode() + b"\x81\xfe\x10\x00half a frame"),
        (address.grpc_port, PREFACE[: draw.randrange(1, len(PREFACE))]),
        (address.grpc_port, PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
    ]
    port, start = draw.choice(starts)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    await asyncio.sleep(draw.uniform(0.1, 15.0))
    if draw.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()
    return "left"


async def _stream(address: Address, calls: list[pb.Call]) -> str:
    """Return the codes of the replies, or of the end of the stream."""
    sizes = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address.grpc, options=sizes) as channel:
        stream = env_pb2_grpc.EnvServiceStub(channel).Connect(metadata=address.metadata)
        await stream.write(pb.CallBatch(calls=calls))
        answer = await stream.read()
        stream.cancel()
        return "ended" if answer is grpc.aio.EOF else f"{len(answer.replies)} replies"


OVERSIZED: dict[str, Send] = {
    "large body": large_body,
    "large headers": large_headers,
    "large frame": large_frame,
    "large call": large_call,
}
MALFORMED: dict[str, Send] = {
    "strange frames": strange_frames,
    "strange calls": strange_calls,
    "strange bodies": strange_bodies,
    "noise": noise,
    "wrong token": wrong_token,
}
HALF_SENT: dict[str, Send] = {"message": half_sent}
