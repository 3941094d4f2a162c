"""A renderer that returns no messages ends a start, and voids an episode, in one sentence."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import (
    LanguageModelRun,
    LocalEnvironment,
    load_run_config,
    require_language_model,
)
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Resume
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.driver.checks import check_start
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.environment_adapter import make_renderer
from ludus.trainer.setup.environments import ConnectedEnvironment
from ludus.trainer.setup.first_prompts import fetch_first_opening
from ludus.trainer.setup.tiny_model import prepare_model
from tests.rollout.fragile_env import WRONG_MESSAGES, WrongRendererEnv
from tests.rollout.scripted_policy import make_player

PACKAGE = "tests.rollout.fragile_env:WrongRendererEnv"
RULE = "the text_renderer of environment 'game' must return a list of messages"


def make_run(folder: Path, key: str, *more_overrides: str) -> LanguageModelRun:
    """Return a run with the wrong renderer of this key."""
    overrides = [
        f"output_dir={folder}",
        f"environments.game.package={PACKAGE}",
        f"environments.game.options.key={key}",
        "environments.game.policies=null",
        "environments.game.optimal_policy=null",
        *more_overrides,
    ]
    return require_language_model(load_run_config(None, overrides), "the test")


@pytest.mark.parametrize("key", WRONG_MESSAGES)
def test_dry_run_names_the_environment_and_the_rule(tmp_path: Path, key: str) -> None:
    run = make_run(tmp_path, key)
    with pytest.raises(ConfigError, match=RULE) as raised:
        check_start(run, Resume.NEVER)
    assert "\n" not in str(raised.value)


def test_dry_run_checks_the_render_function_too(tmp_path: Path) -> None:
    module = "tests.rollout.fragile_env"
    functions = [f"render={module}:render_nothing", f"parse={module}:parse"]
    overrides = [f"environments.game.{function}" for function in functions]
    run = make_run(tmp_path, "empty", *overrides)
    with pytest.raises(ConfigError, match=r"environment\.render = .*render_nothing.* 'game'"):
        check_start(run, Resume.NEVER)


def make_long_run(folder: Path, name: str) -> LanguageModelRun:
    """Return a run with an environment of `fragile_env` that has no options."""
    package = f"environments.game.package=tests.rollout.fragile_env:{name}"
    return make_run(folder, "empty", package, "environments.game.options={}")


def test_dry_run_refuses_first_messages_that_are_too_long(tmp_path: Path) -> None:
    check_start(make_long_run(tmp_path, "SometimesLongEnv"), Resume.NEVER)
    with pytest.raises(ConfigError, match=r"'game'.* shortest prompt has 1000008 characters"):
        check_start(make_long_run(tmp_path, "LongEnv"), Resume.NEVER)


@pytest.mark.parametrize("key", WRONG_MESSAGES)
async def test_run_names_the_environment_and_the_rule(
    tmp_path: Path, chat: ChatTokenizer, key: str
) -> None:
    run = make_run(tmp_path, key)
    config = run.environments["game"]
    assert isinstance(config, LocalEnvironment)
    async with (
        EnvServer(partial(WrongRendererEnv, key), ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        environment = ConnectedEnvironment(
            config,
            server.grpc_address,
            client,
            await client.describe(),
            make_renderer(config, "game"),
        )
        with pytest.raises(ConfigError, match=RULE):
            await fetch_first_opening(environment)
        with pytest.raises(ConfigError, match=RULE):
            await prepare_model(run, {"game": environment}, tmp_path / "model")
        player, _ = make_player(client, chat, itertools.repeat("ADD 2"))
        rollout = await player.play_episode(2)
        assert rollout.status is RolloutStatus.FAILED
        assert RULE in rollout.failure
