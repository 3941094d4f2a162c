"""Sessions in workers behave like sessions in the server's process."""

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
    Deed,
    GloballyRandomEnv,
    ThreadedCountingEnv,
)
from tests.env.served import WIRES, serve
from tests.env.test_isolation import (
    ADD_1,
    ISOLATIONS,
    NUM_WORKERS,
    REPORT,
    connect_to,
    open_many,
    worker_server,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> str:
    return request.param


async def transcript(server: EnvServer, wire: str) -> list[Any]:
    """Return everything that a client sees of seeded episodes: tensors, text, errors and tools."""
    seen: list[Any] = []
    async with connect_to(server, wire) as client:
        for seed in range(4):
            session, first = await client.open(seed=seed)
            results = [first]
            for action in ({"add": 8}, {"add": 2}, "ADD 3", "ADD 1", {"add": 5}):
                results.append(await session.step(action))
            with pytest.raises(EnvError) as caught:
                await session.step(ADD_1)
            seen.append([_plain(result) for result in results])
            seen.append((caught.value.code, caught.value.message, await session.state()))
            with pytest.raises(ActionParseError) as refused:
                await (await client.open(seed=seed))[0].step("SUB 1")
            seen.append((refused.value.code, refused.value.message))
        seen.append(dataclasses.replace(await client.describe(), server_id=""))
    return seen


def _plain(result: Any) -> dict[str, Any]:
    tensors = {name: (array.dtype, array.tolist()) for name, array in result.tensors.items()}
    return {**dataclasses.asdict(dataclasses.replace(result, tensors={})), "tensors": tensors}


@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_seeded_episodes_are_the_same_inline_and_in_workers(isolation: str, factory) -> None:
    async with serve(factory) as inline, worker_server(factory, isolation) as isolated:
        for wire in WIRES:
            assert await transcript(inline, wire) == await transcript(isolated, wire)


async def test_workers_do_not_share_their_global_random_state(isolation: str) -> None:
    async with worker_server(isolation=isolation) as server, connect_to(server) as client:
        sessions = await open_many(client, 6)
        drawn = [(await session.step(REPORT)).info for session in sessions]
        lucks = {info["pid"]: tuple(info["luck"]) for info in drawn}
        assert len(lucks) >= NUM_WORKERS
        for index in (0, 1):
            assert len({luck[index] for luck in lucks.values()}) == len(lucks)


async def test_group_has_equal_first_observations_across_workers(isolation: str) -> None:
    async with worker_server(isolation=isolation) as server:
        opened = await server.core.open_group(OpenArgs(ResetArgs(seed=5)), 6)
        assert len({candidate.first_result.observation_json for candidate in opened}) == 1
        pids = set()
        for candidate in opened:
            result = await server.core.step(candidate.session_id, b'{"add": %d}' % Deed.REPORT)
            pids.add(result.info_json)
        assert len(pids) >= NUM_WORKERS


async def test_workers_see_no_secrets_and_load_no_server(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "a-key-of-more-than-16-bytes"
    monkeypatch.setenv("LUDUS_SESSION_KEY", secret)
    monkeypatch.setenv("TEAM_A_TOKEN", secret + "-of-a-tenant")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret + "-of-a-cloud")
    monkeypatch.setenv("HARMLESS", "1")
    async with (
        worker_server(isolation=isolation, session_key=secret, pass_env=("HARMLESS",)) as server,
        connect_to(server) as client,
    ):
        (session,) = await open_many(client, 1)
        info = (await session.step(REPORT)).info
        assert "HARMLESS" in info["variables"]
        assert "PATH" in info["variables"]
        kept = {"LUDUS_SESSION_KEY", "TEAM_A_TOKEN", "AWS_SECRET_ACCESS_KEY"}
        assert not kept & set(info["variables"])
        assert info["heavy"] == []


@pytest.mark.parametrize("isolation", ["inline", *ISOLATIONS])
async def test_server_reports_whether_its_environment_is_deterministic(isolation: str) -> None:
    unruly = GloballyRandomEnv
    cases = (CountingEnv, False, True), (unruly, False, False), (unruly, True, True)
    for factory, declared, expected in cases:
        async with (
            serve(
                factory, isolation=isolation, check_determinism=True, deterministic=declared
            ) as server,
            connect_to(server) as client,
        ):
            assert (await client.describe()).is_deterministic is expected
