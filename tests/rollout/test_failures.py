"""Tests of failures in episodes: void episodes, reported reasons and closed sessions."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.env.types import StepResult, TextView
from ludus.proto.errors import ConfigError
from ludus.trainer.core.types import GroupSpec, RolloutStatus, SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.environment_adapter import (
    ImportedRenderer,
    RendererError,
    ServerRenderer,
)
from tests.rollout.fragile_env import (
    HUGE_REWARD_SEED,
    LARGE_RETURN_SEED,
    NAN_REWARD_SEED,
    RENDER_FAILURE_SEED,
    RESET_FAILURE_SEED,
    UNKNOWN_ROLE_SEED,
    FragileEnv,
    play_and_divide_by_zero,
)
from tests.rollout.scripted_policy import LIMITS, make_player

FAILED = RolloutStatus.FAILED
VALID_COMPLETIONS = ("ADD 2", "ADD 2", "ADD 2", "ADD 2", "ADD 2")
FRAGILE_MODULE = "tests.rollout.fragile_env"


@pytest_asyncio.fixture
async def fragile_server() -> AsyncIterator[EnvServer]:
    async with EnvServer(FragileEnv, ServerOptions(port=0)) as env_server:
        yield env_server


@pytest_asyncio.fixture
async def env_client(fragile_server: EnvServer) -> AsyncIterator[AsyncEnvClient]:
    async with await AsyncEnvClient.connect(fragile_server.grpc_address) as client:
        yield client


@pytest.mark.parametrize(
    ("seed", "completions", "reason"),
    [
        (RESET_FAILURE_SEED, VALID_COMPLETIONS, "level 666"),
        (RENDER_FAILURE_SEED, VALID_COMPLETIONS, "no picture"),
        (UNKNOWN_ROLE_SEED, VALID_COMPLETIONS, "must have one of the roles system, user"),
        (NAN_REWARD_SEED, VALID_COMPLETIONS, "reward must be a finite number"),
        (HUGE_REWARD_SEED, VALID_COMPLETIONS, "reward must be a finite number between -1e+12 and"),
        (LARGE_RETURN_SEED, VALID_COMPLETIONS, "their sum, the return, must be a finite number"),
        (2, ("ADD 1", "ADD 13"), "unlucky"),
        (2, ("ADD 1", "ADD 2"), "no picture"),
        (2, ("ADD one",), "invalid literal for int"),
    ],
    ids=[
        *("reset", "first render", "role", "nan", "huge reward", "huge return", "step", "render"),
        "parse",
    ],
)
async def test_environment_error_voids_the_episode_and_closes_the_session(
    fragile_server: EnvServer,
    env_client: AsyncEnvClient,
    chat: ChatTokenizer,
    seed: int,
    completions: tuple[str, ...],
    reason: str,
) -> None:
    player, _ = make_player(env_client, chat, iter(completions))
    rollout = await player.play_episode(seed)
    assert (rollout.status, rollout.reward, rollout.episode_return) == (FAILED, None, None)
    assert reason in rollout.failure
    assert fragile_server.core.load.num_sessions == 0


async def test_failed_episodes_do_not_affect_the_rest_of_the_group(
    env_client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    player, _ = make_player(env_client, chat, itertools.repeat("ADD 2"))
    spec = GroupSpec(0, "game", (1, RESET_FAILURE_SEED, RENDER_FAILURE_SEED, 4))
    group = await player.play_group(spec)
    assert group.rewards == [10.0, None, None, 10.0]
    assert [bool(rollout.failure) for rollout in group.rollouts] == [False, True, True, False]


@pytest.mark.slow
async def test_failed_group_open_fails_all_episodes(
    env_client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    player, _ = make_player(env_client, chat, itertools.repeat("ADD 2"), max_sessions=256)
    spec = GroupSpec(0, "game", (RESET_FAILURE_SEED,) * 3)
    group = await player.play_group(spec)
    assert [(r.status, "level 666" in r.failure) for r in group.rollouts] == [(FAILED, True)] * 3


@pytest.mark.parametrize(
    ("render", "answers", "reason"),
    [
        (
            "render",
            ("ADD 1", "ADD 1"),
            r"environment\.render = .* the total is above 1 \(in render",
        ),
        ("render", ("ADD one",), r"environment\.parse = .* ValueError.*raise ActionParseError"),
        ("render_with_unknown_role", (), r"one of the roles .* returned .*x1b\[2J"),
        ("render_as_string", (), r"must return a list of messages .* returned 'Total\?'"),
    ],
)
async def test_custom_renderer_error_names_the_function(
    env_client: AsyncEnvClient, chat: ChatTokenizer, render: str, answers: tuple[str], reason: str
) -> None:
    renderer = ImportedRenderer(f"{FRAGILE_MODULE}:{render}", f"{FRAGILE_MODULE}:parse", "game")
    player, _ = make_player(env_client, chat, iter(answers))
    rollout = await player.replace_fields(renderer=renderer).play_episode(2)
    assert rollout.status is FAILED
    assert re.search(reason, rollout.failure)


async def test_message_of_a_server_with_an_unknown_role_is_refused() -> None:
    result = StepResult({}, text=TextView([{"role": "\x1b[2J", "content": "a"}]))
    with pytest.raises(
        RendererError, match=r"must return a list of messages .* one of the roles system"
    ):
        ServerRenderer("game").render_messages(result, is_first=True)


async def test_error_in_a_task_of_a_rollout_function_is_reported(
    env_client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    player, _ = make_player(env_client, chat, iter(["ADD 1"]), function=play_and_divide_by_zero)
    rollout = await player.play_episode(2)
    assert rollout.status is FAILED
    assert rollout.failure.startswith("ZeroDivisionError: division by zero (in divide, fragile_env")
    assert rollout.num_tokens_sampled > 0, "sampled tokens of a void episode were not counted"


async def test_failed_engine_request_voids_the_episode(
    env_client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    player, policy = make_player(env_client, chat, itertools.repeat("ADD 2"))

    async def fail_second_request(
        prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        if len(policy.prompts) == 1:
            raise RuntimeError("a prompt of too many tokens")
        return await policy(prompt_ids, sampling, seed)

    rollout = await player.replace_fields(generate=fail_second_request).play_episode(2)
    assert rollout.status is FAILED
    assert "a prompt of too many tokens" in rollout.failure


async def test_chat_template_error_voids_the_episode(
    env_client: AsyncEnvClient, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_template_error(*_: object, **__: object) -> list[int]:
        raise ConfigError("the chat template refuses roles user, user")

    monkeypatch.setattr(chat, "encode_next_prompt", raise_template_error)
    player, _ = make_player(env_client, chat, itertools.repeat("ADD 2"))
    rollout = await player.play_episode(2)
    assert rollout.status is FAILED
    assert "refuses roles user, user" in rollout.failure


async def test_too_long_first_prompt_is_reported_with_length_and_limit(
    env_client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    limits = LIMITS.model_copy(update={"max_tokens": 20})
    player, policy = make_player(env_client, chat, iter([]), limits)
    rollout = await player.play_episode(2)
    assert (rollout.status, rollout.reward, policy.prompts) == (FAILED, None, [])
    assert re.search(r"prompt of \d+ tokens .* rollout\.max_tokens = 20", rollout.failure)


@pytest.mark.slow
async def test_configuration_error_is_raised_and_closes_the_sessions(
    fragile_server: EnvServer, env_client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    async def raise_config_error(*_: object) -> SampledCompletion:
        raise ConfigError("generator.kind = 'none'")

    player, _ = make_player(env_client, chat, iter([]))
    with pytest.raises(ConfigError, match="kind = 'none'"):
        spec = GroupSpec(0, "game", (1, 2))
        await player.replace_fields(generate=raise_config_error).play_group(spec)
    assert fragile_server.core.load.num_sessions == 0


async def test_cancellation_is_not_a_failure(
    env_client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    async def raise_cancelled(*_: object) -> SampledCompletion:
        raise asyncio.CancelledError

    player, _ = make_player(env_client, chat, iter([]))
    with pytest.raises(asyncio.CancelledError):
        await player.replace_fields(generate=raise_cancelled).play_episode(2)
