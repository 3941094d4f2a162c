"""The Gymnasium adapter: typed spaces, seeds, success, and text for language models."""

from __future__ import annotations

import asyncio
import itertools
import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pydantic import ValidationError

from ludus.env.adapters.gymnasium.guides import find_guide
from ludus.env.adapters.gymnasium.spaces import make_codec, to_plain_json
from ludus.env.check import check_environment, check_server
from ludus.env.client import AsyncEnvClient
from ludus.env.encoding import decode_action
from ludus.env.serving.loopback import PlayOptions, open_client
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.env.targets.targets import environment_factory
from ludus.env.types import Transition
from ludus.proto.errors import (
    ActionParseError,
    ConfigError,
    EpisodeStateError,
    IllegalActionError,
    InvalidCallError,
    NotFoundError,
)
from tests.env.served import WIRES

SPACES = {
    "Discrete": spaces.Discrete(4, start=-1),
    "Box": spaces.Box(-2.0, 2.0, (2, 3), np.float32),
    "UnevenBox": spaces.Box(np.array([-1, 0]), np.array([1, 10]), dtype=np.float64),
    "IntBox": spaces.Box(0, 255, (4,), np.uint8),
    "UnboundedBox": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "Scalar": spaces.Box(-1.0, 1.0, (), np.float32),
    "MultiDiscrete": spaces.MultiDiscrete([3, 5]),
    "MultiBinary": spaces.MultiBinary((2, 2)),
    "Text": spaces.Text(8, min_length=2),
    "Tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(0.0, 1.0, (2,)))),
    "Dict": spaces.Dict({"left-arm": spaces.Discrete(3), "push": spaces.Box(-1.0, 1.0, (1,))}),
    "Sequence": spaces.Sequence(spaces.Discrete(3)),
}


class MirrorEnv(gymnasium.Env):
    """An environment whose observation is the last action, so that both have the same space."""

    def __init__(self, space: str, mask: bool = False) -> None:
        self.action_space = self.observation_space = SPACES[space]
        self._mask = mask

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        info = {"generator": self.np_random, "at": np.float32(0.5), "options": options}
        if self._mask:
            info["action_mask"] = np.array([0, 1, 1, 0], dtype=np.int8)
        return self.observation_space.sample(), info

    def step(self, action):
        return action, np.float64(1.5), np.bool_(False), np.bool_(True), {}


class CameraEnv(gymnasium.Env):
    """An environment whose observation has a picture and a number."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (32, 40, 3), np.uint8), "speed": spaces.Box(0, 1, (1,))}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        return self._observe(), 0.0, False, False, {}

    def _observe(self):
        picture = self.np_random.integers(0, 256, (32, 40, 3), dtype=np.uint8)
        return {"camera": picture, "speed": np.array([0.5], np.float32)}


class RoboticEnv(CameraEnv):
    """An environment that reports success in `info`, independently of the reward."""

    def step(self, action):
        return self._observe(), -1.0, False, True, {"is_success": np.float32(action)}


class StillEnv(CameraEnv):
    """An environment of nine steps with a reward of 0.1 for each step whose action is 0."""

    def reset(self, *, seed=None, options=None):
        self._num_steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self._num_steps += 1
        return self._observe(), 0.0 if action else 0.1, self._num_steps == 9, False, {}


gymnasium.register("ludus-tests/Mirror-v0", MirrorEnv)
gymnasium.register("ludus-tests/Still-v0", StillEnv, reward_threshold=0.9)
gymnasium.register("ludus-tests/Robotic-v0", RoboticEnv, reward_threshold=0.0)
gymnasium.register("ludus-tests/Camera-v0", CameraEnv)


def make_factory(env_id: str, **options):
    return environment_factory(f"gymnasium:{env_id}", options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "env_id",
    [
        "FrozenLake-v1",
        "CliffWalking-v1",
        "Taxi-v4",
        "Blackjack-v1",
        "CartPole-v1",
        "MountainCar-v0",
        "Pendulum-v1",
        "ludus-tests/Camera-v0",
    ],
)
def test_gymnasium_environments_pass_every_check(env_id: str) -> None:
    check_environment(make_factory(env_id), num_steps=12, seeds=range(4)).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES)
def test_actions_and_observations_support_every_space(space) -> None:
    factory = make_factory("ludus-tests/Mirror-v0", space=space)
    check_environment(factory, num_steps=4, seeds=range(6)).raise_if_failed()
    environment = factory()
    environment.reset(seed=1)
    codec = make_codec(SPACES[space], "action")
    SPACES[space].seed(3)
    element = SPACES[space].sample()
    encoded = codec.encode(element, {})
    observation = environment.step(environment.action_type(action=encoded)).observation
    assert (
        observation.model_dump(mode="json")["observation"]
        == environment.action_type(action=encoded).model_dump(mode="json")["action"]
    )


@pytest.mark.parametrize(
    ("space", "action"),
    [
        ("Discrete", 3),
        ("Discrete", "one"),
        ("Box", [[0.0, 0.0], [0.0, 0.0]]),
        ("Box", [[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]]),
        ("UnevenBox", [0.0, -1.0]),
        ("UnboundedBox", [0.0, 0.0]),
        ("UnboundedBox", [0.0, 0.0, float("nan")]),
        ("MultiDiscrete", [2, 5]),
        ("MultiBinary", [[0, 1], [2, 0]]),
        ("Text", "x"),
        ("Tuple", [0]),
        ("Dict", {"left-arm": 0}),
        ("Dict", {"left-arm": 0, "push": [0.0], "more": 1}),
    ],
)
def test_action_outside_the_space_fails_validation(space, action) -> None:
    environment = make_factory("ludus-tests/Mirror-v0", space=space)()
    with pytest.raises(ValidationError):
        environment.action_type(action=action)


def test_action_that_only_the_space_rejects_is_illegal() -> None:
    environment = make_factory("ludus-tests/Mirror-v0", space="UnboundedBox")()
    environment.reset(seed=1)
    with pytest.raises(IllegalActionError, match="expected numbers that fit float32"):
        environment.step(environment.action_type(action=[0.0, 0.0, 1e39]))
    assert environment.step(environment.action_type(action=[0.0, 0.0, 0.0])).truncated


def test_error_about_an_invalid_json_action_names_the_field() -> None:
    environment = make_factory("CartPole-v1")()
    with pytest.raises(InvalidCallError, match="action: Input should be less than or equal to 1"):
        decode_action(environment.action_type, b'{"action": 2}')


def test_non_json_values_in_info_become_text() -> None:
    environment = make_factory("ludus-tests/Mirror-v0", space="Discrete")()
    info = environment.reset(seed=1, low=3).info
    assert info["at"] == 0.5
    assert info["options"] == {"low": 3}
    assert info["generator"].startswith("Generator(")
    assert to_plain_json(np.zeros((64, 64))) == "array of shape (64, 64), float64"


def test_legal_actions_match_the_mask_and_are_empty_after_the_episode() -> None:
    environment = make_factory("ludus-tests/Mirror-v0", space="Discrete", mask=True)()
    observation = environment.reset(seed=1).observation
    assert observation.legal_actions == [0, 1]
    assert environment.text_renderer.legal_answers(observation) == ["0", "1"]
    assert environment.step(environment.action_type(action=0)).observation.legal_actions == []


def test_truncated_is_not_terminated_and_step_after_the_end_fails() -> None:
    environment = make_factory("FrozenLake-v1", max_episode_steps=2)()
    environment.reset(seed=1)
    action = environment.action_type(action=0)
    environment.step(action)
    transition = environment.step(action)
    assert (transition.terminated, transition.truncated) == (False, True)
    with pytest.raises(EpisodeStateError):
        environment.step(action)


def play_to_final_step(env_id: str, actions: list, **options) -> Transition:
    """Play an episode that repeats the actions, and return its last transition."""
    environment = make_factory(env_id, **options)()
    environment.reset(seed=3)
    for action in itertools.cycle(actions):
        transition = environment.step(environment.action_type(action=action))
        if transition.terminated or transition.truncated:
            return transition
        assert transition.success is None
    raise AssertionError("the infinite cycle of actions ended")


LEFT, DOWN, RIGHT, UP = range(4)


@pytest.mark.parametrize(
    ("actions", "options", "success"),
    [
        ([DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT], {}, True),
        ([DOWN, RIGHT], {}, False),
        ([LEFT], {"max_episode_steps": 5}, False),
        ([DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT], {"reward_schedule": [0, -1, 0]}, True),
    ],
)
def test_reaching_the_goal_is_success_with_any_reward(actions, options, success) -> None:
    transition = play_to_final_step("FrozenLake-v1", actions, is_slippery=False, **options)
    assert transition.success is success


def test_cliff_walking_goal_is_success_despite_negative_rewards() -> None:
    up, right, down = 0, 1, 2
    transition = play_to_final_step("CliffWalking-v1", [up, *[right] * 11, down])
    assert (transition.terminated, transition.success) == (True, True)
    assert play_to_final_step("CliffWalking-v1", [up], max_episode_steps=5).success is False
    final_step = play_to_final_step("CliffWalkingSlippery-v1", [up], max_episode_steps=5)
    assert final_step.success is False


def test_taxi_episode_that_is_truncated_is_not_a_success() -> None:
    assert play_to_final_step("Taxi-v4", [0], max_episode_steps=5).success is False


def test_success_requires_a_return_of_at_least_the_reward_threshold() -> None:
    assert play_to_final_step("CartPole-v1", [0, 1]).success is False
    assert play_to_final_step("CartPole-v1", [0, 1], max_episode_steps=9).success is False
    transition = play_to_final_step("ludus-tests/Still-v0", [0])
    assert (transition.reward, transition.success) == (0.1, True)
    assert play_to_final_step("ludus-tests/Still-v0", [1]).success is False


@pytest.mark.parametrize("action", [0, 1])
def test_success_reported_by_the_environment_takes_precedence(action) -> None:
    assert play_to_final_step("ludus-tests/Robotic-v0", [action]).success is bool(action)


@pytest.mark.parametrize(
    ("env_id", "action", "options"),
    [
        ("Pendulum-v1", [0.0], {}),
        ("ludus-tests/Mirror-v0", 0, {"space": "Discrete"}),
    ],
)
def test_success_is_unknown_if_the_environment_does_not_define_it(
    env_id: str, action, options
) -> None:
    assert play_to_final_step(env_id, [action], **options).success is None


def test_reset_without_seed_is_random_even_after_a_seeded_reset() -> None:
    environment = make_factory("CartPole-v1")()
    observations = set()
    for _ in range(4):
        environment.reset(seed=3)
        observations.add(str(environment.reset().observation))
    assert len(observations) == 4


NON_NUMBERS = ("--1", "-", "1-", "²", "٣", "1\x1e2", "1" * 5000, "-" + "9" * 5000, "[" * 100_000)
"""Completions that are not numbers. Python's number functions would accept some of them."""


@pytest.mark.parametrize(
    ("env_id", "answers"),
    [
        ("FrozenLake-v1", ["RIGHT", "down", "2", "<answer>UP</answer>", "I go left."]),
        ("Taxi-v4", ["SOUTH", "pickup"]),
        ("Blackjack-v1", ["HIT", "stick", "<think>or stick?</think> HIT"]),
        ("CartPole-v1", ["LEFT", "1"]),
        ("Pendulum-v1", ["[0.5]", "<answer>[-2]</answer>"]),
    ],
)
def test_text_actions_are_parsed_from_names_numbers_or_json(env_id: str, answers) -> None:
    environment = make_factory(env_id)()
    observation = environment.reset(seed=7).observation
    (message,) = environment.text_renderer.render(observation, first=True)
    assert env_id in message["content"]
    for text in answers:
        environment.text_renderer.parse(text, observation)
    for invalid_text in ("", "left and right", "7000", "[1, 2, 3]", "[" * 5000, *NON_NUMBERS):
        with pytest.raises(ActionParseError, match="expected "):
            environment.text_renderer.parse(invalid_text, observation)


def test_an_action_with_fields_is_shown_with_the_schema_of_each_field() -> None:
    environment = make_factory("ludus-tests/Mirror-v0", space="Dict")()
    observation = environment.reset(seed=7).observation
    (message,) = environment.text_renderer.render(observation, first=True)
    schema_line = message["content"].splitlines()[1]
    schema, _ = json.JSONDecoder().raw_decode(schema_line[schema_line.index("{") :])
    assert set(schema["properties"]) == {"left-arm", "push"}
    assert schema["properties"]["left-arm"]["maximum"] == 2
    assert "$ref" not in message["content"]
    environment.text_renderer.parse('{"left-arm": 2, "push": [0.5]}', observation)


def test_rendered_board_marks_the_player() -> None:
    environment = make_factory("FrozenLake-v1")()
    observation = environment.reset(seed=7).observation
    assert observation.rendered.splitlines()[0] == "[S]FFF"
    content = environment.text_renderer.render(observation, first=False)[0]["content"]
    assert content == "[S]FFF\nFHFH\nFFFH\nHFFG"


def render_first(env_id: str, seed: int, **options) -> list[str]:
    """Return the lines of the first message of an episode."""
    environment = make_factory(env_id, **options)()
    observation = environment.reset(seed=seed).observation
    (message,) = environment.text_renderer.render(observation, first=True)
    return message["content"].splitlines()


def test_taxi_is_described_in_words_beside_a_map_with_straight_columns() -> None:
    environment = make_factory("Taxi-v4")()
    for seed in range(30):
        environment.reset(seed=seed)
        taxi = environment.gym_env.unwrapped
        row, column, passenger, destination = taxi.decode(taxi.s)
        place_names = [
            f"{name} (row {r}, column {c})" for name, (r, c) in zip("RGYB", taxi.locs, strict=True)
        ]
        lines = render_first("Taxi-v4", seed)
        assert {len(line) for line in lines[2:9]} == {len("+---------+")}
        assert lines[9] == (
            f"The taxi is at row {row}, column {column}. The passenger waits at"
            f" {place_names[passenger]}. The destination is {place_names[destination]}."
        )
    assert "the delivery pays 20" in lines[0]
    assert "An episode has at most 200 steps." in lines[0]


def test_taxi_lists_the_moves_that_walls_allow_and_a_passenger_in_the_taxi() -> None:
    environment = make_factory("Taxi-v4")()
    observation = environment.reset(seed=0).observation
    taxi = environment.gym_env.unwrapped
    row, column = taxi.locs[0]
    taxi.s = taxi.encode(row, column, 0, 1)
    transition = environment.step(environment.text_renderer.parse("PICKUP", observation))
    (message,) = environment.text_renderer.render(transition.observation, first=False)
    assert "The passenger is in the taxi." in message["content"]
    assert message["content"].splitlines()[-1] == "Legal now: SOUTH, EAST, DROPOFF."


@pytest.mark.parametrize("hand", [(14, 10, 0), (18, 1, 1)])
def test_blackjack_hand_is_described_in_words(hand) -> None:
    describe = find_guide("Blackjack").describe
    kind, dealer_card = ("soft: an ace counts 11", "an ace") if hand[2] else ("hard", "10")
    assert describe(hand) == f"You hold {hand[0]} ({kind}). The dealer shows {dealer_card}."
    assert render_first("Blackjack-v1", 3)[-1].startswith("You hold ")


@pytest.mark.parametrize(
    ("env_id", "rule", "situation"),
    [
        ("CartPole-v1", "An episode has at most 500 steps.", "Cart position 0."),
        ("MountainCar-v0", "Each step costs 1 point.", "Position -0."),
        ("FrozenLake-v1", "which pays 1 point", "HFFG"),
        ("CliffWalking-v1", "Each step costs 1 point", "x  C"),
    ],
)
def test_text_states_rewards_and_limits_and_no_encoded_state(env_id, rule, situation) -> None:
    lines = render_first(env_id, 1)
    assert rule in lines[0]
    assert lines[-1].startswith(situation)
    assert not any(line.startswith("Observation") for line in lines)


def test_numbers_of_an_unexpected_form_are_shown_as_they_are() -> None:
    for name, observation in (("CartPole", [0.5]), ("Taxi", 500), ("Blackjack", 3)):
        assert find_guide(name).describe(observation) == ""


@pytest.mark.parametrize(
    ("env_id", "options", "may_slip"),
    [
        ("FrozenLake-v1", {}, True),
        ("FrozenLake-v1", {"is_slippery": False}, False),
        ("CliffWalking-v1", {}, False),
        ("CliffWalking-v1", {"is_slippery": True}, True),
        ("CliffWalkingSlippery-v1", {}, True),
        ("CartPole-v1", {}, False),
    ],
)
def test_the_rules_mention_slipping_if_actions_may_slip(env_id: str, options, may_slip) -> None:
    environment = make_factory(env_id, **options)()
    observation = environment.reset(seed=7).observation
    content = environment.text_renderer.render(observation, first=True)[0]["content"]
    assert ("You may slip sideways." in content) == may_slip


def test_action_names_and_instructions_can_be_set() -> None:
    environment = make_factory(
        "CartPole-v1", action_names=["WEST", "EAST"], instructions="Balance."
    )()
    observation = environment.reset(seed=1).observation
    assert environment.text_renderer.legal_answers(observation) == ["WEST", "EAST"]
    assert "Balance." in environment.text_renderer.render(observation, first=True)[0]["content"]
    assert environment.options == {}


@pytest.mark.parametrize("wire", WIRES)
async def test_large_box_is_sent_as_a_tensor_and_described_in_the_schema(wire: str) -> None:
    factory = make_factory("ludus-tests/Camera-v0")
    async with EnvServer(factory, ServerOptions(port=0)) as server:
        address = server.grpc_address if wire == "grpc" else server.http_address
        async with await AsyncEnvClient.connect(address) as client:
            description = await client.describe()
            _, first_result = await client.open(seed=3)
    camera = first_result.tensors["observation.camera"]
    assert (camera.shape, camera.dtype) == ((32, 40, 3), np.uint8)
    assert first_result.observation["observation"] == {"camera": None, "speed": [0.5]}
    original_observation, _ = gymnasium.make("ludus-tests/Camera-v0").reset(seed=3)
    assert np.array_equal(camera, original_observation["camera"])
    assert "tensor 'observation.camera', uint8, shape [32, 40, 3]" in str(
        description.observation_schema
    )


@pytest.mark.slow
def test_server_passes_all_protocol_checks() -> None:
    async def find_broken_checks() -> list[str]:
        async with open_client(make_factory("Taxi-v4"), PlayOptions(max_sessions=4)) as client:
            report = await check_server(client, num_steps=8, seeds=range(3))
            broken_checks = [check for check in report.checks if check.verdict == "broken"]
            return [f"{check.name}: {check.detail}" for check in broken_checks]

    assert asyncio.run(find_broken_checks()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_slipery": False}, "unexpected keyword argument"),
        ({"desc": {1, 2}}, "options must be JSON"),
    ],
)
def test_invalid_options_raise_config_error(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_factory("FrozenLake-v1", **options)()


def test_module_prefix_of_the_id_is_imported(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers.py").write_text(
        "import gymnasium\ngymnasium.register('Own-v0', 'gymnasium.envs.toy_text:FrozenLakeEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    environment = make_factory("registers:Own-v0", is_slippery=False)()
    assert environment.reset(seed=1).observation.legal_actions == [0, 1, 2, 3]
    with pytest.raises(NotFoundError, match="needs the module 'no_such_module'"):
        make_factory("no_such_module:Own-v0")


def test_unsupported_space_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="use one of Discrete, Box"):
        make_codec(spaces.Graph(spaces.Discrete(2), None), "observation")
