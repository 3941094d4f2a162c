"""A server with TLS on both ports, and clients with and without certificates."""

import ssl

import grpc
import httpx
import pytest
import trustme

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.security.tls import TlsFiles, build_channel_credentials, build_client_context
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import ConfigError, UnavailableError
from tests.env.served import WIRES, serve, server_address, start_server_process

CA = trustme.CA()
OTHER_CA = trustme.CA()


def issue_certificate(folder, name, ca=CA) -> TlsFiles:
    """Issue a certificate; write the certificate and its private key to files."""
    certificate = ca.issue_cert("localhost", "127.0.0.1")
    files = TlsFiles(folder / f"{name}.crt", folder / f"{name}.key")
    files.cert.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    files.key.write_bytes(certificate.private_key_pem.bytes())
    return files


@pytest.fixture
def server_files(tmp_path) -> TlsFiles:
    return issue_certificate(tmp_path, "server")


@pytest.fixture
def ca_file(tmp_path):
    path = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(str(path))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
async def test_client_connects_over_tls_only_with_the_ca_of_the_server(
    server_files, ca_file, wire: str
) -> None:
    options = {"tls_cert": server_files.cert, "tls_key": server_files.key}
    async with serve(token="hush", admin_port=0, **options) as server:
        assert server.http_address.startswith("https://127.0.0.1:")
        assert server.grpc_address.startswith("grpcs://127.0.0.1:")
        assert server.addresses.admin.startswith("http://127.0.0.1:")
        address = server_address(server, wire)
        async with await AsyncEnvClient.connect(
            address, ConnectOptions(token="hush", ca_file=str(ca_file))
        ) as client:
            session, _ = await client.open(seed=1)
            assert (await session.step({"add": 2})).reward == 2.0
        with pytest.raises(UnavailableError):
            await AsyncEnvClient.connect(
                address, ConnectOptions(token="hush", connect_timeout_s=0.5)
            )
        url = address.replace("https://", "http://").replace("grpcs://", "grpc://")
        with pytest.raises(UnavailableError):
            await AsyncEnvClient.connect(url, ConnectOptions(token="hush", connect_timeout_s=0.5))


@pytest.mark.slow
async def test_server_accepts_only_client_certificates_of_the_configured_ca(
    tmp_path, server_files, ca_file
) -> None:
    trusted_files = issue_certificate(tmp_path, "trusted")
    untrusted_files = issue_certificate(tmp_path, "untrusted", OTHER_CA)
    options = {"tls_cert": server_files.cert, "tls_key": server_files.key, "tls_client_ca": ca_file}
    async with serve(**options) as server:
        url = server.http_address + "/health"
        async with httpx.AsyncClient(
            verify=build_client_context(ca_file, trusted_files), timeout=60
        ) as client:
            assert (await client.get(url)).status_code == 200
        for client_files in (None, untrusted_files):
            ssl_context = build_client_context(ca_file, client_files)
            async with httpx.AsyncClient(verify=ssl_context, timeout=60) as client:
                with pytest.raises((httpx.TransportError, ssl.SSLError)):
                    await client.get(url)
        assert await read_name_over_grpc(server, ca_file, trusted_files) == "counting"
        for client_files in (None, untrusted_files):
            with pytest.raises(grpc.aio.AioRpcError) as exc_info:
                await read_name_over_grpc(server, ca_file, client_files)
            assert exc_info.value.code() is grpc.StatusCode.UNAVAILABLE


async def read_name_over_grpc(server, ca_file, client_files) -> str:
    credentials = build_channel_credentials(ca_file, client_files)
    target = server.grpc_address.removeprefix("grpcs://")
    async with grpc.aio.secure_channel(target, credentials) as channel:
        stub = env_pb2_grpc.EnvServiceStub(channel)
        return (await stub.Describe(pb.DescribeRequest(), timeout=60)).name


async def test_unusable_tls_files_raise_a_config_error(tmp_path, server_files) -> None:
    other_files = issue_certificate(tmp_path, "other")
    with pytest.raises(ConfigError, match="does not belong to the certificate"):
        await serve(tls_cert=server_files.cert, tls_key=other_files.key).start()
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        await serve(tls_cert=tmp_path / "nowhere.pem", tls_key=other_files.key).start()


@pytest.mark.slow
async def test_command_line_server_reports_secure_addresses_and_admin_port(
    tmp_path, server_files, ca_file
) -> None:
    arguments = ("--tls-cert", str(server_files.cert), "--tls-key", str(server_files.key))
    with start_server_process(tmp_path, *arguments, "--admin-port", "0") as server:
        assert server.http_address.startswith("https://")
        async with httpx.AsyncClient(timeout=60) as client:
            assert (await client.get(server.admin_address + "/readyz")).status_code == 200
        async with await AsyncEnvClient.connect(
            server.grpc_address, ConnectOptions(ca_file=str(ca_file))
        ) as client:
            assert (await client.describe()).name == "counting"
