"""Every example is a run that could start, and `make learn` judges what it holds."""

from __future__ import annotations

import importlib
from pathlib import Path

import learn
import learn_agents
import learn_language
import pytest

from ludus.env.targets.targets import make_environment
from ludus.proto.config import LocalEnvironment, load_run_config
from ludus.proto.config.environment import RANDOM_POLICY
from ludus.proto.runs import EvalReport, PolicyResult

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*/*.toml") if path.parent.name != "reward_model"
)

DATA_ARE_MADE_FIRST = {learn_language.RLHF}
NEEDS = {
    "inverted_pendulum/ppo.toml": ("mujoco", "imageio"),
    "inverted_pendulum/pybullet.toml": ("pybullet", "pybullet_envs_gymnasium"),
}
"""Libraries that an example asks for and `make setup` does not install."""

CLAIM_NOTHING = {
    "atari/pong.toml",
    "connect_four/mcts.toml",
    "email/tiny.toml",
    "go/tiny.toml",
    "math/rule.toml",
    "trading/tiny.toml",
    "uno/tiny.toml",
}
"""They show an environment, or how rows are scored, and do not say how much is learned."""


def report(
    num_games: int, win_rate: float, draw_rate: float = 0.0, gap_closed: float | None = None
) -> EvalReport:
    judged = PolicyResult(
        num_games=num_games,
        win_rate=win_rate,
        win_rate_ci95=(win_rate - 0.01, win_rate + 0.01),
        draw_rate=draw_rate,
        expected_return=0.0,
        expected_return_ci95=(0.0, 0.0),
    )
    return EvalReport(
        policy=judged,
        baselines={},
        temperature=1.0,
        gap_closed=gap_closed,
        gap_closed_ci95=None if gap_closed is None else (gap_closed - 0.1, gap_closed + 0.1),
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_example_names_environments_that_exist_and_policies_that_they_have(path: Path) -> None:
    run = load_run_config(path)
    name = f"{path.parent.name}/{path.name}"
    if name in DATA_ARE_MADE_FIRST:
        pytest.skip("its data are no part of the repository")
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    for environment in run.environments.values():
        assert isinstance(environment, LocalEnvironment)
        built = make_environment(environment.package, environment.options)
        if environment.policies is None:
            assert set(environment.baselines) <= {RANDOM_POLICY}
            continue
        module, _, function = environment.policies.partition(":")
        policies = getattr(importlib.import_module(module), function)(built.options)
        assert set(environment.baselines) <= set(policies)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_example_of_a_tiny_model_is_measured_by_make_learn(path: Path) -> None:
    if load_run_config(path).model.kind != "tiny":
        pytest.skip("needs a GPU")
    name = f"{path.parent.name}/{path.name}"
    in_language = {learn_language.COT, learn_language.SUMMARIZATION, learn_language.RLHF}
    of_frameworks = {str(learn_agents.EXAMPLE.relative_to(ROOT / "examples"))}
    measured = {case.example for case in learn.CASES.values()} | in_language | of_frameworks
    assert (name in measured) != (name in CLAIM_NOTHING)


def test_targets_name_environments_of_their_example() -> None:
    for case in learn.CASES.values():
        run = load_run_config(ROOT / "examples" / case.example, list(case.overrides))
        assert set(case.targets) <= set(run.environments)
        assert {target.metric for target in case.targets.values()} <= set(learn.METRICS)


def test_games_that_were_not_lost_are_those_won_or_drawn_with_a_wilson_interval() -> None:
    share, (low, high) = learn.not_lost(report(1000, win_rate=0.9, draw_rate=0.08))
    assert share == pytest.approx(0.98)
    assert 0.965 < low < 0.98 < high < 0.99


def test_the_gap_is_judged_by_its_own_interval() -> None:
    assert learn.gap_closed(report(1000, win_rate=0.4, gap_closed=0.9)) == (
        0.9,
        (0.8, 1.0),
    )
