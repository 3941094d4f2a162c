"""OpenEnv's servers return the same results to our client as to OpenEnv's clients."""

import pytest

from ludus.env.check import check_server
from ludus.env.client import AsyncEnvClient, ConnectOptions, EnvClient
from ludus.proto.errors import ActionParseError, CapacityError, InvalidCallError
from tests.conformance.parties import (
    FIRST_SEED,
    NUM_GAMES,
    SERVERS,
    START_TIMEOUT_S,
    play_with_ludus_client,
    play_with_upstream_client,
    start_upstream_server,
)

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]


@pytest.mark.parametrize("version", SERVERS)
def test_ludus_client_and_upstream_client_play_identical_games(version):
    # Servers of 0.1.x accept no seeds. Each server process counts upwards from FIRST_SEED.
    sends_seeds = version != "0.1.1"
    with start_upstream_server(version) as address:
        upstream_games = play_with_upstream_client(version, address)
    with start_upstream_server(version) as address:
        ludus_games = play_with_ludus_client(address, sends_seeds=sends_seeds)
    assert len(ludus_games) == NUM_GAMES
    assert ludus_games == upstream_games


def test_ludus_client_supports_sessions_and_errors_of_upstream_server():
    with (
        start_upstream_server("0.10.0", max_sessions=2) as address,
        EnvClient.connect(address, ConnectOptions(connect_timeout_s=START_TIMEOUT_S)) as client,
    ):
        assert "action_id" in client.describe().action_schema["properties"]
        session, result = client.open(seed=FIRST_SEED, episode_id="E", close_when_done=True)
        assert (result.reward, result.text.legal_answers) == (None, ["0", "1"])
        with pytest.raises(InvalidCallError, match="Invalid message"):
            session.step({"action_id": "x"})
        with pytest.raises(ActionParseError, match="expected JSON, got 'HIT'"):
            session.step(text="HIT")
        with pytest.raises(ActionParseError, match=r"Invalid message.*from the text"):
            session.step(text='{"action_id": 1, "card": "ace"}')
        assert session.state()["step_count"] == 0
        other_session, other_result = client.open(seed=FIRST_SEED)
        assert other_result == result
        with pytest.raises(CapacityError, match="2/2"):
            client.open()
        response = session.step({"action_id": 1})  # stands
        assert (response.terminated, response.truncated, response.step_index) == (True, False, 1)
        assert other_session.step({"action_id": 1}) == response


async def test_upstream_server_breaks_no_check_but_lacks_ludus_extensions():
    with start_upstream_server("0.10.0") as address:
        async with await AsyncEnvClient.connect(address) as client:
            report = await check_server(client, num_steps=8)
    assert {check.name: check.detail for check in report.checks if check.verdict == "broken"} == {}
    assert {check.name for check in report.checks if check.verdict == "not offered"} >= {
        "a_step_before_the_reset_is_refused",
        "a_step_after_the_end_is_refused",
        "a_wrong_step_number_is_refused",
        "a_repeated_step_returns_its_first_result",
    }
