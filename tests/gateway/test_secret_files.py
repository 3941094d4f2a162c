"""Gateways and servers follow their secret files: new secrets apply, and removed ones do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import websockets

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.security.session_ids import SessionKey, derive_server_key, derive_server_token
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.errors import AuthenticationError, ConfigError, EnvError
from ludus.services.gateway.config import ServersSection
from ludus.services.gateway.gateway import Gateway
from tests.env.counting_env import CountingEnv
from tests.env.polling import wait_until
from tests.gateway.gateways import (
    FAST_POLLING,
    NAME,
    ListedServers,
    connect_client,
    make_config,
    make_endpoint,
)

pytestmark = pytest.mark.slow

SERVER_ID = "0c4f7b5e9a0e4a538a526f6f6f6f6f6f"
NAMES = ("session-key", "environment-token", "gateway-token")


class Secrets:
    """The secrets of a fleet, and those that are derived for its only server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in NAMES:
            self.write(name, "old")

    def write(self, name: str, *labels: str) -> None:
        """Replace a secret by one line for each label."""
        lines = [self.read(name, label) for label in labels]
        self._replace(name, lines)
        derived_name, derive = {
            "session-key": ("server-key", derive_server_key),
            "environment-token": ("token", derive_server_token),
            "gateway-token": ("", derive_server_token),
        }[name]
        if derived_name:
            self._replace(derived_name, [derive(line, SERVER_ID) for line in lines])

    def read(self, name: str, label: str) -> str:
        """Return the secret with this name and label."""
        return f"{name}-{label}-0123456789abcdef"

    def _replace(self, name: str, lines: list[str]) -> None:
        new_path = self.folder / f"{name}.new"
        new_path.write_text("".join(f"{line}\n" for line in lines))
        new_path.replace(self.folder / name)


@asynccontextmanager
async def run_fleet(secrets: Secrets) -> AsyncIterator[tuple[Gateway, EnvServer]]:
    """Run a gateway and a server that read all secrets from files."""
    folder = secrets.folder
    options = ServerOptions(
        port=0,
        server_id=SERVER_ID,
        token_file=folder / "token",
        server_key_file=folder / "server-key",
    )
    token_file = str(folder / "environment-token")
    config = make_config(
        "grpc://127.0.0.1:1",
        session_key_file=str(folder / "session-key"),
        token_file=str(folder / "gateway-token"),
        servers={**FAST_POLLING, "token_file": token_file, "derive_tokens": True},
    )
    async with EnvServer(CountingEnv, options) as server:
        source = ListedServers(make_endpoint(server, server_id=SERVER_ID))
        async with Gateway(config, {NAME: source}) as gateway:
            yield gateway, server


def test_a_server_with_an_unknown_id_gets_no_token_of_the_fleet(tmp_path: Path) -> None:
    token_path = tmp_path / "token"
    token_path.write_text("token-of-the-whole-fleet")
    servers = ServersSection(token_file=token_path, derive_tokens=True)
    assert servers.make_metadata("") == ()
    derived_token = derive_server_token("token-of-the-whole-fleet", SERVER_ID)
    assert servers.make_metadata(SERVER_ID) == (("authorization", f"Bearer {derived_token}"),)


async def can_call(make_call: Callable[[], Any]) -> bool:
    """Return True if the call succeeds, and False if it is refused."""
    try:
        await make_call()
    except EnvError:
        return False
    return True


async def wait_until_called(make_call: Callable[[], Any], *, succeeds: bool) -> None:
    """Repeat the call until it succeeds or is refused."""
    async with asyncio.timeout(60):
        while await can_call(make_call) is not succeeds:
            await asyncio.sleep(0.05)


def connect(target: Any, secrets: Secrets, name: str, label: str) -> Any:
    """Connect a client with a token of the fleet."""
    token = secrets.read(name, label)
    if name == "environment-token":
        token = derive_server_token(token, SERVER_ID)
    return connect_client(target, token=token, timeout_s=20.0)


async def connect_once(target: Any, secrets: Secrets, name: str, label: str) -> None:
    async with connect(target, secrets, name, label):
        pass


async def test_replaced_tokens_are_refused_and_new_ones_accepted(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    async with run_fleet(secrets) as (gateway, server):
        for name, target in (
            ("gateway-token", gateway.grpc_address),
            ("environment-token", server.grpc_address),
        ):
            async with connect(target, secrets, name, "old") as client:
                await client.describe()
                secrets.write(name, "new")
                await wait_until_called(
                    lambda n=name, t=target: connect_once(t, secrets, n, "new"), succeeds=True
                )
                with pytest.raises(AuthenticationError):
                    await connect_once(target, secrets, name, "old")
                await wait_until_called(client.describe, succeeds=False)
        # The gateway sends the new token to its server.
        async with connect(gateway, secrets, "gateway-token", "new") as client:
            session, _ = await client.open(wait_s=30)
            await session.close()


async def test_a_new_first_session_key_keeps_sessions_and_a_removed_key_ends_them(
    tmp_path: Path,
) -> None:
    secrets = Secrets(tmp_path)
    async with run_fleet(secrets) as (gateway, _):  # noqa: SIM117
        async with connect(gateway, secrets, "gateway-token", "old") as client:
            old_session, _ = await client.open()
            secrets.write("session-key", "new", "old")
            new_session = await open_with_new_key(client, secrets)
            await old_session.step({"add": 1})
            secrets.write("session-key", "new")
            await wait_until_called(lambda: old_session.step({"add": 1}), succeeds=False)
            await new_session.step({"add": 1})


async def open_with_new_key(client: AsyncEnvClient, secrets: Secrets) -> AsyncSession:
    """Open a session whose id is signed with the new key, as soon as the gateway signs with it."""
    new_key = SessionKey(secrets.read("session-key", "new").encode())
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(EnvError):
                session, _ = await client.open()
                new_key.read(session.id)
                return session
            await asyncio.sleep(0.05)


async def test_an_open_websocket_of_a_removed_token_is_closed(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    async with run_fleet(secrets) as (_, server):
        token = derive_server_token(secrets.read("environment-token", "old"), SERVER_ID)
        address = f"ws{server.http_address.removeprefix('http')}/ws"
        headers = {"authorization": f"Bearer {token}"}
        async with websockets.connect(address, additional_headers=headers) as socket:
            secrets.write("environment-token", "new")
            with pytest.raises(websockets.ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1008


async def test_an_invalid_change_keeps_the_previous_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = Secrets(tmp_path)
    async with run_fleet(secrets) as (_, server):
        (tmp_path / "token").write_text("short\n")
        await wait_until_called(
            lambda: connect_once(server.grpc_address, secrets, "environment-token", "old"),
            succeeds=True,
        )
        await wait_until(lambda: "the previous content remains" in caplog.text)
        await connect_once(server.grpc_address, secrets, "environment-token", "old")
        assert "short" not in caplog.text


@pytest.mark.parametrize("content", ["", "short", f"{'a' * 20} {'b' * 20}", "é" * 32])
def test_files_without_a_usable_secret_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)) as error_info:
        ServerOptions(token_file=path)
    assert not content or content not in str(error_info.value)
