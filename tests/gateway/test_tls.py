"""Replaced certificates of running servers, and unusable files."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from starlette.types import Receive, Scope, Send

from ludus.env.security.tls import (
    TlsFiles,
    build_channel_credentials,
    build_client_context,
    build_server_context,
    build_server_credentials,
)
from ludus.proto.errors import ConfigError
from tests.gateway.http_server import serve_app

CA = trustme.CA()
OTHER_CA = trustme.CA()


@pytest.fixture
def ca_file(tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    tls = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    issue(tls)
    return tls


def issue(tls: TlsFiles, ca: trustme.CA = CA) -> int:
    """Replace certificate and key atomically; return the serial number."""
    cert = ca.issue_cert("localhost", "127.0.0.1")
    chain = b"".join(blob.bytes() for blob in cert.cert_chain_pems)
    for path, content in ((tls.cert, chain), (tls.key, cert.private_key_pem.bytes())):
        new_file = path.with_suffix(".new")
        new_file.write_bytes(content)
        os.replace(new_file, path)
    return parse_serial(chain)


def parse_serial(pem: bytes) -> int:
    return x509.load_pem_x509_certificate(pem).serial_number


# -- HTTPS -----------------------------------------------------------------------------------


async def send_hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"hi"})


def https_server(tls: TlsFiles) -> AbstractAsyncContextManager[int]:
    """Run a server that responds with "hi"; yield its port."""
    return serve_app(
        send_hello, ssl_context_factory=lambda config, default: build_server_context(tls)
    )


class HttpsConnection:
    """A connection to a server."""

    @classmethod
    async def connect(cls, port: int, context: ssl.SSLContext) -> HttpsConnection:
        self = cls()
        self.reader, self.writer = await asyncio.open_connection("localhost", port, ssl=context)
        self.serial = parse_serial(
            ssl.DER_cert_to_PEM_cert(
                self.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            ).encode()
        )
        return self

    async def get(self) -> bytes:
        self.writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await self.reader.readuntil(b"\r\n\r\n")
        return await self.reader.readexactly(2)

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


async def test_https_serves_a_replaced_certificate_and_keeps_connections(
    files: TlsFiles, ca_file: Path
) -> None:
    context = build_client_context(ca_file)
    first_serial = issue(files)
    async with https_server(files) as port:
        old_connection = await HttpsConnection.connect(port, context)
        assert (old_connection.serial, await old_connection.get()) == (first_serial, b"hi")
        second_serial = issue(files)
        new_connection = await HttpsConnection.connect(port, context)
        assert new_connection.serial == second_serial != first_serial
        assert await new_connection.get() == await old_connection.get() == b"hi"
        await old_connection.close()
        await new_connection.close()


async def test_https_keeps_the_old_certificate_while_the_new_pair_is_incomplete(
    files: TlsFiles, ca_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = build_client_context(ca_file)
    first_serial = issue(files)
    key = files.key.read_bytes()
    async with https_server(files) as port:
        second_serial = issue(files)
        new_key = files.key.read_bytes()
        files.key.write_bytes(key)  # the new certificate with the old key
        for _ in range(2):
            connection = await HttpsConnection.connect(port, context)
            assert connection.serial == first_serial
            await connection.close()
        assert caplog.text.count("the old certificate stays") == 1
        assert str(files.key) in caplog.text
        files.key.write_bytes(new_key)
        connection = await HttpsConnection.connect(port, context)
        assert connection.serial == second_serial
        await connection.close()


async def test_https_requires_client_certificates_if_configured(
    files: TlsFiles, ca_file: Path, tmp_path: Path
) -> None:
    server_files = replace(files, client_ca=ca_file)
    trusted_files = TlsFiles(tmp_path / "known.crt", tmp_path / "known.key")
    issue(trusted_files)
    untrusted_files = TlsFiles(tmp_path / "stranger.crt", tmp_path / "stranger.key")
    issue(untrusted_files, OTHER_CA)
    async with https_server(server_files) as port:
        for _ in range(2):  # the second connection must not resume the TLS session of the first
            connection = await HttpsConnection.connect(
                port, build_client_context(ca_file, trusted_files)
            )
            assert await connection.get() == b"hi"
            await connection.close()
        for context in (
            build_client_context(ca_file),
            build_client_context(ca_file, untrusted_files),
        ):
            with pytest.raises((OSError, EOFError)):
                await (await HttpsConnection.connect(port, context)).get()


async def test_replaced_client_authorities_apply_to_the_next_handshake(
    files: TlsFiles, ca_file: Path, tmp_path: Path
) -> None:
    client_ca_file = tmp_path / "clients.pem"
    CA.cert_pem.write_to_path(str(client_ca_file))
    trusted_files = TlsFiles(tmp_path / "known.crt", tmp_path / "known.key")
    issue(trusted_files)
    async with https_server(replace(files, client_ca=client_ca_file)) as port:
        connection = await HttpsConnection.connect(
            port, build_client_context(ca_file, trusted_files)
        )
        OTHER_CA.cert_pem.write_to_path(str(client_ca_file))
        assert await connection.get() == b"hi"
        await connection.close()
        with pytest.raises((OSError, EOFError)):
            await (
                await HttpsConnection.connect(port, build_client_context(ca_file, trusted_files))
            ).get()


# -- gRPC ------------------------------------------------------------------------------------


class Echo(grpc.GenericRpcHandler):
    """A service that echoes unary calls and streams."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return (
            grpc.stream_stream_rpc_method_handler(echo_stream)
            if call.method == "/test/Stream"
            else grpc.unary_unary_rpc_method_handler(echo)
        )


async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return request


async def echo_stream(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@asynccontextmanager
async def grpc_server(tls: TlsFiles) -> AsyncIterator[int]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_secure_port("127.0.0.1:0", build_server_credentials(tls))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def open_channel(port: int, ca_file: Path, identity: TlsFiles | None = None) -> grpc.aio.Channel:
    # A separate pool, because channels would otherwise share a connection.
    return grpc.aio.secure_channel(
        f"localhost:{port}",
        build_channel_credentials(ca_file, identity),
        options=[("grpc.use_local_subchannel_pool", 1)],
    )


async def send(channel: grpc.aio.Channel, message: bytes) -> bytes:
    return await channel.unary_unary("/test/Say")(message, timeout=60)


async def read_serial(port: int, ca_file: Path) -> int:
    context = build_client_context(ca_file)
    context.set_alpn_protocols(["h2"])
    connection = await HttpsConnection.connect(port, context)
    connection.writer.transport.abort()
    return connection.serial


async def test_grpc_serves_a_replaced_certificate_and_keeps_streams(
    files: TlsFiles, ca_file: Path
) -> None:
    first_serial = issue(files)
    async with grpc_server(files) as port, open_channel(port, ca_file) as old_channel:
        stream = old_channel.stream_stream("/test/Stream")()
        await stream.write(b"before")
        assert await stream.read() == b"before"
        assert await read_serial(port, ca_file) == first_serial
        second_serial = issue(files)
        assert await read_serial(port, ca_file) == second_serial
        await stream.write(b"after")
        assert await stream.read() == b"after"
        async with open_channel(port, ca_file) as new_channel:
            assert await send(new_channel, b"hi") == b"hi"
        stream.cancel()


async def test_grpc_keeps_the_old_certificate_when_the_new_pair_is_invalid(
    files: TlsFiles, ca_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first_serial = issue(files)
    async with grpc_server(files) as port:
        valid_cert = files.cert.read_bytes()
        files.cert.write_bytes(b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----")
        assert await read_serial(port, ca_file) == first_serial
        assert "the old certificate stays" in caplog.text
        files.cert.unlink()
        async with open_channel(port, ca_file) as new_channel:
            assert await send(new_channel, b"hi") == b"hi"
        files.cert.write_bytes(valid_cert)
        assert await read_serial(port, ca_file) == first_serial


async def test_grpc_requires_client_certificates_if_configured(
    files: TlsFiles, ca_file: Path, tmp_path: Path
) -> None:
    trusted_files = TlsFiles(tmp_path / "known.crt", tmp_path / "known.key")
    issue(trusted_files)
    async with grpc_server(replace(files, client_ca=ca_file)) as port:
        async with open_channel(port, ca_file, trusted_files) as channel:
            assert await send(channel, b"hi") == b"hi"
        async with open_channel(port, ca_file) as anonymous_channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await send(anonymous_channel, b"hi")
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_client_does_not_trust_a_certificate_of_another_authority(
    files: TlsFiles, tmp_path: Path
) -> None:
    other_ca_file = tmp_path / "other.pem"
    OTHER_CA.cert_pem.write_to_path(str(other_ca_file))
    async with https_server(files) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await HttpsConnection.connect(port, build_client_context(other_ca_file))
    async with grpc_server(files) as port, open_channel(port, other_ca_file) as untrusting_channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await send(untrusting_channel, b"hi")


# -- files that cannot be used ---------------------------------------------------------------


def missing_cert(tls: TlsFiles) -> TlsFiles:
    tls.cert.unlink()
    return tls


def missing_key(tls: TlsFiles) -> TlsFiles:
    tls.key.unlink()
    return tls


def key_of_another(tls: TlsFiles) -> TlsFiles:
    cert = tls.cert.read_bytes()
    issue(tls)
    tls.cert.write_bytes(cert)
    return tls


def swap_files(tls: TlsFiles) -> TlsFiles:
    return TlsFiles(tls.key, tls.cert)


def write_encrypted(tls: TlsFiles) -> TlsFiles:
    key = load_pem_private_key(tls.key.read_bytes(), None)
    tls.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"pass"))
    )
    return tls


def nonsense(tls: TlsFiles) -> TlsFiles:
    tls.cert.write_bytes(b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----")
    return tls


def no_authorities(tls: TlsFiles) -> TlsFiles:
    empty_file = tls.cert.with_name("empty.pem")
    empty_file.write_bytes(b"")
    return replace(tls, client_ca=empty_file)


def missing_authorities(tls: TlsFiles) -> TlsFiles:
    return replace(tls, client_ca=tls.cert.with_name("absent.pem"))


@pytest.mark.parametrize(
    ("make_unusable", "expected_error"),
    [
        (
            missing_cert,
            r"cert = .*tls\.crt must be a readable PEM file, got No such file or directory; create",
        ),
        (
            missing_key,
            r"key = .*tls\.key must be a readable PEM file, got No such file or directory; create",
        ),
        (key_of_another, r"private key in .*\.key does not belong to the certificate .*tls\.crt"),
        (
            swap_files,
            r"cert = .*tls\.key must be a PEM file with a CERTIFICATE, but contains none; give",
        ),
        (write_encrypted, r"must not have a passphrase; decrypt it with: openssl"),
        (nonsense, r"cannot load the certificate .*tls\.crt and its private key .*; write both"),
        (no_authorities, r"client_ca = .*empty\.pem must be a PEM file with a CERTIFICATE"),
        (
            missing_authorities,
            r"client_ca = .*absent\.pem must be a readable PEM file, got No such file",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unusable_files_are_reported_before_listening(
    files: TlsFiles, make_unusable: object, expected_error: str
) -> None:
    unusable_files = make_unusable(files)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=expected_error):
        build_server_context(unusable_files)
    with pytest.raises(ConfigError, match=expected_error):
        build_server_credentials(unusable_files)


def test_missing_authority_file_is_reported_to_the_client(tmp_path: Path) -> None:
    for build in (build_client_context, build_channel_credentials):
        with pytest.raises(ConfigError, match=r"absent\.pem"):
            build(tmp_path / "absent.pem")
