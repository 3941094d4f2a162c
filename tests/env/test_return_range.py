"""Returns that environments declare, over every wire, and the reward of an invalid action."""

import math

import gymnasium
import pytest

from ludus.env import ReturnRange
from ludus.env.check.check import check_environment
from ludus.env.client import AsyncEnvClient
from ludus.env.messages.protobuf import read_description
from ludus.env.sessions.hosts import describe_environment
from ludus.env.targets.targets import environment_factory
from ludus.proto.env.v1 import env_pb2 as pb
from tests.env.counting_env import CountingEnv
from tests.env.served import WIRES, serve, server_address


class RangedEnv(CountingEnv):
    """A counting environment that declares a range for all of its returns."""

    @property
    def return_range(self) -> ReturnRange:
        return ReturnRange(-2.5e12, 5e12)


class LyingEnv(CountingEnv):
    """A counting environment whose returns are outside the declared range."""

    @property
    def return_range(self) -> ReturnRange:
        return ReturnRange(-2.0, -1.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("wire", WIRES)
async def test_clients_read_the_declared_range(wire: str) -> None:
    for factory, expected in ((RangedEnv, ReturnRange(-2.5e12, 5e12)), (CountingEnv, None)):
        async with (
            serve(factory) as server,
            await AsyncEnvClient.connect(server_address(server, wire)) as client,
        ):
            assert (await client.describe()).return_range == expected


def test_impossible_range_of_a_server_counts_as_not_declared() -> None:
    for lowest, highest in ((1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.inf)):
        bounds = pb.ReturnRange(lowest=lowest, highest=highest)
        assert read_description(pb.DescribeResponse(return_range=bounds)).return_range is None


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (0.0, math.inf), (math.nan, 0.0)])
def test_impossible_range_is_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="different finite numbers"):
        ReturnRange(*bounds)


@pytest.mark.parametrize(
    ("lowest", "highest", "reward"),
    [(-1, 1, -2), (0, 1, -1), (-13, 13, -26), (1, 2, -2), (-2, -1, -2.5), (0, 1000, -1000)],
)
def test_no_invalid_episode_ends_above_the_lowest_return(
    lowest: float, highest: float, reward: float
) -> None:
    declared_range = ReturnRange(lowest, highest)
    assert declared_range.invalid_action_reward == reward < lowest
    assert highest + declared_range.invalid_action_reward <= lowest


def test_reward_of_an_invalid_action_scales_with_the_returns() -> None:
    rewards = [ReturnRange(-scale, scale).invalid_action_reward for scale in (1.0, 10.0)]
    assert rewards[1] == 10 * rewards[0]


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "is_broken"), [(RangedEnv, False), (LyingEnv, True)])
def test_check_finds_returns_outside_the_range(factory, is_broken: bool) -> None:
    report = check_environment(factory, num_steps=20)
    broken_checks = [check.name for check in report.checks if check.verdict == "broken"]
    assert broken_checks == ["returns_are_in_the_declared_range"] * is_broken


class SteppedEnv(gymnasium.Env):
    """An environment that declares the range of a step's reward, as old environments do."""

    action_space = observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reward_range: tuple[float, float] = (-math.inf, math.inf)) -> None:
        self.reward_range = reward_range

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, float(action), False, False, {}


gymnasium.register("ludus-tests/Stepped-v0", SteppedEnv, max_episode_steps=20)
gymnasium.register("ludus-tests/Endless-v0", SteppedEnv)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("Stepped", {"reward_range": [-1.0, 0.5]}, ReturnRange(-20.0, 10.0)),
        ("Stepped", {"reward_range": [0.5, 1.0]}, ReturnRange(0.5, 20.0)),
        ("Stepped", {}, None),
        ("Stepped", {"reward_range": "unknown"}, None),
        ("Endless", {"reward_range": [-1.0, 0.5]}, None),
    ],
)
def test_gymnasium_range_follows_from_rewards_and_step_limit(name, options, expected) -> None:
    environment = environment_factory(f"gymnasium:ludus-tests/{name}-v0", options)()
    assert describe_environment(environment).return_range == expected


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("openspiel_env", {"game": "blackjack"}, ReturnRange(-1.0, 1.0)),
        ("openspiel_env", {"game": "kuhn_poker"}, ReturnRange(-2.0, 2.0)),
        ("openspiel_env", {"game": "2048"}, None),
        ("math_env", {}, ReturnRange(0.0, 1.0)),
        ("coding_env", {}, ReturnRange(0.0, 1.0)),
        ("uno_env", {}, ReturnRange(-1.0, 1.0)),
        ("trading_env", {}, None),
        ("gymnasium:CartPole-v1", {}, None),
        ("gymnasium:FrozenLake8x8-v1", {}, ReturnRange(0.0, 1.0)),
        (
            "gymnasium:FrozenLake-v1",
            {"reward_schedule": [1, -1, -0.5]},
            ReturnRange(-100.0, 100.0),
        ),
    ],
)
def test_packages_declare_their_returns(target, options, expected) -> None:
    environment = environment_factory(target, options)()
    try:
        assert environment.return_range == expected
    finally:
        environment.close()
