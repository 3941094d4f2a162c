"""The warm start and the canary tolerate some failed episodes, but not if all episodes fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ludus.env import Transition
from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError, EpisodesFailedError, ExecutionError
from ludus.trainer.driver.checks import check_first_prompts, check_first_texts
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.rollout.adapters.environment_adapter import make_renderer
from ludus.trainer.setup.environments import ConnectedEnvironment
from ludus.trainer.setup.first_prompts import make_canary_prompts
from ludus.trainer.setup.tiny_model import prepare_model
from tests.env.counting_env import CountObservation
from tests.rollout.fragile_env import FragileEnv, LongEnv, SometimesLongEnv

TINY_MODEL = {
    "kind": "tiny",
    "num_layers": 1,
    "width": 32,
    "num_heads": 1,
    "intermediate": 32,
    "vocab_size": 300,
    "warm_start_games": 24,
}


class FirstSeedFailingEnv(FragileEnv):
    """An environment that fails on seed 0."""

    def reset(self, *, seed: int | None = None, **_: Any) -> Transition[CountObservation]:
        if seed == 0:
            raise RuntimeError("seed 0 is not supported")
        return super().reset(seed=seed)


class BrokenResetEnv(FragileEnv):
    """An environment that fails on every seed."""

    def reset(self, *, seed: int | None = None, **_: Any) -> Transition[CountObservation]:
        raise RuntimeError("the licence has run out")


def make_run(**rollout: Any) -> LanguageModelRun:
    return LanguageModelRun.model_validate(
        {"environments": {"fragile": {}}, "model": TINY_MODEL, "rollout": rollout}
    )


@asynccontextmanager
async def connect_environment(
    run: LanguageModelRun, factory: type[FragileEnv], max_sessions: int = 256
) -> AsyncIterator[dict[str, ConnectedEnvironment]]:
    """Serve the run's only environment; yield it with a connected client."""
    options = ServerOptions(port=0, max_sessions=max_sessions)
    async with (
        EnvServer(factory, options) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        config = run.environments["fragile"]
        description = await client.describe()
        yield {
            "fragile": ConnectedEnvironment(
                config, server.grpc_address, client, description, make_renderer(config, "game")
            )
        }
        assert server.core.load.num_sessions == 0


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(["Count to the end. Total 0.", "ADD 1"] * 5, 320))


@pytest.mark.slow
async def test_failed_warm_start_episodes_are_excluded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run()
    async with connect_environment(run, FragileEnv, max_sessions=4) as environments:
        model = await prepare_model(run, environments, tmp_path / "model")
    assert (Path(model) / "config.json").is_file()
    assert "of 24 episodes of the warm start failed" in caplog.text
    assert "no picture" in caplog.text


@pytest.mark.slow
async def test_warm_start_without_successful_episode_is_an_error(
    tmp_path: Path,
) -> None:
    run = make_run()
    async with connect_environment(run, BrokenResetEnv) as environments:
        with pytest.raises(EpisodesFailedError, match=r"24 of 24 episodes.*licence has run out"):
            await prepare_model(run, environments, tmp_path / "model")


async def test_canary_uses_the_first_episode_that_opens(chat: ChatTokenizer) -> None:
    run = make_run()
    async with connect_environment(run, FirstSeedFailingEnv) as environments:
        (prompt, *_) = await make_canary_prompts(environments["fragile"], chat, 200)
    assert "Total 0." in chat.decode(prompt.prompt_ids)
    async with connect_environment(run, BrokenResetEnv) as environments:
        with pytest.raises(ExecutionError, match="licence has run out"):
            await make_canary_prompts(environments["fragile"], chat, 200)


async def test_long_first_prompt_is_refused(
    chat: ChatTokenizer,
) -> None:
    long_context_run, short_context_run = make_run(max_tokens=200), make_run(max_tokens=24)
    async with connect_environment(long_context_run, FirstSeedFailingEnv) as environments:
        await check_first_prompts(long_context_run, environments, chat)
        with pytest.raises(
            ConfigError, match=r"'fragile'.*max_tokens = 24, but the shortest prompt has \d+ tokens"
        ):
            await check_first_prompts(short_context_run, environments, chat)


async def test_first_prompts_of_any_length_are_refused_without_encoding(tmp_path: Path) -> None:
    run = make_run(max_tokens=200)
    async with connect_environment(run, LongEnv) as environments:
        with pytest.raises(
            ConfigError, match=r"max_tokens = 200, but the shortest prompt has 1000008 characters"
        ):
            await check_first_texts(run, environments)
        with pytest.raises(EpisodesFailedError, match=r"1000\d+ characters, which exceed model"):
            await prepare_model(run, environments, tmp_path / "model")


async def test_canary_of_a_long_first_prompt_is_short(chat: ChatTokenizer) -> None:
    run = make_run(max_tokens=200)
    async with connect_environment(run, SometimesLongEnv) as environments:
        await check_first_texts(run, environments)
        await check_first_prompts(run, environments, chat)
        canary = await make_canary_prompts(environments["fragile"], chat, 200)
    assert {len(prompt.prompt_ids) < 1100 for prompt in canary} == {True}
