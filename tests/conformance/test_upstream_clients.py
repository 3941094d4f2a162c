"""OpenEnv clients of every version play on our server, directly and through our gateway."""

import functools
import json
import subprocess

import pytest
from upstream_environment import install_upstream

from ludus.env.client import EnvClient
from tests.conformance.parties import (
    CLIENTS,
    FIRST_SEED,
    GAME,
    NUM_GAMES,
    install_upstream_python,
    parse_json,
    play_with_ludus_client,
    play_with_upstream_client,
    run_upstream,
    start_ludus_gateway,
    start_ludus_server,
)

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]


@functools.cache
def play_ludus_games(grpc_address: str):
    return play_with_ludus_client(grpc_address)


@pytest.mark.parametrize("version", CLIENTS)
def test_upstream_client_and_ludus_client_play_identical_games(version, address, server):
    upstream_games = play_with_upstream_client(version, address)
    assert len(upstream_games) == NUM_GAMES
    assert upstream_games == play_ludus_games(server.grpc_address)


@pytest.mark.parametrize("version", CLIENTS)
def test_upstream_client_authenticates_with_a_token_in_the_address(version, server, tmp_path):
    with (
        start_ludus_server(tmp_path, GAME) as server_behind_gateway,
        start_ludus_gateway(
            tmp_path, server_behind_gateway, token="0123456789abcdef0123"
        ) as address,
    ):
        assert play_with_upstream_client(version, address) == play_ludus_games(server.grpc_address)
        with pytest.raises(AssertionError, match="401"):
            play_with_upstream_client(version, address.replace("player:0123", "player:x"))


def test_ludus_client_plays_identical_games_on_every_address(address, server):
    assert play_with_ludus_client(address) == play_ludus_games(server.grpc_address)


def test_games_differ_and_have_every_outcome(server):
    games = play_ludus_games(server.grpc_address)
    assert len({game["results"][-1][1] for game in games}) >= 3  # won, drawn and lost
    assert len({str(game["results"]) for game in games}) > NUM_GAMES / 2


def play_actions(address: str, *actions: dict) -> None:
    """Play actions with the newest upstream client; fail with the error that the client raises."""
    python = install_upstream_python(CLIENTS["0.10.0"][0])
    run_upstream(python, "player_actions.py", address, str(FIRST_SEED), json.dumps(actions))


def test_upstream_client_receives_the_error_for_an_invalid_action(address):
    play_actions(address)
    with pytest.raises(AssertionError, match=r"got 99.*\(code: ILLEGAL_ACTION\)"):
        play_actions(address, {"action_id": 99})
    with pytest.raises(AssertionError, match=r"\(code: VALIDATION_ERROR\)"):
        play_actions(address, {"action_id": "x"})


def test_upstream_client_receives_the_error_of_a_full_server(tmp_path):
    with (
        start_ludus_server(tmp_path, GAME, "--max-sessions", "1") as server,
        start_ludus_gateway(tmp_path, server) as gateway_address,
        EnvClient.connect(server.grpc_address) as client,
    ):
        session, _ = client.open()
        with pytest.raises(AssertionError, match=r"1/1 sessions active.*CAPACITY_REACHED"):
            play_actions(server.http_address)
        with pytest.raises(AssertionError, match="CAPACITY_REACHED"):
            play_actions(gateway_address)
        session.close()
        play_actions(server.http_address)


def test_openenv_validator_passes(address):
    python = install_upstream_python(CLIENTS["0.10.0"][0])
    completed_process = subprocess.run(
        [python.with_name("openenv"), "validate", "--url", address, "--json"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert completed_process.returncode == 0, completed_process.stdout + completed_process.stderr
    assert parse_json(completed_process.stdout)["passed"] is True


def test_mcp_client_and_ludus_client_play_the_same_game(address, server):
    python = install_upstream("mcp==2.3.0")
    output = parse_json(run_upstream(python, "mcp_player.py", f"{address}/mcp", str(FIRST_SEED)))
    assert {"start_episode", "take_action", "get_state"} <= set(output["tools"])
    assert output["results"] == play_ludus_games(server.grpc_address)[0]["results"]
