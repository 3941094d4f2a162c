"""Tests of the server program and the typed client of OpenSpiel games."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi import FastAPI

from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import play_policy
from ludus.proto.errors import EpisodeStateError, IllegalActionError, InvalidCallError
from openspiel_env import OpenSpielAction, OpenSpielEnv, make_environment
from openspiel_env.policies import fixed_policies
from openspiel_env.server import app
from tests.openspiel.seats import HIT, STAND, play_episode

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RunningServer:
    http_address: str
    grpc_address: str


@contextmanager
def run_server_program(
    folder: Path,
    *arguments: str,
    module: str = "envs.openspiel_env.server.app",
    **variables: str,
) -> Iterator[RunningServer]:
    """Run the server program from the repository root, as the tutorial does."""
    ready_file = folder / f"ready-{time.monotonic_ns()}.json"
    command = [sys.executable, "-m", module, "--port", "0", "--ready-file", str(ready_file)]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + 120.0
        while not ready_file.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_s, "the server did not start within 120 s"
            time.sleep(0.02)
        addresses = json.loads(ready_file.read_text())
        yield RunningServer(addresses["http"], addresses["grpc"])
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def blackjack_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server_program(
        tmp_path_factory.mktemp("server"), OPENSPIEL_GAME="blackjack"
    ) as server:
        yield server


def run_script(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


# -- the tutorial ----------------------------------------------------------------------


TUTORIAL_PROGRAM = """
import sys
import os
from pathlib import Path

openenv_path = os.environ.get('OPENENV_PATH', '/path/to/OpenEnv/src')
if openenv_path not in sys.path:
    sys.path.insert(0, openenv_path)

from envs.openspiel_env import OpenSpielEnv, OpenSpielAction

env = OpenSpielEnv(base_url="http://localhost:8004")
result = env.reset()
print(result.observation.legal_actions, result.observation.game_phase)
print(len(result.observation.info_state), result.reward, result.done)
result = env.step(OpenSpielAction(action_id=1))
print(result.observation.game_phase, result.reward in (-1, 0, 1), result.done)
state = env.state()
print(state.game_name, state.step_count)
env.close()
"""


def test_tutorial_runs_from_the_repository_root(blackjack_server: RunningServer) -> None:
    output = run_script(
        TUTORIAL_PROGRAM.replace("http://localhost:8004", blackjack_server.http_address)
    )
    assert output.splitlines() == [
        "[0, 1] initial",
        "189 None False",
        "terminal True True",
        "blackjack 1",
    ]


def test_client_does_not_import_openspiel() -> None:
    code = "import sys, envs.openspiel_env, openspiel_env; print('pyspiel' in sys.modules)"
    assert run_script(code).strip() == "False"


# -- the client ------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_remote_episode_equals_the_local_episode(
    protocol: str, blackjack_server: RunningServer
) -> None:
    for seed in range(3):
        transitions = play_episode({"game": "blackjack"}, seed)
        rng = random.Random(f"test {seed}")
        with OpenSpielEnv(base_url=getattr(blackjack_server, f"{protocol}_address")) as env:
            results = [env.reset(seed=seed)]
            while not results[-1].done:
                action_id = rng.choice(results[-1].observation.legal_actions)
                results.append(env.step(OpenSpielAction(action_id=action_id)))
        assert [result.observation for result in results] == [
            transition.observation for transition in transitions
        ]
        assert [result.reward for result in results] == [
            transition.reward for transition in transitions
        ]
        assert results[-1].terminated
        assert not results[-1].truncated


def test_result_contains_messages_and_legal_responses(blackjack_server: RunningServer) -> None:
    with OpenSpielEnv(base_url=blackjack_server.http_address) as env:
        result = env.reset(seed=1)
    assert result.text.legal_answers == ["HIT", "STAND"]
    assert " vs " in result.text.messages[0]["content"]


def test_client_raises_the_original_error_types(blackjack_server: RunningServer) -> None:
    with OpenSpielEnv(base_url=blackjack_server.http_address) as env:
        with pytest.raises(EpisodeStateError):
            env.step(OpenSpielAction(action_id=STAND))
        result = env.reset(seed=5)
        with pytest.raises(IllegalActionError, match=r"0 \(Hit\), 1 \(Stand\); got 7"):
            env.step(OpenSpielAction(action_id=7))
        with pytest.raises(InvalidCallError, match="'chess'"):
            env.step(OpenSpielAction(action_id=HIT, game_name="chess"))
        assert env.state().step_count == 0
        assert env.reset(seed=5).observation == result.observation
        env.step(OpenSpielAction(action_id=HIT))
        assert env.state().step_count == 1


async def test_remote_baseline_returns_equal_local_returns(blackjack_server: RunningServer) -> None:
    policy = fixed_policies("blackjack")["basic_strategy"]
    async with await AsyncEnvClient.connect(blackjack_server.grpc_address) as client:
        outcomes = await play_policy(client, policy, range(50))
    environment = make_environment(game="blackjack")
    for outcome in outcomes:
        transition, episode_return = environment.reset(seed=outcome.seed), 0.0
        while not transition.terminated:
            action = policy(transition.observation.model_dump(), random.Random(0))
            transition = environment.step(OpenSpielAction(**action))
            episode_return += transition.reward
        assert outcome.episode_return == episode_return


# -- the command -----------------------------------------------------------------------


def test_options_override_environment_variables(tmp_path: Path) -> None:
    variables = {
        "OPENSPIEL_GAME": "blackjack",
        "OPENSPIEL_AGENT_PLAYER": "1",
        "OPENSPIEL_OPPONENT_POLICY": "last",
        "OPENSPIEL_TEXT_STYLE": "rules",
        "MAX_CONCURRENT_ENVS": "3",
    }
    arguments = ("--game", "kuhn_poker", "--game-params", '{"players": 3}')
    with run_server_program(
        tmp_path, *arguments, module="openspiel_env.server.app", **variables
    ) as server:
        with OpenSpielEnv(base_url=server.http_address) as env:
            assert "Kuhn poker with 3 players" in env.reset().text.messages[0]["content"]
            state = env.state()
        metadata = read_metadata(server)
    assert (state.game_name, state.game_params) == ("kuhn_poker", {"players": 3})
    assert (state.agent_player, state.opponent_policy, state.num_players) == (1, "last", 3)
    assert metadata["ludus"]["max_sessions"] == 3
    assert metadata["ludus"]["options"]["text_style"] == "rules"


def read_metadata(server: RunningServer) -> dict:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{server.http_address}/metadata", timeout=60) as response:
        return json.load(response)


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (
            [],
            {"OPENSPIEL_GAME": "blackjak"},
            "'blackjak'; did you mean blackjack",
        ),
        (["--agent-player", "1"], {"OPENSPIEL_GAME": "catch"}, "got 1; set agent_player"),
        (["--game-params", "{players"], {}, "expected a JSON object, got '{players'"),
        (
            [],
            {"OPENSPIEL_AGENT_PLAYER": "first"},
            "expected a valid integer, got 'first'",
        ),
        ([], {"MAX_CONCURRENT_ENVS": "many"}, "max_sessions: expected a valid integer"),
    ],
)
def test_invalid_input_exits_with_status_2(
    arguments: list[str],
    variables: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_info:
        app.main(["--port", "0", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_module_provides_an_asgi_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENSPIEL_GAME", "tic_tac_toe")
    assert isinstance(app.app, FastAPI)
    with pytest.raises(AttributeError, match="no attribute 'application'"):
        app.application  # noqa: B018
