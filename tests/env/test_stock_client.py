"""OpenEnv's own client plays on our server, and ours on theirs.

Theirs lives in a virtual environment of its own.
"""

import importlib.util
import json
import random
import shutil
import socket
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import server_process

from ludus.env.sync_client import EnvClient, Session
from ludus.env.types import JsonObject, StepResult
from ludus.proto.errors import CapacityError, InvalidCallError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STOCK_VERSION = "0.10.0"
CACHE = Path(__file__).parents[2] / ".cache" / f"stock-openenv-{STOCK_VERSION}"
PLAYER = Path(__file__).with_name("stock_player.py")


@pytest.fixture(scope="module")
def stock_python() -> Path:
    """The interpreter of a virtual environment with the stock client; made once, then kept."""
    python = CACHE / "bin" / "python"
    marker = CACHE / "complete"
    if not marker.exists():
        shutil.rmtree(CACHE, ignore_errors=True)
        venv.create(CACHE, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", f"openenv=={STOCK_VERSION}"]
        subprocess.run(install, check=True, timeout=500)
        marker.touch()
    return python


def play_with_stock_client(
    stock_python: Path, address: str, seed: int, actions: list[JsonObject]
) -> JsonObject:
    ended = subprocess.run(
        [stock_python, "-I", PLAYER, address, str(seed), json.dumps(actions)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def play_with_our_client(
    session: Session, seed: int, choose_action
) -> tuple[list[JsonObject], list[StepResult]]:
    actions: list[JsonObject] = []
    results = [session.reset(seed=seed)]
    while not results[-1].done:
        actions.append(choose_action(results[-1]))
        results.append(session.step(actions[-1]))
    return actions, results


def assert_both_clients_see_the_same(stock_python: Path, served, choose_action) -> None:
    with EnvClient.connect(served.grpc_address) as client:
        session = client.open_session()
        actions, ours = play_with_our_client(session, 3, choose_action)
        our_state = session.state()
    with EnvClient.connect(served.http_address) as client:
        remaining = iter(actions)
        again, over_websocket = play_with_our_client(
            client.open_session(), 3, lambda result: next(remaining)
        )
    stock = play_with_stock_client(stock_python, served.http_address, 3, actions)
    assert (again, over_websocket) == (actions, ours)
    assert stock["results"] == [[r.observation, r.reward, r.done] for r in ours]
    our_state.pop("episode_id"), stock["state"].pop("episode_id")
    assert stock["state"] == our_state


def test_the_stock_client_plays_the_counting_game(stock_python, tmp_path):
    with server_process(tmp_path) as served:
        assert_both_clients_see_the_same(
            stock_python, served, lambda result: {"add": 1 + result.observation["luck"] % 3}
        )


@pytest.mark.skipif(
    not (importlib.util.find_spec("openspiel_env") and importlib.util.find_spec("pyspiel")),
    reason="openspiel_env is not installed",
)
def test_the_stock_client_plays_blackjack(stock_python, tmp_path):
    generator = random.Random(0)

    def choose_action(result: StepResult) -> JsonObject:
        return {"action_id": generator.choice(result.observation["legal_actions"])}

    with server_process(
        tmp_path, module="-m openspiel_env.server.app", env={"OPENSPIEL_GAME": "blackjack"}
    ) as served:
        assert_both_clients_see_the_same(stock_python, served, choose_action)


def test_the_stock_client_is_told_of_a_full_server_and_of_bad_actions(stock_python, tmp_path):
    with (
        server_process(tmp_path, "--max-sessions", "1") as served,
        EnvClient.connect(served.grpc_address) as client,
    ):
        session, _ = client.open()
        with pytest.raises(AssertionError, match=r"1/1 sessions active.*CAPACITY_REACHED"):
            play_with_stock_client(stock_python, served.http_address, 0, [])
        session.close()
        with pytest.raises(AssertionError, match=r"unlucky \(code: EXECUTION_ERROR\)"):
            play_with_stock_client(stock_python, served.http_address, 0, [{"add": 13}])


@pytest.fixture
def stock_server(stock_python) -> Iterator[str]:
    """The address of OpenEnv's own server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = subprocess.Popen([stock_python, "-I", PLAYER.with_name("stock_server.py"), port])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_our_client_plays_on_the_stock_server(stock_server):
    with EnvClient.connect(stock_server, connect_timeout_s=60) as client:
        assert "add" in client.describe().action_schema["properties"]
        session, first = client.open(seed=5, episode_id="E", close_when_done=True)
        assert (first.observation["total"], first.reward, first.text) == (5, None, None)
        second = session.step({"add": 1})
        assert (second.observation["total"], second.reward, second.step_index) == (6, 1.0, 1)
        with pytest.raises(InvalidCallError, match="Invalid message"):
            session.step({"add": "x"})
        with pytest.raises(InvalidCallError, match="reads no text"):
            session.step(text="ADD 1")
        assert session.state()["step_count"] == 6
        other, _ = client.open(seed=1)
        with pytest.raises(CapacityError, match="2/2"):
            client.open()
        last = session.step({"add": 7})
        assert (last.terminated, last.truncated, last.step_index) == (True, False, 2)
        assert other.step({"add": 1}).observation["total"] == 2
