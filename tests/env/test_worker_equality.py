"""Equal behavior of sessions in workers and in the server's process."""

import dataclasses
from typing import Any

import pytest

from ludus.env.encoding import ResetArgs
from ludus.env.serving.server import EnvServer
from ludus.env.sessions.interface import OpenArgs
from ludus.proto.errors import (
    ActionParseError,
    EnvError,
)
from tests.env.counting_env import (
    CountingEnv,
    GloballyRandomEnv,
    Misbehavior,
    ThreadedCountingEnv,
)
from tests.env.served import WIRES, serve
from tests.env.test_isolation import (
    ADD_1,
    ISOLATIONS,
    NUM_WORKERS,
    REPORT_ACTION,
    connect_to,
    open_sessions,
    serve_workers,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> str:
    return request.param


async def collect_results(server: EnvServer, wire: str) -> list[Any]:
    """Play seeded episodes; return all results, errors, states and the server's description."""
    results: list[Any] = []
    async with connect_to(server, wire) as client:
        for seed in range(4):
            session, first_result = await client.open(seed=seed)
            episode_results = [first_result]
            for action in ({"add": 8}, {"add": 2}, "ADD 3", "ADD 1", {"add": 5}):
                episode_results.append(await session.step(action))
            with pytest.raises(EnvError) as error:
                await session.step(ADD_1)
            results.append([_convert_to_dict(result) for result in episode_results])
            results.append((error.value.code, error.value.message, await session.state()))
            with pytest.raises(ActionParseError) as parse_error:
                await (await client.open(seed=seed))[0].step("SUB 1")
            results.append((parse_error.value.code, parse_error.value.message))
        results.append(dataclasses.replace(await client.describe(), server_id=""))
    return results


def _convert_to_dict(result: Any) -> dict[str, Any]:
    tensors = {name: (array.dtype, array.tolist()) for name, array in result.tensors.items()}
    return {**dataclasses.asdict(dataclasses.replace(result, tensors={})), "tensors": tensors}


@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_seeded_episodes_are_the_same_inline_and_in_workers(isolation: str, factory) -> None:
    async with serve(factory) as server, serve_workers(factory, isolation) as worker_server:
        for wire in WIRES:
            assert await collect_results(server, wire) == await collect_results(worker_server, wire)


async def test_workers_do_not_share_their_global_random_state(isolation: str) -> None:
    async with serve_workers(isolation=isolation) as server, connect_to(server) as client:
        sessions = await open_sessions(client, 6)
        infos = [(await session.step(REPORT_ACTION)).info for session in sessions]
        luck_by_pid = {info["pid"]: tuple(info["luck"]) for info in infos}
        assert len(luck_by_pid) >= NUM_WORKERS
        for index in (0, 1):
            assert len({luck[index] for luck in luck_by_pid.values()}) == len(luck_by_pid)


async def test_group_has_equal_first_observations_across_workers(isolation: str) -> None:
    async with serve_workers(isolation=isolation) as server:
        sessions = await server.core.open_group(OpenArgs(ResetArgs(seed=5)), 6)
        assert len({session.first_result.observation_json for session in sessions}) == 1
        pids = set()
        for session in sessions:
            result = await server.core.step(session.session_id, b'{"add": %d}' % Misbehavior.REPORT)
            pids.add(result.info_json)
        assert len(pids) >= NUM_WORKERS


async def test_workers_get_no_secrets_and_load_no_server_modules(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "a-key-of-more-than-16-bytes"
    monkeypatch.setenv("LUDUS_SESSION_KEY", secret)
    monkeypatch.setenv("TEAM_A_TOKEN", secret + "-of-a-tenant")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret + "-of-a-cloud")
    monkeypatch.setenv("HARMLESS", "1")
    async with (
        serve_workers(isolation=isolation, session_key=secret, pass_env=("HARMLESS",)) as server,
        connect_to(server) as client,
    ):
        (session,) = await open_sessions(client, 1)
        info = (await session.step(REPORT_ACTION)).info
        assert "HARMLESS" in info["variables"]
        assert "PATH" in info["variables"]
        secret_names = {"LUDUS_SESSION_KEY", "TEAM_A_TOKEN", "AWS_SECRET_ACCESS_KEY"}
        assert not secret_names & set(info["variables"])
        assert info["heavy"] == []  # server modules that a worker must not import


@pytest.mark.parametrize("isolation", ["inline", *ISOLATIONS])
async def test_server_reports_whether_its_environment_is_deterministic(isolation: str) -> None:
    random_env = GloballyRandomEnv
    cases = (CountingEnv, False, True), (random_env, False, False), (random_env, True, True)
    for factory, is_declared, is_deterministic in cases:
        async with (
            serve(
                factory, isolation=isolation, check_determinism=True, deterministic=is_declared
            ) as server,
            connect_to(server) as client,
        ):
            assert (await client.describe()).is_deterministic is is_deterministic
