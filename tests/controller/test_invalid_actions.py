"""The reward of an invalid action, which depends on the returns that environments declare."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ludus.env.types import ReturnRange
from ludus.proto.config import LanguageModelRun, make_run_config
from ludus.proto.errors import ConfigError
from ludus.proto.runs import RESOLVED_PREFIX, Resume
from ludus.trainer.driver import commands
from ludus.trainer.driver.invalid_actions import resolve_invalid_action_rewards
from ludus.trainer.rollout.runner import episode_limits
from tests.env.served import serve
from tests.env.test_return_range import RangedEnv

FUNCTION_TERM = {"function": "tests.rollout.reward_functions:count_words"}
RANGES = {"cards": ReturnRange(-1.0, 1.0), "sums": ReturnRange(0.0, 10.0), "bare": None}


def make_run(rollout: dict[str, Any] | None = None, **environments: Any) -> LanguageModelRun:
    sections = {"rollout": rollout or {}, "environments": environments or {"cards": {}}}
    return LanguageModelRun.model_validate(sections)


def list_rewards(run: LanguageModelRun) -> dict[str, float]:
    return {
        name: episode_limits(run, name).known_invalid_action_reward for name in run.environments
    }


def test_reward_is_below_the_returns_of_each_environment() -> None:
    run = resolve_invalid_action_rewards(make_run(cards={}, sums={}, bare={}), RANGES)
    assert list_rewards(run) == {"cards": -2.0, "sums": -10.0, "bare": -1.0}
    assert resolve_invalid_action_rewards(run, {}) == run


def test_single_environment_has_its_reward_in_section_rollout() -> None:
    run = resolve_invalid_action_rewards(make_run(), RANGES)
    assert run.rollout.invalid_action_reward == -2.0
    changed_run = make_run_config(
        run.model_dump(mode="json"), ["rollout.invalid_action_reward=-0.5"]
    )
    assert isinstance(changed_run, LanguageModelRun)
    assert list_rewards(resolve_invalid_action_rewards(changed_run, RANGES)) == {"cards": -0.5}


def test_configured_reward_is_kept() -> None:
    run = make_run({"invalid_action_reward": 0.0}, cards={}, sums={"invalid_action_reward": -7.0})
    assert resolve_invalid_action_rewards(run, RANGES) == run
    assert list_rewards(run) == {"cards": 0.0, "sums": -7.0}


@pytest.mark.parametrize(
    ("terms", "reward"),
    [
        ([FUNCTION_TERM], -1.0),
        ([FUNCTION_TERM, {"weight": 0.0}], -1.0),
        ([FUNCTION_TERM, {"weight": 0.5}], -10.0),
    ],
)
def test_returns_count_only_if_they_are_part_of_the_reward(
    terms: list[dict[str, Any]], reward: float
) -> None:
    run = resolve_invalid_action_rewards(make_run(sums={"rewards": terms}), RANGES)
    assert list_rewards(run) == {"sums": reward}


def test_log_names_the_reward_and_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(cards={}, bare={}, sums={"invalid_action_reward": 2.0})
    with caplog.at_level(logging.INFO):
        resolve_invalid_action_rewards(run, RANGES)
    assert caplog.messages == [
        "environment 'cards': the reward of an invalid action is -2, because returns are from -1 "
        "to 1",
        "environment 'bare': the reward of an invalid action is -1, because the environment does "
        "not declare its returns; set rollout.invalid_action_reward if the rewards have another "
        "scale",
        "environment 'sums': the reward of an invalid action is 2, because the configuration sets "
        "it",
    ]


def test_reward_without_effect_is_refused() -> None:
    sections = {
        "rollout": {"invalid_action_reward": -2.0},
        "environments": {name: {"invalid_action_reward": -1.0} for name in ("cards", "sums")},
    }
    with pytest.raises(ConfigError, match="has no effect, because every environment has its own"):
        make_run_config(sections)


@pytest.mark.slow
async def test_check_prints_the_rewards_of_local_and_remote_environments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "check_start", lambda run, resume: None)
    async with serve(RangedEnv) as server:
        remote = {"kind": "remote", "address": server.grpc_address}
        run = make_run(cards={"options": {"game": "kuhn_poker"}}, remote=remote)
        await commands.asyncio.to_thread(commands.check, run, resume=Resume.NEVER, overwrite=False)
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith(RESOLVED_PREFIX))
    checked_run = LanguageModelRun.model_validate_json(line.removeprefix(RESOLVED_PREFIX))
    expected = {"cards": -4.0, "remote": RangedEnv().return_range.invalid_action_reward}
    assert list_rewards(checked_run) == expected
