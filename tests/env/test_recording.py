"""Servers record episodes, and recorded episodes can be replayed."""

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
from tests.env.served import WIRES, serve, server_address, start_server_process
from tests.env.tool_env import ToolEnv

TARGET = "tests.env.counting_env:CountingEnv"
FINAL_ACTION = {"add": 7}


def make_recording_core(
    path: Path, *, options: ServerOptions | None = None, factory=CountingEnv, **limits
) -> tuple[SessionCore, EpisodeRecorder]:
    core = SessionCore(make_local_host(factory), options)
    recorder = EpisodeRecorder(path, core.description, environment_factory(TARGET, {}), **limits)
    core.record(recorder)
    return core, recorder


def read_episodes(path: Path):
    return list(read_recording(path))


async def play_episode(core: SessionCore, actions: list, **args) -> str:
    session = await core.open(OpenArgs(ResetArgs(**args), close_when_done=True))
    for step_index, action in enumerate(actions, 1):
        encoded_action = action if isinstance(action, str) else json.dumps(action).encode()
        await core.step(session.session_id, encoded_action, step_index)
    return session.session_id


async def test_finished_episode_is_written_with_all_replay_data(
    tmp_path: Path,
) -> None:
    core, recorder = make_recording_core(tmp_path / "r.jsonl")
    session_id = await play_episode(
        core, ["ADD 2", {"add": 3}, FINAL_ACTION], seed=5, options={"start": 4}, episode_id="mine"
    )
    (episode,) = read_episodes(tmp_path / "r.jsonl")
    assert (episode.seed, episode.episode_id) == (5, "mine")
    assert episode.reset_options == {"start": 4}
    assert episode.environment.target == TARGET
    assert (episode.steps[0].text, episode.steps[1].action) == ("ADD 2", {"add": 3})
    last_result = episode.steps[-1].result
    assert (last_result.reward, last_result.terminated, last_result.truncated) == (7.0, False, True)
    assert (episode.end_reason, episode.episode_return) == ("truncated", 12.0)
    assert episode.started_at <= episode.ended_at
    assert session_id not in (tmp_path / "r.jsonl").read_text()
    assert recorder.num_running == 0


async def test_reset_without_a_seed_records_a_seed(tmp_path: Path) -> None:
    core, _ = make_recording_core(tmp_path / "r.jsonl", options=ServerOptions(first_seed=11))
    for _ in range(2):
        await play_episode(core, [FINAL_ACTION])
    unseeded_core, _ = make_recording_core(tmp_path / "unseeded.jsonl")
    for _ in range(2):
        await play_episode(unseeded_core, [FINAL_ACTION])
    assert [episode.seed for episode in read_episodes(tmp_path / "r.jsonl")] == [11, 12]
    first_episode, second_episode = read_episodes(tmp_path / "unseeded.jsonl")
    assert first_episode.seed != second_episode.seed
    assert first_episode.first.observation_hash != second_episode.first.observation_hash


async def test_a_repeated_step_is_written_once(tmp_path: Path) -> None:
    core, _ = make_recording_core(tmp_path / "r.jsonl")
    session = await core.open(OpenArgs(ResetArgs(seed=1)))
    for step_index in (1, 1, 2):
        await core.step(session.session_id, b'{"add": 1}', step_index)
    await core.close(session.session_id)
    (episode,) = read_episodes(tmp_path / "r.jsonl")
    assert len(episode.steps) == 2


@pytest.mark.parametrize("factory", ["CountingEnv", "ThreadedCountingEnv"])
async def test_episode_is_written_for_every_end_reason(tmp_path: Path, factory) -> None:
    factory = environment_factory(f"tests.env.counting_env:{factory}", {})
    options = ServerOptions(idle_timeout_s=0.05)
    core, recorder = make_recording_core(tmp_path / "r.jsonl", options=options, factory=factory)
    connection = Connection()
    await core.open(OpenArgs(ResetArgs(seed=1)), connection)
    core.release(connection)
    session = await core.open(OpenArgs(ResetArgs(seed=2)))
    await core.reset(session.session_id, ResetArgs(seed=3))
    await core.close(session.session_id)
    await core.open(OpenArgs(ResetArgs(seed=4)))
    sweep_task = asyncio.create_task(core.close_idle_forever())
    async with asyncio.timeout(60):
        while recorder.num_running:
            await asyncio.sleep(0.01)
    sweep_task.cancel()
    await core.open(OpenArgs(ResetArgs(seed=5)))
    recorder.finish()
    reasons = {episode.seed: episode.end_reason for episode in read_episodes(tmp_path / "r.jsonl")}
    assert reasons[1].startswith("the connection")
    assert (reasons[2], reasons[3]) == ("reset", "it was closed")
    assert "idle" in reasons[4]
    assert reasons[5] == "the server stopped"


async def test_concurrent_sessions_are_recorded_separately(tmp_path: Path) -> None:
    core, _ = make_recording_core(
        tmp_path / "r.jsonl",
        factory=environment_factory("tests.env.counting_env:ThreadedCountingEnv", {}),
    )
    await asyncio.gather(
        *(play_episode(core, [{"add": seed}, FINAL_ACTION], seed=seed) for seed in range(20, 40))
    )
    episodes = read_episodes(tmp_path / "r.jsonl")
    assert {episode.seed for episode in episodes} == set(range(20, 40))
    for episode in episodes:
        assert episode.steps[0].action == {"add": episode.seed}
        assert len(episode.steps) == 2


async def test_full_file_is_renamed_and_no_episode_is_lost(tmp_path: Path) -> None:
    core, _ = make_recording_core(tmp_path / "r.jsonl", max_file_bytes=2000)
    for seed in range(12):
        await play_episode(core, [FINAL_ACTION], seed=seed)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files[:2] == ["r.0001.jsonl", "r.0002.jsonl"] and files[-1] == "r.jsonl"
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert sorted(episode.seed for episode in read_episodes(tmp_path)) == list(range(12))


async def test_full_file_that_was_closed_is_renamed(tmp_path: Path) -> None:
    for seed in range(12):  # `ludus env play` closes the file after each episode
        core, recorder = make_recording_core(tmp_path / "r.jsonl", max_file_bytes=2000)
        await play_episode(core, [FINAL_ACTION], seed=seed)
        recorder.finish()
    assert len(list(tmp_path.iterdir())) > 1
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert sorted(episode.seed for episode in read_episodes(tmp_path)) == list(range(12))


async def test_recording_of_endless_episode_is_limited(tmp_path: Path) -> None:
    core, recorder = make_recording_core(tmp_path / "r.jsonl", max_episode_bytes=600)
    session = await core.open(OpenArgs(ResetArgs(seed=1)))
    for _ in range(200):
        with pytest.raises(ActionError):
            await core.step(session.session_id, "nonsense")
    recorder.finish()
    (episode,) = read_episodes(tmp_path / "r.jsonl")
    assert 0 < len(episode.steps) < 20
    assert "too long" in episode.end_reason


async def test_memory_of_running_episodes_is_limited(tmp_path: Path) -> None:
    core, recorder = make_recording_core(tmp_path / "r.jsonl", max_running_bytes=4000)
    short_session = await core.open(OpenArgs(ResetArgs(seed=1)))
    long_session = await core.open(OpenArgs(ResetArgs(seed=2)))
    await core.step(short_session.session_id, b'{"add": 1}')
    for _ in range(200):
        with pytest.raises(ActionError):
            await core.step(long_session.session_id, "nonsense")
    assert recorder.num_running == 1
    await core.close(long_session.session_id)
    recorder.finish()
    cut_episode, kept_episode = read_episodes(tmp_path / "r.jsonl")
    assert (cut_episode.seed, cut_episode.end_reason) == (
        2,
        "unfinished: the memory limit of recordings was reached",
    )
    assert 0 < len(cut_episode.steps) < 100
    assert (kept_episode.seed, len(kept_episode.steps), kept_episode.end_reason) == (
        1,
        1,
        "the server stopped",
    )


async def test_reset_options_count_towards_the_limit(tmp_path: Path) -> None:
    core, recorder = make_recording_core(tmp_path / "r.jsonl", max_running_bytes=4000)
    for seed in (1, 2, 3):
        await core.open(OpenArgs(ResetArgs(seed=seed, options={"note": "x" * 1500})))
    assert recorder.num_running == 2


async def test_unwritable_folder_loses_recordings_but_no_sessions(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    core, recorder = make_recording_core(tmp_path / "file" / "r.jsonl")
    await play_episode(core, [FINAL_ACTION], seed=1)
    assert recorder.file.num_lost == 1


async def test_incomplete_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    core, recorder = make_recording_core(path)
    await play_episode(core, [FINAL_ACTION], seed=1)
    recorder.finish()
    text = path.read_bytes()
    path.write_bytes(text + b'{"format": 1, "envi')
    assert [episode.seed for episode in read_episodes(path)] == [1]
    await play_episode(make_recording_core(path)[0], [FINAL_ACTION], seed=2)
    assert [episode.seed for episode in read_episodes(path)] == [1, 2]


async def test_unknown_format_error_contains_the_line_number(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    await play_episode(make_recording_core(path)[0], [FINAL_ACTION], seed=1)
    path.write_text(path.read_text() + '{"format": 2}\n')
    with pytest.raises(ConfigError, match=f"line 2 of {path}"):
        read_episodes(path)


async def find_replay_differences(path: Path) -> list[str]:
    episodes = read_episodes(path)
    async with open_client(make_recorded_factory(episodes[0])) as client:
        return [(await replay_episode(client, episode)).difference for episode in episodes]


async def test_replay_matches_the_recording_and_reports_changes(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r.jsonl"
    core, _ = make_recording_core(path)
    await play_episode(core, ["ADD 2", {"add": 8}, FINAL_ACTION], seed=5, options={"start": 1})
    session = await core.open(OpenArgs(ResetArgs()))
    for action in (b'{"add": 0}', b'{"add": 13}', b'{"add": 1}'):
        try:
            await core.step(session.session_id, action)
        except EnvError as error:
            assert error.code in ("ILLEGAL_ACTION", "EXECUTION_ERROR")
    await core.close(session.session_id)
    assert await find_replay_differences(path) == ["", ""]
    assert [step.error for step in read_episodes(path)[1].steps] == [
        "ILLEGAL_ACTION",
        "EXECUTION_ERROR",
        None,
    ]

    changed_text = path.read_text().replace('{"text":"ADD 2"', '{"text":"ADD 1"', 1)
    path.write_text(changed_text)
    assert await find_replay_differences(path) == ["step 1: expected reward 2.0, got 1.0", ""]


async def test_steps_of_immediate_calls_are_recorded(tmp_path: Path) -> None:
    core, _ = make_recording_core(tmp_path / "r.jsonl")
    immediate_calls = core.immediate_calls
    assert immediate_calls is not None
    threaded_core, _ = make_recording_core(tmp_path / "t", factory=ThreadedCountingEnv)
    assert threaded_core.immediate_calls is None
    session_id = (await core.open(OpenArgs())).session_id
    immediate_calls.reset_now(session_id, ResetArgs(seed=2))
    immediate_calls.step_now(session_id, b'{"add":2}', 1)
    immediate_calls.step_now(session_id, b'{"add":2}', 1)
    with pytest.raises(EnvError):
        immediate_calls.step_now(session_id, b'{"add":0}', 2)
    immediate_calls.step_now(session_id, b'{"add":7}', 2)
    (episode,) = read_episodes(tmp_path / "r.jsonl")
    assert (episode.seed, episode.end_reason) == (2, "truncated")
    assert [step.error for step in episode.steps] == [None, "ILLEGAL_ACTION", None]
    assert core.counts.num_steps == 3


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
async def test_replay_matches_the_recording_over_every_wire(tmp_path: Path, wire: str) -> None:
    path = tmp_path / "r.jsonl"
    async with serve(record=path, first_seed=3) as server:
        client = await AsyncEnvClient.connect(server_address(server, wire))
        session, _ = await client.open()
        await session.step(text="ADD 1")
        assert (await session.step(FINAL_ACTION)).truncated
        for group_session, _ in await client.open_group(3, seed=9):
            await group_session.step(FINAL_ACTION)
        await client.close()
    episodes = read_episodes(path)
    assert [episode.seed for episode in episodes] == [3, 9, 9, 9]
    async with serve() as server:
        client = await AsyncEnvClient.connect(server_address(server, wire))
        replays = [await replay_episode(client, episode) for episode in episodes]
        await client.close()
    assert [replay.difference for replay in replays] == [""] * 4


@pytest.mark.parametrize("wire", WIRES)
async def test_replay_repeats_tool_calls_and_reports_changes(tmp_path: Path, wire: str) -> None:
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
    changed_episode = episode.model_copy(deep=True)
    changed_episode.steps[3].arguments = {"text": "c"}
    tool_change_episode = episode.model_copy(deep=True)
    tool_change_episode.steps[2].tool = "note"
    async with (
        serve(ToolEnv) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        assert (await replay_episode(client, episode)).is_same
        changed_replay = await replay_episode(client, changed_episode)
        assert changed_replay.difference.startswith(
            "step 4: expected the recorded result of the tool 'note'"
        )
        tool_change_replay = await replay_episode(client, tool_change_episode)
        assert tool_change_replay.difference.startswith("step 3: expected the error TOOL_ERROR")


@pytest.mark.slow
def test_stopped_server_writes_running_episodes(tmp_path: Path) -> None:
    async def stop_server_during_episode(address: str) -> None:
        async with await AsyncEnvClient.connect(address) as client:
            await client.open(seed=8)
            server.process.terminate()
            await asyncio.to_thread(server.process.wait, 60)

    with start_server_process(tmp_path, "--record", str(tmp_path / "kept")) as server:
        asyncio.run(stop_server_during_episode(server.grpc_address))
    (episode,) = read_episodes(tmp_path / "kept")
    assert episode.seed == 8
    assert episode.end_reason


async def test_client_recording_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "played.jsonl"
    async with open_client(environment_factory(TARGET, {})) as client:
        writer = EpisodeWriter(path, await client.describe(), TARGET, {})
        session, first_result = await client.open(seed=2)
        writer.begin_episode(2, first_result)
        for action in ({"add": 1}, FINAL_ACTION):
            writer.add_step(action, await session.step(action))
        writer.end_episode("truncated")
    assert await find_replay_differences(path) == [""]


def test_hash_includes_tensors_and_ignores_key_order() -> None:
    tensors = {"image": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    expected_hash = hash_observation({"b": 1, "a": None}, tensors)
    assert expected_hash == hash_observation({"a": None, "b": 1}, tensors)
    assert expected_hash != hash_observation({"a": None, "b": 1}, {})
    assert expected_hash != hash_observation({"a": None, "b": 1}, {"image": tensors["image"].T})


def test_missing_recording_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no recording"):
        read_episodes(tmp_path / "nothing.jsonl")
