"""Tests of classic PPO: learning, evaluation, checkpoints and resumed runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.config import (
    NetworkModel,
    NetworkPpoConfig,
    NetworkRun,
    load_run_config,
    make_run_config,
)
from ludus.proto.errors import ConfigError, LudusError, NotFoundError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import Resume, Summary, read_metrics, read_transcripts
from ludus.trainer.algorithms.advantages import gae, stream_gae
from ludus.trainer.classic.agent import PpoAgent, evaluate_policy
from ludus.trainer.classic.environments import GymnasiumEnvironments
from ludus.trainer.classic.heads import make_head
from ludus.trainer.classic.policy import NetworkPolicy, ObservationEncoder, make_networks
from ludus.trainer.classic.run import check, open_network_run, train
from ludus.trainer.core.stopping import RunStopped

EXAMPLES = Path(__file__).parents[2] / "examples"
LAKE_OPTIONS = {"is_slippery": False}
SMALL_PPO: dict[str, Any] = {
    "num_environments": 4,
    "steps_per_environment": 16,
    "num_epochs": 2,
    "minibatch_size": 32,
}


class ConstantReward(gymnasium.Env[np.ndarray, int]):
    """An environment with reward 1 in every step. Only a time limit ends an episode."""

    observation_space = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, **arguments: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=arguments.get("seed"))
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, dtype=np.float32), 1.0, False, False, {}


class EarlyEnd(ConstantReward):
    """Ends each episode after `length` steps, which a test changes."""

    length = 500

    def reset(self, **arguments: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.num_steps = 0
        return super().reset(**arguments)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, self.num_steps >= self.length, truncated, info


gymnasium.register("EarlyEnd-v0", lambda **options: EarlyEnd())
gymnasium.register("ConstantReward-v0", lambda **options: ConstantReward(), max_episode_steps=500)


def make_agent(env_id: str, config: NetworkPpoConfig, seed: int = 0, **options: Any) -> PpoAgent:
    """Return an agent with multilayer perceptrons for a Gymnasium environment."""
    environments = GymnasiumEnvironments(env_id, config.num_environments, options)
    torch.manual_seed(seed)
    observations, actions = environments.observation_space, environments.action_space
    actor, critic = make_networks(NetworkModel(hidden=(32,)), observations, actions)
    policy = NetworkPolicy(actor, critic, observations, actions)
    return PpoAgent(policy, environments, config, seed=seed)


def make_noisy_network(num_outputs: int) -> nn.Module:
    """Return a network for CartPole whose output is random in training mode."""
    layers = [nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(32, num_outputs))


def make_run(folder: Path, **ppo: Any) -> NetworkRun:
    """Return the configuration of a short run on CartPole."""
    return make_run_config(
        {
            "name": "short",
            "output_dir": str(folder),
            "environment": {"package": "gymnasium:CartPole-v1", "baselines": ["random"]},
            "kind": "network",
            "model": {"hidden": [16]},
            "ppo": {**SMALL_PPO, **ppo},
            "training": {"num_steps": 6, "checkpoint_every_steps": 3},
            "eval": {"num_games": 5, "num_games_during": 5, "every_steps": 2},
        }
    )


def test_stream_gae_equals_gae_of_each_episode() -> None:
    generator = torch.Generator().manual_seed(0)
    num_steps, bounds = 40, (0, 7, 8, 23, 40)
    rewards, values = torch.randn(2, num_steps, generator=generator)
    bootstraps = torch.randn(len(bounds), generator=generator)
    is_finished = torch.zeros(num_steps, dtype=torch.bool)
    next_values = torch.cat([values[1:], values[:1]])
    episode_advantages = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        terminated = torch.tensor([index % 2 == 0])
        is_finished[end - 1] = True
        next_values[end - 1] = 0.0 if terminated else bootstraps[index]
        row = slice(start, end)
        mask = torch.ones(1, end - start, dtype=torch.bool)
        bootstrap = bootstraps[index : index + 1]
        episode_advantages.append(
            gae(rewards[None, row], values[None, row], mask, terminated, bootstrap, 0.97, 0.9)[0]
        )
    columns = [column[:, None] for column in (rewards, values, next_values, is_finished)]
    advantages = stream_gae(*columns, gamma=0.97, lam=0.9)
    torch.testing.assert_close(advantages[:, 0], torch.cat(episode_advantages), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=5),
        spaces.MultiDiscrete([3, 2], start=[1, -1]),
        spaces.MultiBinary(3),
        spaces.Box(-2.0, 2.0, (2,)),
    ],
)
def test_sampled_actions_match_the_reported_log_probs(space: spaces.Space[Any]) -> None:
    head = make_head(space)
    torch.manual_seed(0)
    width = head.num_outputs * (2 if isinstance(space, spaces.Box) else 1)
    output = torch.randn(1, width).expand(4000, width)
    actions = head.choose(output, head.sample_noise(1, 4000)[0])
    assert all(
        space.contains(action) for action in head.to_environment_actions(actions.numpy())[:50]
    )
    logprobs, entropies = head.score(output, actions)
    # The entropy is the mean negative log-prob.
    assert torch.isclose(-logprobs.mean(), entropies[0], atol=0.06)


@pytest.mark.long
@pytest.mark.slow
def test_value_of_a_truncated_episode_is_bootstrapped() -> None:
    config = NetworkPpoConfig(
        num_environments=4,
        steps_per_environment=500,
        num_epochs=10,
        minibatch_size=250,
        learning_rate=3e-2,
        schedule="constant",
        gamma=0.99,
        lam=1.0,
        max_grad_norm=1e6,
    )
    agent = make_agent("ConstantReward-v0", config)
    for _ in range(30):
        train_output = agent.train()
    assert len(train_output.batch.truncations) == 4
    predicted_value = agent.policy.predict_values(torch.zeros(1, 1)).item()
    assert predicted_value == pytest.approx(100, abs=2)


@pytest.mark.slow
def test_agent_learns_to_cross_the_frozen_lake() -> None:
    config = NetworkPpoConfig(
        num_environments=16,
        steps_per_environment=64,
        num_epochs=6,
        minibatch_size=256,
        learning_rate=5e-3,
        schedule="constant",
        entropy_coef=0.02,
    )
    agent = make_agent("FrozenLake-v1", config, **LAKE_OPTIONS)
    for _ in range(20):
        agent.train()
    eval_environments = GymnasiumEnvironments("FrozenLake-v1", 4, LAKE_OPTIONS)
    outcomes = evaluate_policy(agent.policy, eval_environments, range(8), is_greedy=True)
    assert [outcome.episode_return for outcome in outcomes] == [1.0] * 8
    assert all(outcome.success for outcome in outcomes)


@pytest.mark.slow
def test_cartpole_example_reaches_the_target_return(tmp_path: Path) -> None:
    settings = [f"output_dir={tmp_path}", "seed=100", "environment.baselines=[]"]
    run = load_run_config(EXAMPLES / "cartpole" / "ppo.toml", settings)
    folder = train(run, resume=Resume.NEVER, overwrite=False)
    summary = Summary.model_validate_json((folder / "summary.json").read_bytes())
    assert summary.expected_return >= 475
    assert summary.num_steps < run.training.num_steps


@pytest.mark.parametrize("example", ["frozen_lake", "lunar_lander", "pendulum"])
def test_example_configuration_passes_the_checks(example: str) -> None:
    run = load_run_config(EXAMPLES / example / "ppo.toml")
    check(run, resume=Resume.NEVER, overwrite=False)


@pytest.mark.slow
def test_run_writes_summary_metrics_transcripts_and_checkpoints(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every_steps": 9})})
    folder = train(config, resume=Resume.NEVER, overwrite=False)
    summary = Summary.model_validate_json((folder / "summary.json").read_bytes())
    assert summary.finished and summary.num_steps == 6
    assert summary.baselines["random"].num_games == 5
    rows = read_metrics(folder)
    assert [row.step for row in rows if row.kind == "train"] == [1, 2, 3, 4, 5, 6]
    assert {row.kind for row in rows} >= {"phase", "train", "environment", "eval", "baseline"}
    assert read_transcripts(folder)[0].turns[0].shown[0].role == "observation"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000006",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"scale_rewards": True}])
def test_resumed_run_equals_an_uninterrupted_run(tmp_path: Path, options: dict[str, Any]) -> None:
    uninterrupted_run = make_run(tmp_path / "uninterrupted", **options)
    interrupted_run = make_run(tmp_path / "interrupted", **options)
    folders = [train(uninterrupted_run, resume=Resume.NEVER, overwrite=False)]
    with (
        pytest.raises(RunStopped),
        open_network_run(interrupted_run, resume=Resume.NEVER, overwrite=False) as run,
    ):
        run.agent.on_step = lambda *_: run.stop_request.set()
        run.train()
    folders.append(train(interrupted_run, resume=Resume.ALWAYS, overwrite=False))
    expected_policy, resumed_policy = (
        torch.load(folder / "checkpoints/step-00000006/learner/agent.pt")["policy"]
        for folder in folders
    )
    for name, values in expected_policy.items():
        assert torch.equal(values, resumed_policy[name]), name


@pytest.mark.slow
def test_the_checkpoint_with_the_best_evaluation_is_written_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path)
    training = config.training.model_copy(update={"num_steps": 10})
    config = config.model_copy(update={"training": training})
    returns = iter([9.0, 4.0, 8.0, 6.0, 5.0, 7.0])  # at steps 0, 2, 4, 6, 8 and 10
    with open_network_run(config, resume=Resume.NEVER, overwrite=False) as run:

        def play_episodes(seeds: Sequence[int]) -> list[EpisodeOutcome]:
            mean_return = next(returns)
            return [EpisodeOutcome(seed, mean_return, 1, None) for seed in seeds]

        monkeypatch.setattr(run, "play_eval_episodes", play_episodes)
        run.train()
    names = sorted(path.name for path in (config.folder / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000009", "step-00000010"]


@pytest.mark.slow
def test_target_return_is_confirmed_on_separate_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path, target_return=1.0)
    with open_network_run(config, resume=Resume.NEVER, overwrite=False) as run:
        confirmation_seeds: list[Sequence[int]] = []

        def play_episodes(seeds: Sequence[int]) -> list[EpisodeOutcome]:
            # Every evaluation reaches the target, but only the second confirmation does.
            if seeds[0] != config.eval.seed:
                confirmation_seeds.append(seeds)
            is_reached = seeds[0] == config.eval.seed or len(confirmation_seeds) == 2
            return [EpisodeOutcome(seed, 2.0 * is_reached, 1, None) for seed in seeds]

        monkeypatch.setattr(run, "play_eval_episodes", play_episodes)
        assert run.train().num_steps == 4
    assert [list(seeds) for seeds in confirmation_seeds] == [
        list(range(config.eval.seed + 5, config.eval.seed + 10))
    ] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout": {"group_size": 4}}, "rollout: unknown key"),
        ({"training": {"max_staleness": 0}}, "training.max_staleness"),
        ({"generator": {"kind": "vllm"}}, "generator"),
        ({"environment": {"package": "gymnasium:CartPole-v1", "tools": True}}, "environment.tools"),
        ({"environment": {"package": "openspiel_env"}}, "gymnasium:CartPole-v1"),
        ({"eval": {"temperature": 0.5}}, "eval.temperature"),
    ],
)
def test_language_model_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    base_config = {"kind": "network", "environment": {"package": "gymnasium:CartPole-v1"}}
    with pytest.raises(ConfigError, match=message):
        make_run_config({**base_config, **fields})


def test_configuration_can_be_restored_from_json(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert make_run_config(json.loads(run.model_dump_json())) == run


def test_failed_run_start_leaves_no_folder(tmp_path: Path) -> None:
    run = make_run_config(
        {
            "output_dir": str(tmp_path),
            "environment": {"package": "gymnasium:CartPool-v1"},
            "kind": "network",
        }
    )
    with pytest.raises(NotFoundError, match="CartPole"):
        train(run, resume=Resume.NEVER, overwrite=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_repeated_nonfinite_gradients_stop_training() -> None:
    class NanObservationEnv(ConstantReward):
        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return np.full(1, np.nan, dtype=np.float32), 1.0, False, False, {}

    gymnasium.register(
        "NanObservation-v0", lambda **options: NanObservationEnv(), max_episode_steps=500
    )
    agent = make_agent("NanObservation-v0", NetworkPpoConfig(**SMALL_PPO))
    for _ in range(9):
        assert agent.train().metrics[TrainMetric.NUM_SKIPPED_UPDATES] > 0
    with pytest.raises(LudusError, match="10 updates in a row were skipped"):
        agent.train()


class Sampled(ConstantReward):
    """Episodes of eight steps, whose observations are samples of a space."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        self.observation_space = observation_space

    def reset(self, *, seed: int | None = None, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(seed)
        self.num_steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        return self.observation_space.sample(), 1.0, self.num_steps == 8, False, {}


gymnasium.register("Sampled-v0", lambda **options: Sampled(options["space"]))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(2, start=5),
        spaces.Discrete(3, start=-7),
        spaces.MultiDiscrete([2, 3], start=[4, -1]),
        spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[9, 0], [-3, 1]]),
        spaces.MultiBinary([2, 3]),
        spaces.Box(0, 255, (2, 2), dtype=np.uint8),
        spaces.Box(-1, 1, (), dtype=np.float64),
    ],
    ids=str,
)
def test_agent_trains_on_every_kind_of_observations(space: spaces.Space[Any]) -> None:
    environments = GymnasiumEnvironments("Sampled-v0", 4, {"space": space})
    actor, critic = make_networks(NetworkModel(hidden=(4,)), space, spaces.Discrete(2))
    policy = NetworkPolicy(actor, critic, space, spaces.Discrete(2), normalizes_observations=True)
    agent = PpoAgent(policy, environments, NetworkPpoConfig(**SMALL_PPO), seed=0)
    assert agent.train().batch.num_steps == 64
    assert len(evaluate_policy(policy, environments, range(5), is_greedy=True)) == 5


def test_first_observation_of_a_discrete_space_is_the_first_column() -> None:
    encoder = ObservationEncoder(spaces.MultiDiscrete([2, 3], start=[4, -1]))
    rows = encoder(torch.tensor([[4, -1], [5, 1]]))
    assert rows.tolist() == [[1, 0, 1, 0, 0], [0, 1, 0, 0, 1]]


def test_actor_with_a_wrong_input_or_output_shape_is_refused() -> None:
    environments = GymnasiumEnvironments("CartPole-v1", 1, {})
    observations, actions = environments.observation_space, environments.action_space
    with pytest.raises(ConfigError, match=r"logits of shape \[2, 2\].*\[2, 3\]"):
        NetworkPolicy(nn.Linear(4, 3), nn.Linear(4, 1), observations, actions)
    with pytest.raises(ConfigError, match="failed with observations of shape"):
        NetworkPolicy(nn.Linear(5, 2), nn.Linear(4, 1), observations, actions)


@pytest.mark.slow
def test_dropout_and_batch_statistics_are_disabled() -> None:
    config = NetworkPpoConfig.model_validate({**SMALL_PPO, "learning_rate": 1e-12})
    environments = GymnasiumEnvironments("CartPole-v1", config.num_environments, {})
    actor, critic = make_noisy_network(2), make_noisy_network(1)
    observations, actions = environments.observation_space, environments.action_space
    policy = NetworkPolicy(actor, critic, observations, actions)
    agent = PpoAgent(policy, environments, config)
    statistics = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    metrics = agent.train().metrics
    assert metrics[TrainMetric.POLICY_KL] == pytest.approx(0.0, abs=1e-6)
    seeds = range(100, 104)
    first, second = (
        [
            outcome.episode_return
            for outcome in evaluate_policy(policy, environments, seeds, is_greedy=True)
        ]
        for _ in range(2)
    )
    assert first == second
    assert all(torch.equal(statistics[name], buffer) for name, buffer in policy.named_buffers())


def test_resume_after_an_episode_that_ends_early_starts_new_episodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = NetworkPpoConfig.model_validate(SMALL_PPO)
    agent = make_agent("EarlyEnd-v0", config)
    agent.train()
    state = agent.get_state()
    monkeypatch.setattr(EarlyEnd, "length", 3)
    resumed_agent = make_agent("EarlyEnd-v0", config)
    resumed_agent.restore(state)
    assert "the environment is not deterministic" in caplog.text
    batch = resumed_agent.train().batch
    assert {episode.length for episode in batch.episodes} == {3}
