"""Classic PPO learns what it should, nothing else, and goes on as if it had never stopped."""

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
    run_config_from,
)
from ludus.proto.errors import ConfigError, LudusError, NotFoundError
from ludus.proto.runs import Resume, Summary, read_metrics, read_transcripts
from ludus.trainer.algorithms.advantages import gae, stream_gae
from ludus.trainer.classic.adam import Adam
from ludus.trainer.classic.agent import Agent, judge
from ludus.trainer.classic.environments import GymnasiumEnvironments
from ludus.trainer.classic.heads import head_of
from ludus.trainer.classic.networks import make_networks
from ludus.trainer.classic.policy import Policy
from ludus.trainer.classic.run import check, opened, train
from ludus.trainer.run.lifecycle import RunStopped

EXAMPLES = Path(__file__).parents[2] / "examples"
LAKE = {"is_slippery": False}
SMALL: dict[str, Any] = {
    "num_environments": 4,
    "steps_per_environment": 16,
    "num_epochs": 2,
    "minibatch_size": 32,
}


class ConstantReward(gymnasium.Env[np.ndarray, int]):
    """Pays 1 a step, for ever: what ends an episode is a limit alone."""

    observation_space = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, **arguments: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=arguments.get("seed"))
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, dtype=np.float32), 1.0, False, False, {}


gymnasium.register("ConstantReward-v0", lambda **options: ConstantReward(), max_episode_steps=500)


def agent_of(env_id: str, config: NetworkPpoConfig, seed: int = 0, **options: Any) -> Agent:
    """An agent with perceptrons in an environment of this process."""
    environments = GymnasiumEnvironments(env_id, config.num_environments, options)
    torch.manual_seed(seed)
    seen, acts = environments.observation_space, environments.action_space
    actor, critic = make_networks(NetworkModel(hidden=(32,)), seen, acts)
    return Agent(Policy(actor, critic, seen, acts), environments, config, seed=seed)


def run_of(folder: Path, **ppo: Any) -> NetworkRun:
    """A short run on CartPole."""
    return run_config_from(
        {
            "name": "short",
            "output_dir": str(folder),
            "environment": {"package": "gymnasium:CartPole-v1", "baselines": ["random"]},
            "kind": "network",
            "model": {"hidden": [16]},
            "ppo": {**SMALL, **ppo},
            "training": {"num_steps": 6, "checkpoint_every_steps": 3},
            "eval": {"num_games": 5, "num_games_during": 5, "every_steps": 2},
        }
    )


def test_advantages_of_streams_are_those_of_their_episodes() -> None:
    generator = torch.Generator().manual_seed(0)
    steps, cuts = 40, (0, 7, 8, 23, 40)
    rewards, values = torch.randn(2, steps, generator=generator)
    for_cut = torch.randn(len(cuts), generator=generator)
    ended, following = torch.zeros(steps, dtype=torch.bool), torch.cat([values[1:], values[:1]])
    parts = []
    for index, (begin, end) in enumerate(pairwise(cuts)):
        terminated = torch.tensor([index % 2 == 0])
        ended[end - 1] = True
        following[end - 1] = 0.0 if terminated else for_cut[index]
        row = slice(begin, end)
        mask = torch.ones(1, end - begin, dtype=torch.bool)
        bootstrap = for_cut[index : index + 1]
        parts.append(
            gae(rewards[None, row], values[None, row], mask, terminated, bootstrap, 0.97, 0.9)[0]
        )
    columns = [one[:, None] for one in (rewards, values, following, ended)]
    found = stream_gae(*columns, gamma=0.97, lam=0.9)
    torch.testing.assert_close(found[:, 0], torch.cat(parts), atol=1e-6, rtol=0)


def test_flat_adam_steps_as_torchs_does() -> None:
    torch.manual_seed(1)
    mine, theirs = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    flat = Adam([mine[0].parameters(), mine[1].parameters()])
    groups = [
        {"params": part.parameters(), "lr": lr}
        for part, lr in zip(theirs, (1e-2, 3e-3), strict=True)
    ]
    reference = torch.optim.Adam(groups, eps=1e-5)
    for _ in range(5):
        inputs = torch.randn(8, 3)
        for network in (mine, theirs):
            for parameter in network.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            network(inputs).square().mean().backward()
        norm = flat.clip(0.5)
        assert torch.isclose(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
        flat.step((1e-2, 3e-3))
        reference.step()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=5),
        spaces.MultiDiscrete([3, 2], start=[1, -1]),
        spaces.MultiBinary(3),
        spaces.Box(-2.0, 2.0, (2,)),
    ],
)
def test_heads_draw_actions_of_the_space_as_often_as_they_say(space: spaces.Space[Any]) -> None:
    head = head_of(space)
    torch.manual_seed(0)
    width = head.num_outputs * (2 if isinstance(space, spaces.Box) else 1)
    output = torch.randn(1, width).expand(4000, width)
    actions = head.choose(output, head.noise(1, 4000)[0])
    assert all(space.contains(one) for one in head.to_environment(actions.numpy())[:50])
    logprobs, entropies = head.judge(output, actions)
    # What is drawn is as surprising on average as the entropy says.
    assert torch.isclose(-logprobs.mean(), entropies[0], atol=0.06)


@pytest.mark.slow
def test_a_value_goes_on_where_a_limit_cuts_an_episode_off() -> None:
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
    agent = agent_of("ConstantReward-v0", config)
    for _ in range(30):
        trained = agent.train()
    assert len(trained.batch.cut_off) == 4
    value = agent.policy.values(torch.zeros(1, 1)).item()
    assert value == pytest.approx(100, abs=2)


@pytest.mark.slow
def test_a_frozen_lake_is_crossed_each_time() -> None:
    config = NetworkPpoConfig(
        num_environments=16,
        steps_per_environment=64,
        num_epochs=6,
        minibatch_size=256,
        learning_rate=5e-3,
        schedule="constant",
        entropy_coef=0.02,
    )
    agent = agent_of("FrozenLake-v1", config, **LAKE)
    for _ in range(20):
        agent.train()
    judged = GymnasiumEnvironments("FrozenLake-v1", 4, LAKE)
    outcomes = judge(agent.policy, judged, range(8), is_greedy=True)
    assert [outcome.episode_return for outcome in outcomes] == [1.0] * 8
    assert all(outcome.success for outcome in outcomes)


@pytest.mark.slow
def test_the_example_balances_a_pole(tmp_path: Path) -> None:
    settings = [f"output_dir={tmp_path}", "seed=100", "environment.baselines=[]"]
    run = load_run_config(EXAMPLES / "cartpole" / "ppo.toml", settings)
    folder = train(run, resume=Resume.NEVER, overwrite=False)
    summary = Summary.model_validate_json((folder / "summary.json").read_bytes())
    assert summary.expected_return >= 475
    assert summary.num_steps < run.training.num_steps


@pytest.mark.parametrize("example", ["frozen_lake", "lunar_lander", "pendulum"])
def test_an_example_can_start(example: str) -> None:
    check(load_run_config(EXAMPLES / example / "ppo.toml"), Resume.NEVER)


def test_a_run_leaves_what_every_run_leaves(tmp_path: Path) -> None:
    folder = train(run_of(tmp_path), resume=Resume.NEVER, overwrite=False)
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


@pytest.mark.parametrize("options", [{}, {"scale_rewards": True}])
def test_a_run_that_is_resumed_equals_one_that_was_never_stopped(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole, parts = run_of(tmp_path / "whole", **options), run_of(tmp_path / "parts", **options)
    folder = train(whole, resume=Resume.NEVER, overwrite=False)
    with (
        pytest.raises(RunStopped),
        opened(parts, resume=Resume.NEVER, overwrite=False) as run,
    ):
        run.stop()
        run.train()
    again = train(parts, resume=Resume.ALWAYS, overwrite=False)
    kept = [
        torch.load(one / "checkpoints/step-00000006/learner/agent.pt") for one in (folder, again)
    ]
    for name, values in kept[0]["policy"].items():
        assert torch.equal(values, kept[1]["policy"][name]), name


def test_a_target_that_few_games_reach_by_chance_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(tmp_path, target_return=1.0)
    with opened(config, resume=Resume.NEVER, overwrite=False) as run:
        confirming: list[Sequence[int]] = []

        def play(seeds: Sequence[int]) -> list[EpisodeOutcome]:
            # The games of an evaluation always reach it, those that confirm the second time.
            if seeds[0] != config.eval.seed:
                confirming.append(seeds)
            reaches = seeds[0] == config.eval.seed or len(confirming) == 2
            return [EpisodeOutcome(seed, 2.0 * reaches, 1, None) for seed in seeds]

        monkeypatch.setattr(run, "_play", play)
        assert run.train().num_steps == 4
    assert [list(seeds) for seeds in confirming] == [
        list(range(config.eval.seed + 5, config.eval.seed + 10))
    ] * 2


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"rollout": {"group_size": 4}}, "rollout: unknown key"),
        ({"training": {"max_staleness": 0}}, "training.max_staleness"),
        ({"generator": {"kind": "vllm"}}, "generator"),
        ({"environment": {"package": "gymnasium:CartPole-v1", "tools": True}}, "environment.tools"),
        ({"environment": {"package": "openspiel_env"}}, "gymnasium:CartPole-v1"),
        ({"eval": {"temperature": 0.5}}, "eval.temperature"),
    ],
)
def test_sections_of_language_models_are_refused(tree: dict[str, Any], message: str) -> None:
    base = {"kind": "network", "environment": {"package": "gymnasium:CartPole-v1"}}
    with pytest.raises(ConfigError, match=message):
        run_config_from({**base, **tree})


def test_a_configuration_that_was_written_is_read_again(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert run_config_from(json.loads(run.model_dump_json())) == run


def test_a_run_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    run = run_config_from(
        {
            "output_dir": str(tmp_path),
            "environment": {"package": "gymnasium:CartPool-v1"},
            "kind": "network",
        }
    )
    with pytest.raises(NotFoundError, match="CartPole"):
        train(run, resume=Resume.NEVER, overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_batches_without_a_finite_gradient_end_the_training() -> None:
    class Blind(ConstantReward):
        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return np.full(1, np.nan, dtype=np.float32), 1.0, False, False, {}

    gymnasium.register("Blind-v0", lambda **options: Blind(), max_episode_steps=500)
    agent = agent_of("Blind-v0", NetworkPpoConfig(**SMALL))
    for _ in range(9):
        assert agent.train().metrics.num_skipped > 0
    with pytest.raises(LudusError, match="gradients of 10 batches in a row are not finite"):
        agent.train()


def test_an_actor_that_does_not_fit_is_told_by_its_shape() -> None:
    environments = GymnasiumEnvironments("CartPole-v1", 1, {})
    seen, acts = environments.observation_space, environments.action_space
    with pytest.raises(ConfigError, match=r"logits of shape \[2, 2\].*\[2, 3\]"):
        Policy(nn.Linear(4, 3), nn.Linear(4, 1), seen, acts)
    with pytest.raises(ConfigError, match="cannot take observations of shape"):
        Policy(nn.Linear(5, 2), nn.Linear(4, 1), seen, acts)
