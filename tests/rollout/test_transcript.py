"""Transcripts: the number of written episodes, their messages, and their size limits."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.proto.errors import UnavailableError
from ludus.proto.runs import Transcript
from ludus.trainer.core.types import GroupSpec, RolloutGroup, SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout import transcript
from ludus.trainer.rollout.transcript import count_transcripts
from tests.rollout.scripted_policy import LIMITS, make_player

SPEC = GroupSpec(6, "game", (11,) * 4)


async def play_episodes(
    client: AsyncEnvClient, chat: ChatTokenizer, answers: list[str], num_written: int = 1
) -> RolloutGroup:
    player, _ = make_player(client, chat, itertools.cycle(answers))
    return await player.play_group(SPEC, num_transcripts=num_written)


async def test_a_transcript_contains_messages_answers_actions_and_rewards(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    group = await play_episodes(client, chat, ["STAND"])
    [written] = group.transcripts
    rollout = group.rollouts[0]
    assert (written.group, written.episode, written.seed) == (6, 0, 11)
    assert (written.reward, written.terms) == (rollout.reward, {"environment": rollout.reward})
    assert written.status == "terminated"
    [turn] = written.turns
    assert [(message.role, message.text) for message in turn.shown] == [("user", "hard 11 vs 2")]
    assert (turn.answer, turn.action, turn.reward) == ("STAND", {"text": "STAND"}, rollout.reward)


async def test_the_requested_number_of_transcripts_is_written(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    assert len((await play_episodes(client, chat, ["STAND"], 3)).transcripts) == 3
    assert len((await play_episodes(client, chat, ["STAND"], 9)).transcripts) == 4
    assert (await play_episodes(client, chat, ["STAND"], 0)).transcripts == ()


async def test_an_answer_that_is_no_action_is_written_unchanged(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    [written] = (await play_episodes(client, chat, ["HIT me\u2028now"])).transcripts
    assert written.status == "invalid_action"
    assert written.turns[-1].reward == LIMITS.invalid_action_reward
    line = written.model_dump_json()
    assert "\n" not in line
    assert Transcript.model_validate_json(line) == written


async def test_an_episode_that_failed_says_why_and_what_was_said_until_then(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    player, _ = make_player(client, chat, itertools.cycle(["HIT"]))
    complete_first = player.runner.generate

    async def generate(prompt_ids: list[int], sampling: Sampling, seed: int) -> SampledCompletion:
        if "HIT" in chat.decode(prompt_ids):
            raise RuntimeError("the engine has no memory left")
        return await complete_first(prompt_ids, sampling, seed)

    failing = player.with_fields(generate=generate)
    group = await failing.play_group(SPEC, num_transcripts=4)
    assert {written.status for written in group.transcripts} == {"failed"}
    for written in group.transcripts:
        assert written.failure.startswith("RuntimeError: the engine has no memory left (in ")
        assert [turn.answer for turn in written.turns] == ["HIT"]
        assert Transcript.model_validate_json(written.model_dump_json()) == written


async def test_an_episode_that_never_began_is_written_with_its_reason_alone(
    client: AsyncEnvClient, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise UnavailableError("the server is away")

    monkeypatch.setattr(client, "open", refuse)
    [written] = (await play_episodes(client, chat, ["STAND"])).transcripts
    assert (written.status, written.turns) == ("lost", ())
    assert "the server is away" in written.failure


async def test_an_episode_that_went_well_has_no_reason(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    [written] = (await play_episodes(client, chat, ["STAND"])).transcripts
    assert written.failure == ""


async def test_long_texts_are_cut_and_late_turns_counted(
    client: AsyncEnvClient, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "MAX_TEXT_CHARACTERS", 10)
    monkeypatch.setattr(transcript, "MAX_TRANSCRIPT_CHARACTERS", 60)
    [written] = (await play_episodes(client, chat, ["HIT"])).transcripts
    num_turns = len(written.turns) + written.num_turns_left_out
    assert num_turns > len(written.turns) >= 1
    assert all(len(message.text) < 50 for turn in written.turns for message in turn.shown)
    assert "more characters)" in written.turns[0].shown[0].text
    json.loads(written.model_dump_json())


@pytest.mark.parametrize(("per_step", "groups_per_step"), [(4, 16), (16, 16), (40, 16), (0, 16)])
def test_each_step_has_the_configured_number_of_transcripts(
    per_step: int, groups_per_step: int
) -> None:
    for block in range(20):
        indices = range(block * groups_per_step, (block + 1) * groups_per_step)
        assert sum(count_transcripts(i, per_step, groups_per_step, 7) for i in indices) == per_step


def test_environments_that_take_turns_are_all_written_down() -> None:
    written = Counter(index % 4 for index in range(1600) if count_transcripts(index, 4, 16, 7))
    assert written.total() == 400
    assert min(written.values()) > 60
