"""Web pages, long heads and half-open connections do not reach or stop servers and gateways."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme

from ludus.env.client import AsyncEnvClient
from tests.attack.attacked import (
    AttackedProcess,
    make_cases,
    serve_agents,
    serve_env,
    serve_gateway,
    watch,
)

pytestmark = pytest.mark.slow

Requests = tuple[tuple[bytes, bytes], ...]
READ_TIMEOUT_S = 60.0
MAX_GROWTH_MB = 100
"""Maximum growth of a process's memory during an attack."""
POSTS = (b"reset", b"step", b"state", b"mcp", b"drain")
ENVIRONMENT_REQUESTS: Requests = (
    *((b"GET", path) for path in (b"metadata", b"state", b"schema", b"health", b"ws")),
    *((b"POST", path) for path in POSTS[:4]),
)
ADMIN_REQUESTS: Requests = (
    *((b"GET", path) for path in (b"metrics", b"readyz", b"drain")),
    (b"POST", b"drain"),
    (b"POST", b"drain?wait=0"),
)
AGENT_REQUESTS: Requests = (
    (b"GET", b"v1/models"),
    (b"POST", b"v1/chat/completions"),
    (b"POST", b"v1/responses"),
    (b"POST", b"mcp"),
)


class Target:
    """A port that is attacked, with the requests that a web page would send to it."""

    def __init__(
        self, attacked: AttackedProcess, port: int, requests: Requests, api_key: str = ""
    ) -> None:
        self.attacked = attacked
        self.port = port
        self.requests = requests
        self.header = b"authorization: Bearer %s\r\n" % api_key.encode() if api_key else b""

    @property
    def memory_mb(self) -> int:
        """Memory of the process, in megabytes."""
        status = Path(f"/proc/{self.attacked.process.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) // 1024


def get_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProcess]:
    with serve_env(tmp_path_factory.mktemp("server") / "empty", "--admin-port", "0") as attacked:
        yield attacked


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    admin_port = get_free_port()
    (folder / "gateway.toml").write_text(f"admin_port = {admin_port}\n")
    with serve_gateway(folder / "empty", "--config", str(folder / "gateway.toml")) as attacked:
        attacked.addresses["admin"] = f"http://127.0.0.1:{admin_port}"
        yield attacked


@pytest.fixture(scope="module")
def targets(
    server: AttackedProcess, gateway: AttackedProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Target]]:
    """Yield all HTTP ports."""
    gateway_requests = tuple(
        (method, b"envs/hostile/" + path) for method, path in ENVIRONMENT_REQUESTS
    )
    with serve_agents(tmp_path_factory.mktemp("agents") / "empty", 1) as agents:
        agents_port = int(agents.addresses["base_url_0"].rpartition(":")[2].split("/")[0])
        yield [
            Target(server, server.port, ENVIRONMENT_REQUESTS + ADMIN_REQUESTS),
            Target(server, read_port(server.addresses["admin"]), ADMIN_REQUESTS),
            Target(
                gateway, gateway.port, (*gateway_requests, *ADMIN_REQUESTS, (b"GET", b"v1/envs"))
            ),
            Target(gateway, read_port(gateway.addresses["admin"]), ADMIN_REQUESTS),
            Target(agents, agents_port, AGENT_REQUESTS, agents.addresses["api_key_0"]),
        ]


def read_port(address: str) -> int:
    return int(address.rpartition(":")[2])


def exchange(port: int, *pieces: bytes) -> bytes:
    """Send pieces on a new connection; return everything until the server closes it."""
    reply = b""
    with socket.create_connection(("127.0.0.1", port), timeout=READ_TIMEOUT_S) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65_536):
                reply += part
    return reply


def read_status(reply: bytes) -> int:
    """Return the status of a reply; 400 if the connection was closed without a reply."""
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else 400


@contextlib.asynccontextmanager
async def watch_sessions(*processes: AttackedProcess) -> AsyncIterator[None]:
    """Check that sessions are opened and stepped in time, during the block and after it."""
    async with contextlib.AsyncExitStack() as stack:
        for attacked in processes:
            client = await AsyncEnvClient.connect(attacked.grpc)
            await stack.enter_async_context(client)

            async def play(client: AsyncEnvClient = client) -> None:
                session, _ = await client.open(seed=1)
                await session.step({"code": ""})
                await session.close()

            stack.push_async_callback(play)
            await stack.enter_async_context(watch(play))
        yield


# -- web pages -----------------------------------------------------------------------------------

FOREIGN_HEADERS: dict[str, bytes] = {
    "name of a page": b"Host: evil.example\r\n",
    "name with this port": b"Host: evil.example:%(port)d\r\n",
    "upper case and final dot": b"Host: EVIL.EXAMPLE.:%(port)d\r\n",
    "loopback as a part of the name": b"Host: localhost.evil.example\r\n",
    "address as a part of the name": b"Host: 127.0.0.1.evil.example:%(port)d\r\n",
    "name within localhost": b"Host: evil.localhost\r\n",
    "IPv6 address": b"Host: [2001:db8::1]:%(port)d\r\n",
    "mapped IPv6 address": b"Host: [::ffff:10.0.0.1]\r\n",
    "address of all interfaces": b"Host: 0.0.0.0:%(port)d\r\n",
    "address as one number": b"Host: 2130706433\r\n",
    "second host": b"Host: localhost\r\nHost: evil.example\r\n",
    "first host": b"Host: evil.example\r\nHost: localhost\r\n",
    "list of hosts": b"Host: localhost, evil.example\r\n",
    "user before the host": b"Host: localhost@evil.example\r\n",
    "local host after a user": b"Host: evil.example@localhost\r\n",
    "path after the host": b"Host: localhost/evil.example\r\n",
    "folded line": b"Host: localhost\r\n evil.example\r\n",
    "tab": b"Host: localhost\tevil.example\r\n",
    "letters of full width": "Host: ｌｏｃａｌｈｏｓｔ\r\n".encode(),
    "empty": b"Host: \r\n",
    "forwarded": (
        b"Host: evil.example\r\nX-Forwarded-Host: localhost\r\nForwarded: host=localhost\r\n"
        b"X-Forwarded-For: 127.0.0.1\r\nX-Real-IP: 127.0.0.1\r\nX-Host: localhost\r\n"
    ),
    "rewritten path": b"Host: evil.example\r\nX-Original-URL: /health\r\nX-Rewrite-URL: /\r\n",
    "origin of a sandboxed page": b"Host: localhost\r\nOrigin: null\r\n",
    "origin of a page": b"Host: localhost:%(port)d\r\nOrigin: http://evil.example:%(port)d\r\n",
    "origin with a local part": b"Host: localhost\r\nOrigin: http://localhost.evil.example\r\n",
    "origin with a user": b"Host: localhost\r\nOrigin: http://localhost@evil.example\r\n",
    "origin of a file": b"Host: localhost\r\nOrigin: file://\r\n",
    "origin of an extension": b"Host: localhost\r\nOrigin: chrome-extension://localhostevil\r\n",
    "empty origin": b"Host: localhost\r\nOrigin: \r\n",
    "second origin": b"Host: localhost\r\nOrigin: http://localhost\r\nOrigin: http://evil.example\r\n",
    "list of origins": b"Host: localhost\r\nOrigin: http://localhost http://evil.example\r\n",
    "origin that is no URL": b"Host: localhost\r\nOrigin: http://[localhost\r\n",
}
ALLOWED_HEADERS: dict[str, bytes] = {
    "name": b"Host: localhost\r\n",
    "address and port": b"Host: 127.0.0.1:%(port)d\r\n",
    "IPv6": b"Host: [::1]:%(port)d\r\n",
    "own page": b"Host: localhost:%(port)d\r\nOrigin: http://localhost:%(port)d\r\n",
}
WEBSOCKET_HEADERS = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def send_request(
    target: Target, method: bytes, path: bytes, headers: bytes, prefix: bytes = b"/"
) -> int:
    """Send a request with these headers to a port; return its status."""
    headers = headers % {b"port": target.port} + target.header
    if path.endswith(b"ws"):
        headers += WEBSOCKET_HEADERS
    else:
        headers += b"Connection: close\r\n"
    if method == b"POST":
        headers += b"Content-Type: application/json\r\nContent-Length: 2\r\n"
    body = b"{}" if method == b"POST" else b""
    head = b"%s %s%s HTTP/1.1\r\n%s\r\n" % (method, prefix, path, headers)
    return read_status(exchange(target.port, head + body))


@pytest.mark.parametrize("headers", make_cases(FOREIGN_HEADERS))
async def test_web_page_reaches_nothing(
    server: AttackedProcess, gateway: AttackedProcess, targets: list[Target], headers: bytes
) -> None:
    async with watch_sessions(server, gateway):
        for target in targets:
            for method, path in target.requests:
                status = await asyncio.to_thread(send_request, target, method, path, headers)
                assert status in (400, 403), (target.port, method, path)


@pytest.mark.parametrize("host", make_cases({"local": b"localhost", "foreign": b"evil.example"}))
@pytest.mark.parametrize("scheme", make_cases({"HTTP": b"http", "HTTPS": b"https", "FTP": b"ftp"}))
def test_host_in_a_request_line_is_checked(
    targets: list[Target], host: bytes, scheme: bytes
) -> None:
    headers, prefix = b"Host: %s\r\n" % host, scheme + b"://evil.example/"
    for target in targets:
        for method, path in target.requests:
            status = send_request(target, method, path, headers, prefix)
            assert status in (400, 403), (target.port, method, path)


@pytest.mark.parametrize("headers", make_cases(ALLOWED_HEADERS))
def test_local_program_is_served(targets: list[Target], headers: bytes) -> None:
    for target in targets:
        for prefix in (b"/", b"http://localhost:%d/" % target.port):
            method, path = target.requests[0]
            assert send_request(target, method, path, headers, prefix) == 200


# -- heads ---------------------------------------------------------------------------------------

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST_HEAD = b"POST /step HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CHUNKED_HEAD = POST_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FLOOD_PIECE = b"x" * 65_536
REFUSED_HEADS: dict[str, tuple[bytes, ...]] = {
    "one long header": (HEAD + b"x: " + b"y" * 70_000 + b"\r\n\r\n",),
    "one long header in pieces": (HEAD + b"x: ", *[b"y" * 100] * 700, b"\r\n\r\n"),
    "long name": (HEAD + b"x" * 70_000 + b": y\r\n\r\n",),
    "many short headers": (HEAD + b"a:\r\n" * 20_000 + b"\r\n",),
    "many short headers in pieces": (HEAD, *[b"ab: c\r\n" * 10] * 1500, b"\r\n"),
    "many cookies": (HEAD + b"Cookie: a=b\r\n" * 6000 + b"\r\n",),
    "folded lines": (HEAD + b"x: y" + b"\r\n y" * 20_000 + b"\r\n\r\n",),
    "folded lines in pieces": (HEAD + b"x: y", *[b"\r\n yyyyyyyyyy" * 10] * 1000, b"\r\n\r\n"),
    "long path": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",),
    "long query in pieces": (b"GET /?", *[b"a=1&" * 10] * 2000, b" HTTP/1.1\r\n\r\n"),
    "long method": (b"G" * 70_000 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n",),
    "long version": (b"GET / HTTP/1." + b"1" * 70_000 + b"\r\nHost: localhost\r\n\r\n",),
    "empty lines first": (*[b"\r\n" * 1000] * 60, HEAD),
    "white space in a line": (b"GET /health" + b" " * 70_000 + HEAD[11:] + b"\r\n",),
    "white space in a header": (HEAD + b"x:" + b" \t" * 40_000 + b"y\r\n\r\n",),
    "after another request": (HEAD + b"\r\n" + HEAD + b"x: " + b"y" * 70_000 + b"\r\n\r\n",),
    "before a body": (
        POST_HEAD + b"Content-Length: 2\r\nx: " + b"y" * 70_000 + b"\r\n\r\n" + b"{}",
    ),
    "upgrade": (HEAD + WEBSOCKET_HEADERS + b"x: " + b"y" * 70_000 + b"\r\n\r\n",),
    "trailers": (CHUNKED_HEAD + b"2\r\n{}\r\n0\r\n", *[b"x: yyyyyyyy\r\n" * 5000] * 100, b"\r\n"),
    "long trailer": (CHUNKED_HEAD + b"2\r\n{}\r\n0\r\nx: ", *[FLOOD_PIECE] * 500, b"\r\n\r\n"),
    "chunk extension": (CHUNKED_HEAD + b"2;x=", *[FLOOD_PIECE] * 500, b"\r\n{}\r\n0\r\n\r\n"),
    "chunk extensions without an end": (CHUNKED_HEAD + b"2", *[b";a=b" * 10_000] * 200),
    "long size of a chunk": (CHUNKED_HEAD + b"0" * 1_000_000 + b"2\r\n{}\r\n0\r\n\r\n",),
    "endless header": (HEAD + b"x: ", *[FLOOD_PIECE] * 1000),
    "endless line without an end": (*[FLOOD_PIECE] * 1000,),
}
HARMLESS_FLOODS: dict[str, tuple[bytes, ...]] = {
    "chunk extensions": (CHUNKED_HEAD, *[b"1;a=b;c=d\r\n \r\n" * 1000] * 500, b"0\r\n\r\n"),
    "chunks of one byte": (CHUNKED_HEAD, *[b"1\r\n \r\n" * 10_000] * 50, b"0\r\n\r\n"),
    "body beyond its length": (POST_HEAD + b"Content-Length: 2\r\n\r\n{}", *[FLOOD_PIECE] * 200),
    "many requests at once": ((HEAD + b"\r\n") * 5000, HEAD + b"Connection: close\r\n\r\n"),
}


@pytest.mark.parametrize("pieces", make_cases(REFUSED_HEADS))
async def test_long_head_or_trailer_is_refused(
    server: AttackedProcess,
    gateway: AttackedProcess,
    targets: list[Target],
    pieces: tuple[bytes, ...],
) -> None:
    # A target without the path may answer before it reads the body, but not before the head ends.
    is_in_body = pieces[0].startswith(CHUNKED_HEAD)
    expected = (400, 404, 431) if is_in_body else (400, 431)
    async with watch_sessions(server, gateway):
        for target in targets:
            start_mb = target.memory_mb
            reply = await asyncio.to_thread(exchange, target.port, *pieces)
            last_reply = reply[reply.rfind(b"HTTP/1.1 ") :] if reply else reply
            assert read_status(last_reply) in expected, target.port
            assert target.memory_mb - start_mb < MAX_GROWTH_MB, target.port


@pytest.mark.parametrize("pieces", make_cases(HARMLESS_FLOODS, 0))
async def test_flood_within_the_limits_fills_no_memory(
    server: AttackedProcess,
    gateway: AttackedProcess,
    targets: list[Target],
    pieces: tuple[bytes, ...],
) -> None:
    async with watch_sessions(server, gateway):
        for target in targets:
            start_mb = target.memory_mb
            reply = await asyncio.to_thread(exchange, target.port, *pieces)
            assert read_status(reply) < 500
            assert target.memory_mb - start_mb < MAX_GROWTH_MB


# -- half-open connections -----------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def make_frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
START = PREFACE + make_frame(SETTINGS)
# A literal header "a: bbb..." of 100 bytes, and the pseudo headers of a call.
LITERAL_HEADER = b"\x00\x01a\x64" + b"b" * 100
CALL_HEADERS = b"\x83\x86\x44\x15/ludus.env.v1.Env/Some\x41\x09localhost"
REFUSED_BYTES: dict[str, tuple[bytes, ...]] = {
    "HTTP/1": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",),
    "HTTP/1 upgrade to HTTP/2": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n\r\n",
    ),
    "post of a page": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n" + PREFACE,),
    "TLS on a port without TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,),
    "random bytes": (bytes(range(256)) * 100,),
    "null bytes": (b"\0" * 100_000,),
    "preface with a typing error": (PREFACE[:-1] + b"X" * 100,),
    "frame that is too long": (START + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",),
    "continuation without headers": (START + make_frame(CONTINUATION, 0, 1, b"x"),),
    "headers on an even stream": (START + make_frame(HEADERS, 4, 2, CALL_HEADERS),),
    "headers that cannot be decoded": (START + make_frame(HEADERS, 5, 1, b"\xff" * 100),),
    "settings of a wrong length": (START + make_frame(SETTINGS, 0, 0, b"xxx"),),
    "window update of 0": (START + make_frame(WINDOW, 0, 0, b"\0\0\0\0"),),
}
ANY_BYTES: dict[str, tuple[bytes, ...]] = {
    "pings": (START, *[make_frame(PING, 0, 0, b"12345678") * 1000] * 300),
    "data without a stream": (START, *[make_frame(DATA, 0, 0, b"x") * 1000] * 100),
    "settings": (START, *[make_frame(SETTINGS, 0, 0, b"\0\x03\0\0\0\x64") * 1000] * 100),
    "acknowledged settings": (START, *[make_frame(SETTINGS, 1) * 1000] * 300),
    "empty data": (START, *[make_frame(DATA, 0, 1) * 1000] * 300),
    "priorities": (START, *[make_frame(PRIORITY, 0, 3, b"\0\0\0\0\0") * 1000] * 300),
    "unknown frames": (START, *[make_frame(0x42, 0, 0, b"x" * 1000) * 100] * 300),
    "headers without an end": (
        START + make_frame(HEADERS, 0, 1, CALL_HEADERS),
        *[make_frame(CONTINUATION, 0, 1, LITERAL_HEADER * 100)] * 3000,
    ),
    "empty continuations": (
        START + make_frame(HEADERS, 0, 1, CALL_HEADERS),
        *[make_frame(CONTINUATION, 0, 1) * 1000] * 300,
    ),
    "streams that are reset": (
        START,
        *(
            make_frame(HEADERS, 4, stream, CALL_HEADERS)
            + make_frame(RESET, 0, stream, b"\0\0\0\x08")
            for stream in range(1, 60_001, 2)
        ),
    ),
    "streams without data": (
        START,
        *(make_frame(HEADERS, 4, stream, CALL_HEADERS) for stream in range(1, 20_001, 2)),
    ),
    "streams with long headers": (
        START,
        *(
            make_frame(HEADERS, 4, stream, CALL_HEADERS + LITERAL_HEADER * 150)
            for stream in range(1, 201, 2)
        ),
    ),
}
SILENT_STARTS: dict[str, bytes] = {
    "nothing": b"",
    "one byte": PREFACE[:1],
    "half the preface": PREFACE[:12],
    "preface": PREFACE,
    "preface and half a frame": PREFACE + make_frame(SETTINGS)[:5],
    "preface and a frame without its payload": PREFACE + make_frame(SETTINGS, 0, 0, b"x" * 6)[:12],
    "settings, and no answers to pings": START,
    "headers without an end": START + make_frame(HEADERS, 0, 1, CALL_HEADERS),
    "a call without data": START + make_frame(HEADERS, 4, 1, CALL_HEADERS),
}
FLOOD_S = 2.0
"""Maximum duration of a flood of one port."""
NUM_SILENT = 20
"""Number of silent connections of each kind."""
MAX_SILENT_S = 60.0
"""Maximum time until silent connections are closed: 20 s for a start, 30 s for pings."""
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100


@pytest.mark.parametrize("pieces", make_cases(REFUSED_BYTES))
async def test_wrong_start_of_grpc_is_closed(
    server: AttackedProcess, gateway: AttackedProcess, pieces: tuple[bytes, ...]
) -> None:
    async with watch_sessions(server, gateway):
        for attacked in (server, gateway):
            reply = await asyncio.to_thread(exchange, read_port(attacked.grpc), *pieces)
            assert not reply.startswith(b"HTTP/1.1 2")
            assert attacked.is_alive


@pytest.mark.parametrize("pieces", make_cases(ANY_BYTES, 0))
async def test_flood_of_grpc_does_not_stop_other_sessions(
    server: AttackedProcess, gateway: AttackedProcess, pieces: tuple[bytes, ...]
) -> None:
    async with watch_sessions(server, gateway):
        for attacked in (server, gateway):
            target = Target(attacked, read_port(attacked.grpc), ())
            start_mb = target.memory_mb
            await asyncio.to_thread(send_flood, target.port, pieces)
            assert target.memory_mb - start_mb < MAX_GROWTH_MB


def send_flood(port: int, pieces: tuple[bytes, ...]) -> None:
    """Send pieces as long as the server reads them, for some seconds, and drop the replies."""
    end_s = time.monotonic() + FLOOD_S
    with (
        socket.create_connection(("127.0.0.1", port), timeout=FLOOD_S) as connection,
        contextlib.suppress(OSError),
    ):
        for piece in pieces:
            if time.monotonic() > end_s:
                break
            connection.sendall(piece)
            with contextlib.suppress(BlockingIOError):
                connection.recv(1 << 20, socket.MSG_DONTWAIT)


async def wait_until_closed(port: int, start: bytes, slow_bytes: bytes = b"") -> None:
    """Send a start, then further bytes one by one, and wait until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(start)
        read_task = asyncio.create_task(drain_reader(reader))
        for byte in slow_bytes:
            done, _ = await asyncio.wait([read_task], timeout=2)
            if done:
                break
            writer.write(bytes([byte]))
        await asyncio.wait_for(read_task, MAX_SILENT_S)
    finally:
        writer.close()


async def drain_reader(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(65_536):
            pass


@pytest.mark.attack
async def test_silent_and_slow_connections_are_closed(
    server: AttackedProcess, gateway: AttackedProcess, tmp_path: Path
) -> None:
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    tls = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    with serve_env(tmp_path / "empty", *tls) as tls_server:
        ports = [read_port(attacked.grpc) for attacked in (server, gateway)]
        starts = [
            (port, start, b"") for port in ports for start in SILENT_STARTS.values()
        ] * NUM_SILENT
        starts += [(port, b"", PREFACE + make_frame(SETTINGS)) for port in ports]
        starts += [(read_port(tls_server.grpc), hello, b"") for hello in (b"", TLS_HELLO)]
        starts += [(read_port(tls_server.grpc), b"", TLS_HELLO)]
        starts += [(server.port, b"", HEAD), (server.port, HEAD, b""), (gateway.port, b"", HEAD)]
        async with watch_sessions(server, gateway):
            await asyncio.gather(*(wait_until_closed(*start) for start in starts))
