"""Tests of RAY_ADDRESS: a run says in one sentence that no cluster responds there."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Resume
from ludus.trainer.actors import ray_address
from ludus.trainer.actors.cluster import start_ray
from ludus.trainer.actors.ray_address import check_cluster, is_local
from ludus.trainer.driver.checks import check_start
from tests.env.served import serve


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep loopback addresses, which Ray replaces by the machine's own address."""
    monkeypatch.setattr(ray_address, "canonicalize_bootstrap_address", lambda address: address)


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_address, "_TIMEOUT_S", 0.5)


@pytest.fixture
def silent_address(on_loopback: None, short_timeout: None) -> Iterator[str]:
    """Yield the address of a port that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_cluster, start_ray])
def test_silent_cluster_is_refused_by_name(
    check: object, silent_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", silent_address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS = '{silent_address}'.*nothing responds"):
        check()  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.usefixtures("on_loopback")
async def test_another_grpc_server_is_not_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as server:
        monkeypatch.setenv("RAY_ADDRESS", server.grpc_address.removeprefix("grpc://"))
        with pytest.raises(ConfigError, match=r"RAY_ADDRESS.*another program responds there"):
            await asyncio.to_thread(check_cluster)


@pytest.mark.slow
def test_dry_run_checks_the_cluster(
    silent_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", silent_address)
    run = LanguageModelRun.model_validate({"output_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        check_start(run, Resume.NEVER)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nonsense", "Invalid address"),
        ("ray://127.0.0.1:1", "Ray Client"),
        pytest.param("a.invalid:1", "a", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_invalid_address_is_refused_by_name(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS = '{address}'.*{message}"):
        check_cluster()


def test_empty_address_means_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert is_local()


@pytest.mark.parametrize("home", ["file", "/proc/nobody"])
def test_ray_starts_without_a_writable_home(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path / home))
    tokens: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **_: tokens.append(os.environ["RAY_AUTH_TOKEN"]))
    start_ray()
    assert len(tokens[0]) >= 16
