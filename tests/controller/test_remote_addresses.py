"""Unreachable remote environments are refused before the run starts, and named in the error."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Resume
from ludus.trainer.driver import build
from ludus.trainer.driver.build import start_infrastructure
from ludus.trainer.driver.checks import check_start
from ludus.trainer.setup import quick_checks
from ludus.trainer.setup.quick_checks import check_remote_addresses
from tests.env.served import reserve_port


@pytest.fixture
def unused_address() -> Iterator[str]:
    """Yield a host and port without a listener."""
    with reserve_port() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def short_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_checks, "CONNECT_TIMEOUT_S", 0.2)


def make_run(address: str) -> LanguageModelRun:
    return LanguageModelRun.model_validate({"environment": {"kind": "remote", "address": address}})


def make_multi_environment_run(**addresses: str) -> LanguageModelRun:
    environments = {
        name: {"kind": "remote", "address": address} for name, address in addresses.items()
    }
    return LanguageModelRun.model_validate({"environments": environments})


async def start_run(run: LanguageModelRun, folder: Path) -> None:
    async with start_infrastructure(run, folder):
        pass


@pytest.mark.usefixtures("short_connect_timeout")
async def test_unreachable_address_is_refused_before_ray_starts(
    unused_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place_in_ray(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(build, "place_in_ray", place_in_ray)
    with pytest.raises(ConfigError) as error_info:
        await start_run(make_run(f"grpc://{unused_address}"), tmp_path)
    message = str(error_info.value)
    assert message.startswith(f"environment.address = 'grpc://{unused_address}': ")
    assert "environments." not in message


@pytest.mark.usefixtures("short_connect_timeout")
def test_dry_run_reports_an_unreachable_address(unused_address: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment\.address = 'ws://{unused_address}'"):
        check_start(make_run(f"ws://{unused_address}"), Resume.NEVER)


@pytest.mark.usefixtures("short_connect_timeout")
async def test_all_unreachable_addresses_are_reported_without_credentials(
    unused_address: str,
) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    run = make_multi_environment_run(
        first=f"http://me:open-sesame@{unused_address}",
        reachable=f"grpc://127.0.0.1:{port}",
        last=f"grpc://{unused_address}/chess",
    )
    with pytest.raises(ConfigError) as error_info:
        await check_remote_addresses(run)
    message = str(error_info.value)
    assert f"environments.first.address = 'http://{unused_address}'" in message
    assert f"environments.last.address = 'grpc://{unused_address}/chess'" in message
    assert "reachable.address" not in message
    assert "open-sesame" not in message
    server.close()


async def test_check_waits_for_a_starting_server() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        run = make_run(f"grpc://127.0.0.1:{server.getsockname()[1]}")
        check_task = asyncio.create_task(check_remote_addresses(run))
        await asyncio.sleep(0.05)
        assert not check_task.done()
        server.listen()
        await check_task
