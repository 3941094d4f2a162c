"""Played episodes are recorded and can be replayed."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.encoding import ResetArgs
from ludus.env.recording.format import EpisodeWriter, hash_observation, read_recording
from ludus.env.recording.recorder import EpisodeRecorder
from ludus.env.recording.verify import make_recorded_factory, replay_episode
from ludus.env.serving.loopback import open_client
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import make_local_host
from ludus.env.sessions.interface import Connection, OpenArgs
from ludus.env.sessions.options import ServerOptions
from ludus.env.targets.targets import environment_factory
from ludus.proto.errors import ActionError, ConfigError, EnvError, NotFoundError, ToolError
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.served import WIRES, serve, server_address, server_process
from tests.env.tool_env import ToolEnv

TARGET = "tests.env.counting_env:CountingEnv"
DONE = {"add": 7}


def recording_core(
    path: Path, *, options: ServerOptions | None = None, factory=CountingEnv, **limits
) -> tuple[SessionCore, EpisodeRecorder]:
    core = SessionCore(make_local_host(factory), options)
    recorder = EpisodeRecorder(path, core.description, environment_factory(TARGET, {}), **limits)
    core.record(recorder)
    return core, recorder


def read_episodes(path: Path):
    return list(read_recording(path))


async def play(sessions: SessionCore, actions: list, **args) -> str:
    opened = await sessions.open(OpenArgs(ResetArgs(**args), close_when_done=True))
    for number, action in enumerate(actions, 1):
        encoded = action if isinstance(action, str) else json.dumps(action).encode()
        await sessions.step(opened.session_id, encoded, number)
    return opened.session_id


async def test_an_episode_is_written_when_it_ends_with_all_that_a_replay_needs(
    tmp_path: Path,
) -> None:
    sessions, recorder = recording_core(tmp_path / "r.jsonl")
    session_id = await play(
        sessions, ["ADD 2", {"add": 3}, DONE], seed=5, options={"start": 4}, episode_id="mine"
    )
    (episode,) = read_episodes(tmp_path / "r.jsonl")
    assert (episode.seed, episode.episode_id) == (5, "mine")
    assert episode.reset_options == {"start": 4}
    assert episode.environment.target == TARGET
    assert (episode.steps[0].text, episode.steps[1].action) == ("ADD 2", {"add": 3})
    last = episode.steps[-1].result
    assert (last.reward, last.terminated, last.truncated) == (7.0, False, True)
    assert (episode.end_reason, episode.episode_return) == ("truncated", 12.0)
    assert episode.started_at <= episode.ended_at
    assert session_id not in (tmp_path / "r.jsonl").read_text()
    assert recorder.num_running == 0


async def test_reset_without_a_seed_records_a_seed(tmp_path: Path) -> None:
    sessions, _ = recording_core(tmp_path / "r.jsonl", options=ServerOptions(first_seed=11))
    for _ in range(2):
        await play(sessions, [DONE])
    drawing, _ = recording_core(tmp_path / "drawn.jsonl")
    for _ in range(2):
        await play(drawing, [DONE])
    assert [episode.seed for episode in read_episodes(tmp_path / "r.jsonl")] == [11, 12]
    first, second = read_episodes(tmp_path / "drawn.jsonl")
    assert first.seed != second.seed
    assert first.first.observation_hash != second.first.observation_hash


async def test_a_repeated_step_is_written_once(tmp_path: Path) -> None:
    sessions, _ = recording_core(tmp_path / "r.jsonl")
    opened = await sessions.open(OpenArgs(ResetArgs(seed=1)))
    for number in (1, 1, 2):
        await sessions.step(opened.session_id, b'{"add": 1}', number)
    await sessions.close(opened.session_id)
    (episode,) = read_episodes(tmp_path / "r.jsonl")
    assert len(episode.steps) == 2


@pytest.mark.parametrize("factory", ["CountingEnv", "ThreadedCountingEnv"])
async def test_every_way_to_end_writes_the_episode(tmp_path: Path, factory) -> None:
    factory = environment_factory(f"tests.env.counting_env:{factory}", {})
    options = ServerOptions(idle_timeout_s=0.05)
    sessions, recorder = recording_core(tmp_path / "r.jsonl", options=options, factory=factory)
    connection = Connection()
    await sessions.open(OpenArgs(ResetArgs(seed=1)), connection)
    sessions.release(connection)
    opened = await sessions.open(OpenArgs(ResetArgs(seed=2)))
    await sessions.reset(opened.session_id, ResetArgs(seed=3))
    await sessions.close(opened.session_id)
    await sessions.open(OpenArgs(ResetArgs(seed=4)))
    sweeping = asyncio.create_task(sessions.close_idle_forever())
    async with asyncio.timeout(60):
        while recorder.num_running:
            await asyncio.sleep(0.01)
    sweeping.cancel()
    await sessions.open(OpenArgs(ResetArgs(seed=5)))
    recorder.finish()
    reasons = {episode.seed: episode.end_reason for episode in read_episodes(tmp_path / "r.jsonl")}
    assert reasons[1].startswith("the connection")
    assert (reasons[2], reasons[3]) == ("reset", "it was closed")
    assert "idle" in reasons[4]
    assert reasons[5] == "the server stopped"


async def test_concurrent_sessions_do_not_mix(tmp_path: Path) -> None:
    sessions, _ = recording_core(
        tmp_path / "r.jsonl",
        factory=environment_factory("tests.env.counting_env:ThreadedCountingEnv", {}),
    )
    await asyncio.gather(
        *(play(sessions, [{"add": seed}, DONE], seed=seed) for seed in range(20, 40))
    )
    episodes = read_episodes(tmp_path / "r.jsonl")
    assert {episode.seed for episode in episodes} == set(range(20, 40))
    for episode in episodes:
        assert episode.steps[0].action == {"add": episode.seed}
        assert len(episode.steps) == 2


async def test_full_file_is_renamed_and_no_episode_is_lost(tmp_path: Path) -> None:
    sessions, _ = recording_core(tmp_path / "r.jsonl", max_file_bytes=2000)
    for seed in range(12):
        await play(sessions, [DONE], seed=seed)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files[:2] == ["r.0001.jsonl", "r.0002.jsonl"] and files[-1] == "r.jsonl"
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert sorted(episode.seed for episode in read_episodes(tmp_path)) == list(range(12))


async def test_endless_episode_is_cut(tmp_path: Path) -> None:
    sessions, recorder = recording_core(tmp_path / "r.jsonl", max_episode_bytes=600)
    opened = await sessions.open(OpenArgs(ResetArgs(seed=1)))
    for _ in range(200):
        with pytest.raises(ActionError):
            await sessions.step(opened.session_id, "nonsense")
    recorder.finish()
    (episode,) = read_episodes(tmp_path / "r.jsonl")
    assert 0 < len(episode.steps) < 20
    assert "too long" in episode.end_reason


async def test_memory_of_running_episodes_is_limited(tmp_path: Path) -> None:
    sessions, recorder = recording_core(tmp_path / "r.jsonl", max_running_bytes=4000)
    short = await sessions.open(OpenArgs(ResetArgs(seed=1)))
    long = await sessions.open(OpenArgs(ResetArgs(seed=2)))
    await sessions.step(short.session_id, b'{"add": 1}')
    for _ in range(200):
        with pytest.raises(ActionError):
            await sessions.step(long.session_id, "nonsense")
    assert recorder.num_running == 1
    await sessions.close(long.session_id)
    recorder.finish()
    first, last = read_episodes(tmp_path / "r.jsonl")
    assert (first.seed, first.end_reason) == (
        2,
        "unfinished: the memory limit of recordings was reached",
    )
    assert 0 < len(first.steps) < 100
    assert (last.seed, len(last.steps), last.end_reason) == (1, 1, "the server stopped")


async def test_reset_options_count_towards_the_limit(tmp_path: Path) -> None:
    sessions, recorder = recording_core(tmp_path / "r.jsonl", max_running_bytes=4000)
    for seed in (1, 2, 3):
        await sessions.open(OpenArgs(ResetArgs(seed=seed, options={"note": "x" * 1500})))
    assert recorder.num_running == 2


async def test_a_folder_that_cannot_be_written_loses_episodes_but_no_session(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    sessions, recorder = recording_core(tmp_path / "file" / "r.jsonl")
    await play(sessions, [DONE], seed=1)
    assert recorder.file.num_lost == 1


async def test_incomplete_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first, recorder = recording_core(path)
    await play(first, [DONE], seed=1)
    recorder.finish()
    text = path.read_bytes()
    path.write_bytes(text + b'{"format": 1, "envi')
    assert [episode.seed for episode in read_episodes(path)] == [1]
    await play(recording_core(path)[0], [DONE], seed=2)
    assert [episode.seed for episode in read_episodes(path)] == [1, 2]


async def test_a_line_of_another_format_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    await play(recording_core(path)[0], [DONE], seed=1)
    path.write_text(path.read_text() + '{"format": 2}\n')
    with pytest.raises(ConfigError, match=f"line 2 of {path}"):
        read_episodes(path)


async def replay_differences(path: Path) -> list[str]:
    episodes = read_episodes(path)
    async with open_client(make_recorded_factory(episodes[0])) as client:
        return [(await replay_episode(client, episode)).difference for episode in episodes]


async def test_a_recording_replays_without_a_difference_and_a_change_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r.jsonl"
    sessions, _ = recording_core(path)
    await play(sessions, ["ADD 2", {"add": 8}, DONE], seed=5, options={"start": 1})
    opened = await sessions.open(OpenArgs(ResetArgs()))
    for action in (b'{"add": 0}', b'{"add": 13}', b'{"add": 1}'):
        try:
            await sessions.step(opened.session_id, action)
        except EnvError as error:
            assert error.code in ("ILLEGAL_ACTION", "EXECUTION_ERROR")
    await sessions.close(opened.session_id)
    assert await replay_differences(path) == ["", ""]
    assert [step.error for step in read_episodes(path)[1].steps] == [
        "ILLEGAL_ACTION",
        "EXECUTION_ERROR",
        None,
    ]

    changed = path.read_text().replace('{"text":"ADD 2"', '{"text":"ADD 1"', 1)
    path.write_text(changed)
    assert await replay_differences(path) == ["step 1: expected reward 2.0, got 1.0", ""]


async def test_immediate_steps_are_recorded(tmp_path: Path) -> None:
    sessions, _ = recording_core(tmp_path / "r.jsonl")
    immediate = sessions.immediate_calls
    assert immediate is not None
    threaded, _ = recording_core(tmp_path / "t", factory=ThreadedCountingEnv)
    assert threaded.immediate_calls is None
    session_id = (await sessions.open(OpenArgs())).session_id
    immediate.reset_now(session_id, ResetArgs(seed=2))
    immediate.step_now(session_id, b'{"add":2}', 1)
    immediate.step_now(session_id, b'{"add":2}', 1)
    with pytest.raises(EnvError):
        immediate.step_now(session_id, b'{"add":0}', 2)
    immediate.step_now(session_id, b'{"add":7}', 2)
    (episode,) = read_episodes(tmp_path / "r.jsonl")
    assert (episode.seed, episode.end_reason) == (2, "truncated")
    assert [step.error for step in episode.steps] == [None, "ILLEGAL_ACTION", None]
    assert sessions.counts.num_steps == 3


@pytest.mark.parametrize("wire", WIRES)
async def test_a_recording_replays_over_every_wire_of_a_recording_server(
    tmp_path: Path, wire: str
) -> None:
    path = tmp_path / "r.jsonl"
    async with serve(record=path, first_seed=3) as server:
        client = await AsyncEnvClient.connect(server_address(server, wire))
        session, _ = await client.open()
        await session.step(text="ADD 1")
        assert (await session.step(DONE)).truncated
        for member, _ in await client.open_group(3, seed=9):
            await member.step(DONE)
        await client.close()
    episodes = read_episodes(path)
    assert [episode.seed for episode in episodes] == [3, 9, 9, 9]
    async with serve() as server:
        client = await AsyncEnvClient.connect(server_address(server, wire))
        replays = [await replay_episode(client, episode) for episode in episodes]
        await client.close()
    assert [replay.difference for replay in replays] == [""] * 4


@pytest.mark.parametrize("wire", WIRES)
async def test_an_episode_with_calls_of_tools_replays_and_a_change_is_named(
    tmp_path: Path, wire: str
) -> None:
    path = tmp_path / "r.jsonl"
    async with (
        serve(ToolEnv, record=path) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        session, _ = await client.open(seed=3)
        await session.call_tool("note", {"text": "a"})
        await session.step({"add": 1})
        with pytest.raises(ToolError):
            await session.call_tool("fail")
        await session.call_tool("note", {"text": "b"})
        await session.close()
    (episode,) = read_episodes(path)
    assert [step.tool for step in episode.steps] == ["note", None, "fail", "note"]
    other = episode.model_copy(deep=True)
    other.steps[3].arguments = {"text": "c"}
    failing = episode.model_copy(deep=True)
    failing.steps[2].tool = "note"
    async with (
        serve(ToolEnv) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        assert (await replay_episode(client, episode)).is_same
        changed = await replay_episode(client, other)
        assert changed.difference.startswith(
            "step 4: expected the recorded result of the tool 'note'"
        )
        succeeded = await replay_episode(client, failing)
        assert succeeded.difference.startswith("step 3: expected the error TOOL_ERROR")


@pytest.mark.slow
def test_stopped_server_writes_running_episodes(tmp_path: Path) -> None:
    async def leave_in_the_middle(address: str) -> None:
        async with await AsyncEnvClient.connect(address) as client:
            await client.open(seed=8)
            served.process.terminate()
            await asyncio.to_thread(served.process.wait, 60)

    with server_process(tmp_path, "--record", str(tmp_path / "kept")) as served:
        asyncio.run(leave_in_the_middle(served.grpc_address))
    (episode,) = read_episodes(tmp_path / "kept")
    assert episode.seed == 8
    assert episode.end_reason


async def test_client_writes_the_same_format(tmp_path: Path) -> None:
    path = tmp_path / "played.jsonl"
    async with open_client(environment_factory(TARGET, {})) as client:
        writer = EpisodeWriter(path, await client.describe(), TARGET, {})
        session, first = await client.open(seed=2)
        writer.begin_episode(2, first)
        for action in ({"add": 1}, DONE):
            writer.add_step(action, await session.step(action))
        writer.end_episode("truncated")
    assert await replay_differences(path) == [""]


def test_hash_includes_tensors_and_ignores_key_order() -> None:
    tensors = {"image": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    same = hash_observation({"b": 1, "a": None}, tensors)
    assert same == hash_observation({"a": None, "b": 1}, tensors)
    assert same != hash_observation({"a": None, "b": 1}, {})
    assert same != hash_observation({"a": None, "b": 1}, {"image": tensors["image"].T})


def test_missing_recording_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no recording"):
        read_episodes(tmp_path / "nothing.jsonl")
