"""TLS of HTTPS and gRPC servers: replaced certificates, client certificates and invalid files."""

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
def tls_files(tmp_path: Path) -> TlsFiles:
    tls_files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    issue_certificate(tls_files)
    return tls_files


def issue_certificate(tls_files: TlsFiles, ca: trustme.CA = CA) -> int:
    """Replace the certificate and then the key; return the serial number of the certificate."""
    cert = ca.issue_cert("localhost", "127.0.0.1")
    chain = b"".join(blob.bytes() for blob in cert.cert_chain_pems)
    for path, content in ((tls_files.cert, chain), (tls_files.key, cert.private_key_pem.bytes())):
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


def run_https_server(tls_files: TlsFiles) -> AbstractAsyncContextManager[int]:
    """Run an HTTPS server that responds with "hi", and yield its port."""
    return serve_app(
        send_hello, ssl_context_factory=lambda config, default: build_server_context(tls_files)
    )


class HttpsConnection:
    """An HTTPS connection and the serial number of the server's certificate."""

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
    tls_files: TlsFiles, ca_file: Path
) -> None:
    context = build_client_context(ca_file)
    first_serial = issue_certificate(tls_files)
    async with run_https_server(tls_files) as port:
        old_connection = await HttpsConnection.connect(port, context)
        assert (old_connection.serial, await old_connection.get()) == (first_serial, b"hi")
        second_serial = issue_certificate(tls_files)
        new_connection = await HttpsConnection.connect(port, context)
        assert new_connection.serial == second_serial != first_serial
        assert await new_connection.get() == await old_connection.get() == b"hi"
        await old_connection.close()
        await new_connection.close()


async def test_https_keeps_the_old_certificate_while_the_new_pair_is_incomplete(
    tls_files: TlsFiles, ca_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = build_client_context(ca_file)
    first_serial = issue_certificate(tls_files)
    key = tls_files.key.read_bytes()
    async with run_https_server(tls_files) as port:
        second_serial = issue_certificate(tls_files)
        new_key = tls_files.key.read_bytes()
        tls_files.key.write_bytes(key)  # the new certificate with the old key
        for _ in range(2):
            connection = await HttpsConnection.connect(port, context)
            assert connection.serial == first_serial
            await connection.close()
        assert caplog.text.count("the old certificate stays") == 1
        assert str(tls_files.key) in caplog.text
        tls_files.key.write_bytes(new_key)
        connection = await HttpsConnection.connect(port, context)
        assert connection.serial == second_serial
        await connection.close()


async def test_https_requires_client_certificates_if_configured(
    tls_files: TlsFiles, ca_file: Path, tmp_path: Path
) -> None:
    server_files = replace(tls_files, client_ca=ca_file)
    trusted_files = TlsFiles(tmp_path / "known.crt", tmp_path / "known.key")
    issue_certificate(trusted_files)
    untrusted_files = TlsFiles(tmp_path / "stranger.crt", tmp_path / "stranger.key")
    issue_certificate(untrusted_files, OTHER_CA)
    async with run_https_server(server_files) as port:
        for _ in range(2):  # the second connection must not resume the first TLS session
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
    tls_files: TlsFiles, ca_file: Path, tmp_path: Path
) -> None:
    client_ca_file = tmp_path / "clients.pem"
    CA.cert_pem.write_to_path(str(client_ca_file))
    trusted_files = TlsFiles(tmp_path / "known.crt", tmp_path / "known.key")
    issue_certificate(trusted_files)
    async with run_https_server(replace(tls_files, client_ca=client_ca_file)) as port:
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


class EchoHandler(grpc.GenericRpcHandler):
    """A gRPC handler that echoes unary calls and streams."""

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
async def run_grpc_server(tls_files: TlsFiles) -> AsyncIterator[int]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((EchoHandler(),))
    port = server.add_secure_port("127.0.0.1:0", build_server_credentials(tls_files))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def open_channel(
    port: int, ca_file: Path, client_files: TlsFiles | None = None
) -> grpc.aio.Channel:
    # Two channels with the global pool would share a connection.
    return grpc.aio.secure_channel(
        f"localhost:{port}",
        build_channel_credentials(ca_file, client_files),
        options=[("grpc.use_local_subchannel_pool", 1)],
    )


async def call_unary(channel: grpc.aio.Channel, message: bytes) -> bytes:
    return await channel.unary_unary("/test/Say")(message, timeout=60)


async def read_serial(port: int, ca_file: Path) -> int:
    context = build_client_context(ca_file)
    context.set_alpn_protocols(["h2"])
    connection = await HttpsConnection.connect(port, context)
    connection.writer.transport.abort()
    return connection.serial


async def test_grpc_serves_a_replaced_certificate_and_keeps_streams(
    tls_files: TlsFiles, ca_file: Path
) -> None:
    first_serial = issue_certificate(tls_files)
    async with run_grpc_server(tls_files) as port, open_channel(port, ca_file) as old_channel:
        stream = old_channel.stream_stream("/test/Stream")()
        await stream.write(b"before")
        assert await stream.read() == b"before"
        assert await read_serial(port, ca_file) == first_serial
        second_serial = issue_certificate(tls_files)
        assert await read_serial(port, ca_file) == second_serial
        await stream.write(b"after")
        assert await stream.read() == b"after"
        async with open_channel(port, ca_file) as new_channel:
            assert await call_unary(new_channel, b"hi") == b"hi"
        stream.cancel()


async def test_grpc_keeps_the_old_certificate_when_the_new_pair_is_invalid(
    tls_files: TlsFiles, ca_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first_serial = issue_certificate(tls_files)
    async with run_grpc_server(tls_files) as port:
        valid_cert = tls_files.cert.read_bytes()
        tls_files.cert.write_bytes(
            b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----"
        )
        assert await read_serial(port, ca_file) == first_serial
        assert "the old certificate stays" in caplog.text
        tls_files.cert.unlink()
        async with open_channel(port, ca_file) as new_channel:
            assert await call_unary(new_channel, b"hi") == b"hi"
        tls_files.cert.write_bytes(valid_cert)
        assert await read_serial(port, ca_file) == first_serial


async def test_grpc_requires_client_certificates_if_configured(
    tls_files: TlsFiles, ca_file: Path, tmp_path: Path
) -> None:
    trusted_files = TlsFiles(tmp_path / "known.crt", tmp_path / "known.key")
    issue_certificate(trusted_files)
    async with run_grpc_server(replace(tls_files, client_ca=ca_file)) as port:
        async with open_channel(port, ca_file, trusted_files) as channel:
            assert await call_unary(channel, b"hi") == b"hi"
        async with open_channel(port, ca_file) as anonymous_channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call_unary(anonymous_channel, b"hi")
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_client_refuses_a_certificate_of_another_authority(
    tls_files: TlsFiles, tmp_path: Path
) -> None:
    other_ca_file = tmp_path / "other.pem"
    OTHER_CA.cert_pem.write_to_path(str(other_ca_file))
    async with run_https_server(tls_files) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await HttpsConnection.connect(port, build_client_context(other_ca_file))
    async with run_grpc_server(tls_files) as port, open_channel(port, other_ca_file) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await call_unary(channel, b"hi")


# -- invalid files ---------------------------------------------------------------------------


def remove_cert(tls_files: TlsFiles) -> TlsFiles:
    tls_files.cert.unlink()
    return tls_files


def remove_key(tls_files: TlsFiles) -> TlsFiles:
    tls_files.key.unlink()
    return tls_files


def replace_key(tls_files: TlsFiles) -> TlsFiles:
    cert = tls_files.cert.read_bytes()
    issue_certificate(tls_files)
    tls_files.cert.write_bytes(cert)
    return tls_files


def swap_files(tls_files: TlsFiles) -> TlsFiles:
    return TlsFiles(tls_files.key, tls_files.cert)


def encrypt_key(tls_files: TlsFiles) -> TlsFiles:
    key = load_pem_private_key(tls_files.key.read_bytes(), None)
    tls_files.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"pass"))
    )
    return tls_files


def corrupt_cert(tls_files: TlsFiles) -> TlsFiles:
    tls_files.cert.write_bytes(b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----")
    return tls_files


def use_empty_client_ca(tls_files: TlsFiles) -> TlsFiles:
    empty_file = tls_files.cert.with_name("empty.pem")
    empty_file.write_bytes(b"")
    return replace(tls_files, client_ca=empty_file)


def use_missing_client_ca(tls_files: TlsFiles) -> TlsFiles:
    return replace(tls_files, client_ca=tls_files.cert.with_name("absent.pem"))


@pytest.mark.parametrize(
    ("make_invalid", "expected_error"),
    [
        (
            remove_cert,
            r"cert = .*tls\.crt must be a readable PEM file, got No such file or directory; create",
        ),
        (
            remove_key,
            r"key = .*tls\.key must be a readable PEM file, got No such file or directory; create",
        ),
        (replace_key, r"private key in .*\.key does not belong to the certificate .*tls\.crt"),
        (
            swap_files,
            r"cert = .*tls\.key must be a PEM file with a CERTIFICATE, but contains none; give",
        ),
        (encrypt_key, r"must not have a passphrase; decrypt it with: openssl"),
        (
            corrupt_cert,
            r"cannot load the certificate .*tls\.crt and its private key .*; write both",
        ),
        (use_empty_client_ca, r"client_ca = .*empty\.pem must be a PEM file with a CERTIFICATE"),
        (
            use_missing_client_ca,
            r"client_ca = .*absent\.pem must be a readable PEM file, got No such file",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_invalid_files_are_reported_before_the_server_listens(
    tls_files: TlsFiles, make_invalid: object, expected_error: str
) -> None:
    invalid_files = make_invalid(tls_files)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=expected_error):
        build_server_context(invalid_files)
    with pytest.raises(ConfigError, match=expected_error):
        build_server_credentials(invalid_files)


def test_client_reports_a_missing_authority_file(tmp_path: Path) -> None:
    for build in (build_client_context, build_channel_credentials):
        with pytest.raises(ConfigError, match=r"absent\.pem"):
            build(tmp_path / "absent.pem")
