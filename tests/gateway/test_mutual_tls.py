"""Mutual TLS between clients, gateways and servers, and server names in certificates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from ludus.env.client import AsyncEnvClient, ConnectOptions, EnvClient
from ludus.proto.config.environment import ClientTls, RemoteEnvironment
from ludus.proto.errors import ConfigError, EnvError
from ludus.services.gateway.config import GatewayConfig
from ludus.trainer.setup.environments import make_connect_options
from tests.env.served import serve, server_address
from tests.gateway.gateways import FAST_POLLING, NAME, run_gateway

WIRES = pytest.mark.parametrize("wire", ["grpc", "http"])


@dataclass(frozen=True)
class CertificateFiles:
    """Paths of a certificate, its private key and the certificate of its authority."""

    ca: str
    cert: str
    key: str

    @property
    def options(self) -> dict[str, str]:
        return {"ca_file": self.ca, "cert_file": self.cert, "key_file": self.key}


def issue_certificate_files(folder: Path, *names: str, ca: trustme.CA) -> CertificateFiles:
    cert = ca.issue_cert(*names)
    stem = folder / names[0]
    ca.cert_pem.write_to_path(f"{folder}/ca.pem")
    cert.private_key_pem.write_to_path(f"{stem}.key")
    Path(f"{stem}.crt").write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    return CertificateFiles(f"{folder}/ca.pem", f"{stem}.crt", f"{stem}.key")


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_files(tmp_path: Path, ca: trustme.CA) -> CertificateFiles:
    """Issue a certificate for a host name, as for pods, instead of an address."""
    return issue_certificate_files(tmp_path, "servers.example", ca=ca)


@pytest.fixture
def client_files(tmp_path: Path, ca: trustme.CA) -> CertificateFiles:
    return issue_certificate_files(tmp_path, "client.example", ca=ca)


def make_server_options(files: CertificateFiles) -> dict[str, Path]:
    """Return the options of a server that requires client certificates."""
    return {
        "tls_cert": Path(files.cert),
        "tls_key": Path(files.key),
        "tls_client_ca": Path(files.ca),
    }


@pytest.mark.slow
@WIRES
async def test_client_sends_a_certificate_and_checks_the_server_name(
    wire: str, server_files: CertificateFiles, client_files: CertificateFiles
) -> None:
    async with serve(**make_server_options(server_files)) as server:
        address, name = server_address(server, wire), "servers.example"
        async with await AsyncEnvClient.connect(
            address, ConnectOptions(server_name=name, **client_files.options)
        ) as client:
            session, _ = await client.open(seed=1)
            assert (await session.step({"add": 2})).reward == 2.0
        for options in (
            {"ca_file": client_files.ca, "server_name": name},
            {**client_files.options, "server_name": "others.example"},
            client_files.options,
        ):
            with pytest.raises(EnvError):
                await AsyncEnvClient.connect(
                    address, ConnectOptions(connect_timeout_s=0.3, **options)
                )


@pytest.mark.slow
async def test_gateway_and_servers_use_mutual_tls(
    server_files: CertificateFiles, client_files: CertificateFiles, tmp_path: Path
) -> None:
    server_config = {**FAST_POLLING, **client_files.options, "server_name": "servers.example"}
    gateway_tls = {"cert": server_files.cert, "key": server_files.key, "client_ca": server_files.ca}
    async with run_gateway(
        2, server_options=make_server_options(server_files), servers=server_config, tls=gateway_tls
    ) as (
        gateway,
        _,
    ):
        for address in (gateway.grpc_address, f"{gateway.http_address}/envs/{NAME}"):
            async with await AsyncEnvClient.connect(
                address, ConnectOptions(server_name="servers.example", **client_files.options)
            ) as client:
                sessions = [(await client.open(seed=n))[0] for n in range(4)]
                assert [(await session.step({"add": 1})).reward for session in sessions] == [
                    1.0
                ] * 4
        with pytest.raises(EnvError):
            await AsyncEnvClient.connect(
                gateway.grpc_address,
                ConnectOptions(
                    server_name="servers.example", ca_file=client_files.ca, connect_timeout_s=0.3
                ),
            )


async def test_certificate_of_an_unknown_authority_is_refused(
    server_files: CertificateFiles, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    untrusted_files = issue_certificate_files(tmp_path / "other", "client.example", ca=trustme.CA())
    options = {
        "ca_file": server_files.ca,
        "cert_file": untrusted_files.cert,
        "key_file": untrusted_files.key,
    }
    async with serve(**make_server_options(server_files)) as server:
        with pytest.raises(EnvError):
            await AsyncEnvClient.connect(
                server.grpc_address,
                ConnectOptions(server_name="servers.example", connect_timeout_s=0.3, **options),
            )


async def test_run_connects_with_the_tls_options_of_the_environment(
    server_files: CertificateFiles, client_files: CertificateFiles
) -> None:
    async with serve(**make_server_options(server_files)) as server:
        section = RemoteEnvironment(
            kind="remote",
            address=server.grpc_address,
            tls=ClientTls(server_name="servers.example", **client_files.options),
        )
        async with await AsyncEnvClient.connect(
            section.address, make_connect_options(section)
        ) as client:
            assert (await client.describe()).name == "counting"


def test_certificate_without_a_key_is_refused_before_connecting() -> None:
    with pytest.raises(ConfigError, match="together"):
        EnvClient.connect("grpcs://127.0.0.1:1", ConnectOptions(cert_file="c.pem"))
    environments = {NAME: {"addresses": ["grpcs://127.0.0.1:1"]}}
    with pytest.raises(ConfigError, match="both or neither"):
        GatewayConfig.parse({"environments": environments, "servers": {"key_file": "k.pem"}})
