"""Configurations of the examples, and their measurement by `make learn`."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import learn
import learn_agents
import learn_language
import pytest

from examples.number_guess import players
from ludus.env.targets.scaffolding import write_environment
from ludus.env.targets.targets import environment_factory
from ludus.proto.config import (
    LanguageModelRun,
    LocalEnvironment,
    load_run_config,
    load_sft_config,
)
from ludus.proto.config.environment import RANDOM_POLICY
from ludus.proto.config.network import LocalNetworkEnvironment
from ludus.proto.runs import EvalReport, PolicyResult

ROOT = Path(__file__).parents[2]
CONFIG_PATHS = sorted(
    path for path in (ROOT / "examples").glob("*/*.toml") if path.parent.name != "reward_model"
)
SFT_PATHS = [path for path in CONFIG_PATHS if path.parent.name == "sft" or path.stem == "sft"]
EXAMPLE_PATHS = [path for path in CONFIG_PATHS if path not in SFT_PATHS]

GENERATED_PACKAGES = {"number_guess/smollm2.toml": "number_guess"}
"""Names of the packages that `ludus env init` writes for an example."""
GENERATED_DATA = {learn_language.RLHF, "thinking/smollm2.toml"}
"""Examples whose data set is not in the repository."""
REQUIRED_LIBRARIES = {
    "inverted_pendulum/ppo.toml": ("mujoco", "imageio"),
    "inverted_pendulum/pybullet.toml": ("pybullet", "pybullet_envs_gymnasium"),
}
"""Libraries that an example needs but `make setup` does not install."""

EXAMPLES_WITHOUT_CLAIM = {
    "atari/pong.toml",
    "connect_four/mcts.toml",
    "email/tiny.toml",
    "go/tiny.toml",
    "math/rule.toml",
    "trading/tiny.toml",
    "uno/tiny.toml",
}
"""Examples that make no claim about learning."""


def make_report(
    num_games: int, win_rate: float, draw_rate: float = 0.0, gap_closed: float | None = None
) -> EvalReport:
    policy_result = PolicyResult(
        num_games=num_games,
        win_rate=win_rate,
        win_rate_ci95=(win_rate - 0.01, win_rate + 0.01),
        draw_rate=draw_rate,
        expected_return=0.0,
        expected_return_ci95=(0.0, 0.0),
    )
    return EvalReport(
        policy=policy_result,
        baselines={},
        temperature=1.0,
        gap_closed=gap_closed,
        gap_closed_ci95=None if gap_closed is None else (gap_closed - 0.1, gap_closed + 0.1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLE_PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_environments_and_baselines_of_examples_exist(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run_config(path)
    name = f"{path.parent.name}/{path.name}"
    if name in GENERATED_PACKAGES:
        write_environment(GENERATED_PACKAGES[name], tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
    if name in GENERATED_DATA:
        pytest.skip("the data set of the example is not in the repository")
    for module in REQUIRED_LIBRARIES.get(name, ()):
        pytest.importorskip(module)
    for environment in run.environments.values():
        assert isinstance(environment, LocalEnvironment | LocalNetworkEnvironment)
        options = environment_factory(environment.package, environment.options)().options
        if isinstance(environment, LocalNetworkEnvironment) or environment.policies is None:
            assert set(environment.baselines) <= {RANDOM_POLICY}
            continue
        module, _, function = environment.policies.partition(":")
        policies = getattr(importlib.import_module(module), function)(options)
        assert set(environment.baselines) <= set(policies)


@pytest.mark.parametrize("path", SFT_PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_fine_tuning_examples_are_valid_configurations(path: Path) -> None:
    assert load_sft_config(path).kind == "sft"


@pytest.mark.parametrize("path", EXAMPLE_PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_make_learn_measures_every_tiny_example(path: Path) -> None:
    run = load_run_config(path)
    if not isinstance(run, LanguageModelRun) or run.model.kind != "tiny":
        pytest.skip("the example does not train a tiny language model")
    name = f"{path.parent.name}/{path.name}"
    language_examples = {learn_language.COT, learn_language.SUMMARIZATION, learn_language.RLHF}
    agent_examples = {str(learn_agents.EXAMPLE.relative_to(ROOT / "examples"))}
    measured_examples = (
        {case.example for case in learn.CASES.values()} | language_examples | agent_examples
    )
    assert (name in measured_examples) != (name in EXAMPLES_WITHOUT_CLAIM)


def test_half_of_the_careless_guesses_are_random() -> None:
    (guess,) = players.fixed_policies({}).values()
    observation = {"lowest": 9, "highest": 15, "legal_actions": list(range(1, 16))}
    rng = random.Random(0)
    guesses = [guess(observation, rng)["guess"] for _ in range(600)]
    assert set(guesses) == set(range(1, 16))
    assert guesses.count(12) / len(guesses) == pytest.approx(0.5 + 0.5 / 15, abs=0.07)


def test_learning_targets_are_environments_of_the_example() -> None:
    for case in learn.CASES.values():
        run = load_run_config(ROOT / "examples" / case.example, list(case.overrides))
        assert set(case.targets) <= set(run.environments)
        assert {target.metric for target in case.targets.values()} <= set(learn.METRICS)


def test_not_lost_share_has_a_wilson_interval() -> None:
    share, (low, high) = learn.not_lost(make_report(1000, win_rate=0.9, draw_rate=0.08))
    assert share == pytest.approx(0.98)
    assert 0.965 < low < 0.98 < high < 0.99


def test_closed_gap_uses_the_gap_interval() -> None:
    assert learn.gap_closed(make_report(1000, win_rate=0.4, gap_closed=0.9)) == (
        0.9,
        (0.8, 1.0),
    )
