"""Tests of Gymformer's `train_agent` with networks: episode counts, files and returns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ludus.proto.config import make_run_config
from ludus.proto.errors import ConfigError, ExecutionError, NotFoundError
from ludus.proto.runs import Resume, Summary, read_metrics
from ludus.services.report.page import write_report
from ludus.trainer.classic.run import check
from ludus.trainer.compat.gymformer.rl.common_nn import MLPActorNetwork, MLPCriticNetwork
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig, load_ppo_agent
from ludus.trainer.compat.gymformer.trainer.trainer import train_agent


def make_networks(env_name: str) -> tuple[MLPActorNetwork, MLPCriticNetwork]:
    """Return the networks from Gymformer's README, sized for an environment."""
    env = gymnasium.make(env_name)
    num_inputs = env.observation_space.shape[0]
    space = env.action_space
    num_actions = space.n if isinstance(space, gymnasium.spaces.Discrete) else space.shape[0]
    return MLPActorNetwork(num_inputs, 64, num_actions), MLPCriticNetwork(num_inputs, 64)


@pytest.mark.slow
def test_readme_script_runs(tmp_path: Path) -> None:
    actor, critic = make_networks("CartPole-v1")
    calls = []
    rewards = train_agent(
        env_name="CartPole-v1",
        actor=actor,
        critic=critic,
        ppo_config=PPOConfig(minibatch_size=64),
        max_episodes=30,
        update_interval=10,
        save_interval=15,
        save_path=tmp_path,
        callback=lambda *arguments: calls.append(arguments),
    )
    assert len(rewards) == 30 and all(value >= 8 for value in rewards)
    assert rewards.running[0] == pytest.approx(0.05 * rewards[0])
    assert [call[5] for call in calls] == [10, 20, 30]
    assert calls[-1][6] == pytest.approx(rewards.running[-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "CartPole-v1",
        "ppo_CartPole-v1_episode_15.pth",
        "ppo_CartPole-v1_episode_30.pth",
    ]
    agent = load_ppo_agent(
        tmp_path / "ppo_CartPole-v1_episode_30.pth", *make_networks("CartPole-v1")
    )
    assert agent.select_action([0.0, 0.0, 0.0, 0.0]) in (0, 1)


@pytest.mark.slow
def test_readme_networks_support_continuous_actions(tmp_path: Path) -> None:
    rewards = train_agent(
        "Pendulum-v1",
        *make_networks("Pendulum-v1"),
        PPOConfig(minibatch_size=-1),
        max_episodes=4,
        max_timesteps=20,
        update_interval=2,
        save_interval=4,
        save_path=tmp_path,
    )
    assert len(rewards) == 4
    agent = load_ppo_agent(next(tmp_path.glob("*.pth")), *make_networks("Pendulum-v1"))
    assert agent.select_action([1.0, 0.0, 0.0]).shape == (1,)


@pytest.mark.slow
def test_equal_seeds_produce_equal_returns(tmp_path: Path) -> None:
    def compute_returns() -> list[float]:
        actor, critic = make_networks("CartPole-v1")
        for module in (actor, critic):
            for parameter in module.parameters():
                parameter.data.fill_(0.05)
        return train_agent(
            "CartPole-v1",
            actor,
            critic,
            PPOConfig(minibatch_size=64),
            12,
            update_interval=6,
            save_path=tmp_path,
            seed=3,
        )

    assert compute_returns() == compute_returns()


@pytest.mark.slow
def test_resumed_train_agent_call_equals_an_uninterrupted_call(tmp_path: Path) -> None:
    def compute_returns(folder: str, max_episodes: int, *, resume: bool) -> list[float]:
        actor, critic = make_networks("CartPole-v1")
        if not resume:
            for module in (actor, critic):
                for parameter in module.parameters():
                    parameter.data.fill_(0.05)
        return train_agent(
            "CartPole-v1",
            actor,
            critic,
            PPOConfig(minibatch_size=64),
            max_episodes,
            update_interval=6,
            save_interval=6,
            save_path=tmp_path / folder,
            name="cart",
            resume=resume,
            metrics={"tensorboard": True},
        )

    uninterrupted_returns = compute_returns("uninterrupted", 24, resume=False)
    first_half_returns = compute_returns("resumed", 12, resume=False)
    assert compute_returns("resumed", 24, resume=True) == uninterrupted_returns
    assert first_half_returns == uninterrupted_returns[:12]
    folder = tmp_path / "resumed" / "cart"
    summary = Summary.model_validate_json((folder / "summary.json").read_bytes())
    assert summary.finished and summary.games_trained >= 24
    assert list((folder / "checkpoints").iterdir())
    assert list(folder.rglob("events.out.tfevents*"))
    assert [row.step for row in read_metrics(folder) if row.kind == "train"] == list(
        range(1, summary.num_steps + 1)
    )
    assert "cart" in write_report(folder).read_text()


@pytest.mark.slow
async def test_train_agent_works_in_a_running_event_loop(tmp_path: Path) -> None:
    actor, critic = make_networks("CartPole-v1")
    config = PPOConfig(minibatch_size=64)
    returns = train_agent(
        "CartPole-v1", actor, critic, config, 6, update_interval=6, save_path=tmp_path, name="cart"
    )
    assert len(returns) == 6
    assert list((tmp_path / "cart" / "checkpoints").iterdir())


@pytest.mark.slow
def test_run_file_with_custom_networks_is_refused_outside_train_agent(tmp_path: Path) -> None:
    actor, critic = make_networks("CartPole-v1")
    train_agent("CartPole-v1", actor, critic, PPOConfig(), 2, save_path=tmp_path)
    run = make_run_config(json.loads((tmp_path / "CartPole-v1" / "config.json").read_text()))
    with pytest.raises(ConfigError, match=r"train_agent\(..., resume=True\)"):
        check(run, resume=Resume.NEVER, overwrite=False)


def test_invalid_arguments_and_agent_files_are_refused(tmp_path: Path) -> None:
    actor, critic = make_networks("CartPole-v1")
    with pytest.raises(NotFoundError, match="CartPole"):
        train_agent("CartPool-v1", actor, critic, PPOConfig(), save_path=tmp_path)
    with pytest.raises(ConfigError, match="num_envs = 0 must be a whole number of 1 or more"):
        train_agent("CartPole-v1", actor, critic, PPOConfig(), num_envs=0)
    with pytest.raises(NotFoundError, match="no agent at"):
        load_ppo_agent(tmp_path / "none.pth", actor, critic)
    (tmp_path / "empty.pth").touch()
    with pytest.raises(ConfigError, match="is not a saved agent with this"):
        load_ppo_agent(tmp_path / "empty.pth", actor, critic)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ppo_config": PPOConfig(lr_actor=-1)},
            r"PPOConfig\.lr_actor = -1: input should be",
        ),
        ({"ppo_config": PPOConfig(minibatch_size=0)}, r"PPOConfig\.minibatch_size = 0"),
        ({"ppo_config": PPOConfig(eps_clip=float("nan"))}, r"PPOConfig\.eps_clip = nan"),
        ({"ppo_config": {"lr_actor": 1}}, r"ppo_config = {.* must be a .*rl\.ppo\.PPOConfig"),
        ({"actor": None}, "actor = None must be a torch module"),
        ({"env_name": 5}, "env_name = 5 must be a Gymnasium id"),
        ({"max_episodes": "2"}, "max_episodes = '2' must be a whole number of 1 or more"),
        ({"callback": 5}, r"callback must be a function of \(state, .* got 5"),
        (
            {"callback": lambda state: None},
            r"callback must be a function of \(state, action, .*got a function of \(state\)",
        ),
        ({"max_episodes": True}, "max_episodes = True must be a whole number of 1 or more"),
        ({"seed": -1}, "^seed = -1 must be a whole number of 0 or more"),
        ({"seed": None}, "^seed = None must be a whole number of 0 or more"),
        ({"name": "a/b"}, "^name = 'a/b' must be at most 47 letters"),
        ({"resume": "no"}, "^resume = 'no' must be True or False"),
        ({"save_path": None}, "^save_path = None must be a path"),
        ({"save_path": __file__}, r"^save_path = '.*' must be a folder, but '.*\.py' is a file"),
        ({"save_path": Path(__file__) / "x"}, r"^save_path = .*but '.*\.py' is a file"),
        ({"device": 5}, "^device = 5 must be None or a string such as 'cpu'"),
        pytest.param(
            {"env_name": "grpc://localhost:1"},
            "^env_name = 'grpc://localhost:1'",
            marks=[pytest.mark.slow, pytest.mark.long],
        ),
        ({"metrics": 5}, "metrics = 5 must be a mapping of metric sinks"),
        ({"device": "abacus"}, "device = 'abacus' cannot be used"),
    ],
)
def test_error_for_an_invalid_argument_contains_the_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    actor, critic = make_networks("CartPole-v1")
    kwargs = {"actor": actor, "critic": critic, "ppo_config": PPOConfig(), "save_path": tmp_path}
    with pytest.raises(ConfigError, match=message):
        train_agent(**{"env_name": "CartPole-v1", "max_episodes": 2, **kwargs, **changes})


@pytest.mark.parametrize(("name", "reward"), [("Nan", float("nan")), ("Huge", -1e308)])
def test_reward_that_is_too_large_stops_training(tmp_path: Path, name: str, reward: float) -> None:
    class LargeRewardEnv(gymnasium.Env[np.ndarray, int]):
        observation_space, action_space = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2)

        def reset(self, **arguments: Any) -> tuple[np.ndarray, dict[str, Any]]:
            super().reset(seed=arguments.get("seed"))
            return np.zeros(4, dtype=np.float32), {}

        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return np.zeros(4, dtype=np.float32), reward, False, False, {}

    gymnasium.register(f"{name}Reward-v0", lambda **options: LargeRewardEnv())
    with pytest.raises(ExecutionError, match=re.escape(f"returned the reward {reward} in step 1")):
        train_agent(
            f"{name}Reward-v0", *make_networks("CartPole-v1"), PPOConfig(), 2, save_path=tmp_path
        )
