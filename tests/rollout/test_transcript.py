"""Tests of transcripts: which episodes are recorded, their contents, and their size limits."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest

from ludus.env import Message
from ludus.env.client import AsyncEnvClient
from ludus.proto.errors import UnavailableError
from ludus.proto.runs import Transcript
from ludus.trainer.core.types import GroupSpec, RolloutGroup, SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout import transcript
from ludus.trainer.rollout.transcript import count_transcripts
from tests.rollout.chat_templates import (
    CHANNELS,
    FAMILIES,
    QWEN25,
    XML_CALLS,
    Family,
    make_family_tokenizer,
)
from tests.rollout.scripted_policy import LIMITS, make_player
from tests.rollout.test_chat_templates import ADD_TOOL

SPEC = GroupSpec(6, "game", (11,) * 4)


async def play_episodes(
    client: AsyncEnvClient, chat: ChatTokenizer, completions: list[str], num_transcripts: int = 1
) -> RolloutGroup:
    player, _ = make_player(client, chat, itertools.cycle(completions))
    return await player.play_group(SPEC, num_transcripts=num_transcripts)


@pytest.mark.slow
async def test_transcript_contains_messages_completions_actions_and_rewards(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    group = await play_episodes(client, chat, ["STAND"])
    [record] = group.transcripts
    rollout = group.rollouts[0]
    assert (record.group, record.episode, record.seed) == (6, 0, 11)
    assert (record.reward, record.terms) == (rollout.reward, {"environment": rollout.reward})
    assert (record.status, record.success) == ("terminated", rollout.reward == 1)
    [turn] = record.turns
    assert [(message.role, message.text) for message in turn.shown] == [("user", "hard 11 vs 2")]
    assert (turn.answer, turn.action, turn.reward) == ("STAND", {"text": "STAND"}, rollout.reward)


async def test_first_turn_shows_the_system_message_as_the_template_writes_it(
    client: AsyncEnvClient,
) -> None:
    chat = ChatTokenizer(make_family_tokenizer(QWEN25))
    [record] = (await play_episodes(client, chat, ["HIT", "STAND"])).transcripts
    shown = [[message.role for message in turn.shown] for turn in record.turns]
    assert shown[0] == ["system", "user"]
    assert record.turns[0].shown[0].text == "You are a careful player."
    assert all(roles == ["user"] for roles in shown[1:])


@pytest.mark.parametrize("family", [*FAMILIES, CHANNELS, XML_CALLS], ids=str)
@pytest.mark.parametrize("system", [(), ({"role": "system", "content": "Be brief."},)])
def test_system_text_is_what_the_prompt_contains_before_the_user(
    family: Family, system: tuple[Message, ...]
) -> None:
    chat = ChatTokenizer(make_family_tokenizer(family))
    messages: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "Which?"},
    ]
    for tools in ([], [ADD_TOOL]):
        system_text = chat.read_system_text([*system, *messages], tools)
        assert ("Be brief." in system_text) == bool(system)
        assert ('"name": "add_numbers"' in system_text) == bool(tools)
        assert not system_text.startswith("system")
        assert not system_text.endswith(("user", "User:", "[INST]"))


async def test_number_of_transcripts_is_the_requested_number_up_to_the_group_size(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    assert len((await play_episodes(client, chat, ["STAND"], 3)).transcripts) == 3
    assert len((await play_episodes(client, chat, ["STAND"], 9)).transcripts) == 4
    assert (await play_episodes(client, chat, ["STAND"], 0)).transcripts == ()


async def test_transcript_with_an_invalid_action_is_one_json_line(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    [record] = (await play_episodes(client, chat, ["HIT me\u2028now"])).transcripts
    assert record.status == "invalid_action"
    assert record.turns[-1].reward == LIMITS.known_invalid_action_reward
    json_line = record.model_dump_json()
    assert "\n" not in json_line
    assert Transcript.model_validate_json(json_line) == record


@pytest.mark.slow
async def test_transcript_of_a_failed_episode_contains_the_reason_and_turns(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    player, _ = make_player(client, chat, itertools.cycle(["HIT"]))
    original_generate = player.runner.generate

    async def generate(prompt_ids: list[int], sampling: Sampling, seed: int) -> SampledCompletion:
        if "HIT" in chat.decode(prompt_ids):
            raise RuntimeError("the engine is out of memory")
        return await original_generate(prompt_ids, sampling, seed)

    failing_player = player.replace_fields(generate=generate)
    group = await failing_player.play_group(SPEC, num_transcripts=4)
    assert {record.status for record in group.transcripts} == {"failed"}
    for record in group.transcripts:
        assert record.failure.startswith("RuntimeError: the engine is out of memory (in ")
        assert [turn.answer for turn in record.turns] == ["HIT"]
        assert Transcript.model_validate_json(record.model_dump_json()) == record


async def test_transcript_of_an_episode_without_a_session_has_only_the_reason(
    client: AsyncEnvClient, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raise_unavailable(*_: Any, **__: Any) -> None:
        raise UnavailableError("the server is unavailable")

    monkeypatch.setattr(client, "open", raise_unavailable)
    [record] = (await play_episodes(client, chat, ["STAND"])).transcripts
    assert (record.status, record.turns) == ("lost", ())
    assert "the server is unavailable" in record.failure


async def test_transcript_without_failure_has_no_reason(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    [record] = (await play_episodes(client, chat, ["STAND"])).transcripts
    assert record.failure == ""


async def test_long_texts_are_truncated_and_omitted_turns_are_counted(
    client: AsyncEnvClient, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "MAX_TEXT_CHARACTERS", 10)
    monkeypatch.setattr(transcript, "MAX_TRANSCRIPT_CHARACTERS", 60)
    [record] = (await play_episodes(client, chat, ["HIT"])).transcripts
    num_turns = len(record.turns) + record.num_turns_left_out
    assert num_turns > len(record.turns) >= 1
    assert all(len(message.text) < 50 for turn in record.turns for message in turn.shown)
    assert "more characters)" in record.turns[0].shown[0].text
    json.loads(record.model_dump_json())


@pytest.mark.parametrize(
    ("transcripts_per_step", "groups_per_step"), [(4, 16), (16, 16), (40, 16), (0, 16)]
)
def test_each_step_has_the_configured_number_of_transcripts(
    transcripts_per_step: int, groups_per_step: int
) -> None:
    for step in range(20):
        indices = range(step * groups_per_step, (step + 1) * groups_per_step)
        num_transcripts = sum(
            count_transcripts(i, transcripts_per_step, groups_per_step, 7) for i in indices
        )
        assert num_transcripts == transcripts_per_step


def test_alternating_environments_all_get_transcripts() -> None:
    counts = Counter(index % 4 for index in range(1600) if count_transcripts(index, 4, 16, 7))
    assert counts.total() == 400
    assert min(counts.values()) > 60
