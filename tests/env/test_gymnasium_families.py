"""Text for Gymnasium environments with images, labeled numbers, or large action spaces."""

from __future__ import annotations

import base64

import gymnasium
import httpx
import numpy as np
import orjson
import pytest
from gymnasium import spaces

from ludus.env.adapters.gymnasium.guides import GUIDES, Guide, find_guide
from ludus.env.adapters.gymnasium.text import MAX_LISTED_ACTIONS, GymnasiumRenderer, draw_picture
from ludus.env.contract.rules import is_deterministic
from ludus.env.contract.schema import find_fault
from ludus.env.encoding import encode_transition
from ludus.env.messages.openenv import make_upstream_payload
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.env.sessions.hosts import describe_environment
from ludus.env.targets.targets import environment_factory
from ludus.env.types import Action, Observation
from ludus.proto.errors import ActionParseError, ConfigError

PICTURE = np.arange(32 * 40 * 3, dtype=np.uint8).reshape(32, 40, 3)


class MissionSpace(spaces.Space):
    """A custom space of strings, like the mission space of MiniGrid."""

    def sample(self, mask=None, probability=None):
        return "go to the red ball"

    def contains(self, x):
        return x == "go to the red ball"


class FixedEnv(gymnasium.Env):
    """An environment whose observation is a fixed element of a space."""

    def __init__(self, space, element, num_actions=2, mask=None, missing_module="") -> None:
        self.observation_space = space
        self.action_space = spaces.Discrete(num_actions, start=3)
        self._element, self._mask = element, mask
        if missing_module:
            message = f"No module named '{missing_module}'"
            raise ModuleNotFoundError(message, name=missing_module)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._element, {} if self._mask is None else {"action_mask": self._mask}

    def step(self, action):
        return self._element, 0.0, True, False, {}


class PictureEnv(FixedEnv):
    def __init__(self, **options) -> None:
        super().__init__(spaces.Box(0, 255, PICTURE.shape, np.uint8), PICTURE, **options)


class PairOfPicturesEnv(FixedEnv):
    def __init__(self) -> None:
        box = spaces.Box(0, 255, PICTURE.shape, np.uint8)
        space = spaces.Dict({"eyes": spaces.Tuple((box, box)), "speed": spaces.Discrete(3)})
        super().__init__(space, {"eyes": (PICTURE, PICTURE), "speed": 1})


class MissionEnv(FixedEnv):
    def __init__(self) -> None:
        space = spaces.Dict({"mission": MissionSpace(), "direction": spaces.Discrete(4)})
        super().__init__(space, {"mission": "go to the red ball", "direction": 2})


class ManyActionsEnv(FixedEnv):
    def __init__(self, mask=None, **options) -> None:
        action_mask = None if mask is None else np.isin(np.arange(50_257), mask).astype(np.int8)
        super().__init__(spaces.Discrete(2), 1, 50_257, action_mask, **options)


for env in (PictureEnv, PairOfPicturesEnv, MissionEnv, ManyActionsEnv):
    gymnasium.register(f"ludus-families/{env.__name__}-v0", env)


def make_factory(name: str, **options):
    return environment_factory(f"gymnasium:{name}", options)


def make_test_factory(env, **options):
    return make_factory(f"ludus-families/{env.__name__}-v0", **options)


@pytest.fixture(autouse=True)
def use_temporary_folder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a temporary folder, because MuJoCo writes a log into the working folder."""
    monkeypatch.chdir(tmp_path)


def test_environment_with_image_observations_has_no_text_view() -> None:
    environment = make_test_factory(PictureEnv)()
    assert environment.text_renderer is None
    assert not describe_environment(environment).has_text_view
    assert describe_environment(make_test_factory(PairOfPicturesEnv)()).has_text_view


def test_picture_columns_option_renders_images_as_digits() -> None:
    environment = make_test_factory(PictureEnv, picture_columns=10)()
    observation = environment.reset(seed=1).observation
    (first_message,) = environment.text_renderer.render(observation, first=True)
    assert "from 0 for black to 9 for white" in first_message["content"]
    (message,) = environment.text_renderer.render(observation, first=False)
    rows = message["content"].splitlines()
    assert [len(row) for row in rows] == [10] * 8
    assert rows == observation.picture.splitlines()


def test_digit_of_a_picture_is_the_mean_brightness_of_its_cell() -> None:
    picture = np.zeros((4, 6, 3), np.uint8)
    picture[:2, 2:4] = 255
    picture[2:, 4:] = 128
    assert draw_picture(picture, 3) == "090\n005"
    assert draw_picture(picture[:, :, 0], 1) == "2"


@pytest.mark.parametrize(
    ("target", "num_columns", "content"),
    [
        ("ludus-families/PictureEnv-v0", 41, "must be 1 to 40, the picture's width, got 41"),
        (
            "ludus-families/PictureEnv-v0",
            "many",
            "must be 1 to 40, the picture's width, got 'many'",
        ),
        ("CartPole-v1", 8, "pictures of height x width"),
    ],
)
def test_invalid_picture_columns_raise_config_error(target: str, num_columns: int, content) -> None:
    with pytest.raises(ConfigError, match=content):
        make_factory(target, picture_columns=num_columns)()


@pytest.mark.slow
async def test_upstream_clients_get_the_image_in_the_observation() -> None:
    async with (
        EnvServer(make_test_factory(PictureEnv), ServerOptions(port=0)) as server,
        httpx.AsyncClient(base_url=server.http_address) as client,
    ):
        observation = (await client.post("/reset", json={"seed": 1})).json()["observation"]
        schema = (await client.get("/schema")).json()["observation"]
    picture = observation["observation"]
    pixels = np.frombuffer(base64.b64decode(picture["data"]), picture["dtype"])
    assert np.array_equal(pixels.reshape(picture["shape"]), PICTURE)
    assert find_fault(observation, schema) == ""


def test_upstream_payload_contains_nested_images() -> None:
    environment = make_test_factory(PairOfPicturesEnv)()
    encoded = encode_transition(environment.reset(seed=1), None, 0)
    payload = orjson.loads(orjson.dumps(make_upstream_payload(encoded)))
    eyes = payload["observation"]["observation"]["eyes"]
    assert [eye["shape"] for eye in eyes] == [[32, 40, 3]] * 2
    assert orjson.loads(encoded.observation_json)["observation"]["eyes"] == [None, None]


SIZES_BY_ID = {
    "Acrobot-v1": (6, ()),
    "Ant-v5": (105, (8,)),
    "BipedalWalker-v3": (24, (4,)),
    "CartPole-v1": (4, ()),
    "HalfCheetah-v5": (17, (6,)),
    "Hopper-v5": (11, (3,)),
    "Humanoid-v5": (348, (17,)),
    "HumanoidStandup-v5": (348, (17,)),
    "InvertedDoublePendulum-v5": (9, (1,)),
    "InvertedPendulum-v5": (4, (1,)),
    "LunarLander-v3": (8, ()),
    "MountainCar-v0": (2, ()),
    "MountainCarContinuous-v0": (2, (1,)),
    "Pendulum-v1": (3, (1,)),
    "Pusher-v5": (23, (7,)),
    "Reacher-v5": (10, (2,)),
    "Swimmer-v5": (8, (2,)),
    "Walker2d-v5": (17, (6,)),
}
"""Size of an observation and shape of an action, from Gymnasium's documentation."""


@pytest.mark.parametrize("env_id", SIZES_BY_ID)
def test_known_environments_have_labels_for_observations_and_actions(env_id: str) -> None:
    num_observed_values, action_shape = SIZES_BY_ID[env_id]
    guide = GUIDES[env_id.rpartition("-")[0]]
    assert guide.instructions
    assert (
        len(guide.find_observation_labels(num_observed_values))
        == min(num_observed_values, len(guide.observation_labels))
        > 0
    )
    assert len(set(guide.observation_labels)) == len(guide.observation_labels)
    assert len(guide.action_labels) == (action_shape[0] if action_shape else 0)


@pytest.mark.parametrize("env_id", SIZES_BY_ID)
def test_expected_sizes_match_the_installed_environments(env_id: str) -> None:
    try:
        environment = gymnasium.make(env_id)
    except gymnasium.error.DependencyNotInstalled:
        pytest.skip("the library of the environment is not installed")
    with environment:
        shapes = (environment.observation_space.shape[0], environment.action_space.shape)
    assert shapes == SIZES_BY_ID[env_id]


@pytest.mark.parametrize(
    ("env_id", "instructions", "label"),
    [
        (
            "Pendulum-v1",
            "Its numbers are: torque, positive counterclockwise.",
            "sine of the angle: ",
        ),
        ("MountainCarContinuous-v0", "Its numbers are: force, negative to", "position: -0."),
        ("Acrobot-v1", "Answer with one of: NEGATIVE, NONE", "cosine of the first angle: "),
    ],
)
def test_numbers_are_rendered_with_labels(env_id: str, instructions: str, label) -> None:
    environment = make_factory(env_id)()
    observation = environment.reset(seed=1).observation
    (first_message,) = environment.text_renderer.render(observation, first=True)
    (later_message,) = environment.text_renderer.render(observation, first=False)
    assert instructions in first_message["content"]
    assert label in later_message["content"]


def test_labels_apply_to_the_first_numbers_only_if_the_size_matches() -> None:
    class NumbersObservation(Observation):
        observation: list[float]

    guide = Guide(observation_labels=("height", "speed"), observation_size=4)
    renderer = GymnasiumRenderer("Own-v0", Action, spaces.Box(0, 1), guide)

    def render(*numbers):
        (message,) = renderer.render(NumbersObservation(observation=list(numbers)), first=False)
        return message["content"]

    assert render(1, 2, 3, 4) == "Observation: height: 1, speed: 2, and 2 more: [3, 4]"
    assert render(1, 2, 3) == "Observation: [1, 2, 3]"


def test_guide_covers_all_minigrid_ids_but_not_ids_with_a_similar_prefix() -> None:
    for name in ("MiniGrid-Empty-5x5", "BabyAI-GoToRedBall"):
        assert find_guide(name).action_names[:3] == ("LEFT", "RIGHT", "FORWARD")
    assert find_guide("Ant-Own") == Guide()


def test_custom_space_with_string_samples_is_rendered_as_text() -> None:
    environment = make_test_factory(MissionEnv)()
    observation = environment.reset(seed=1).observation
    assert observation.model_dump()["observation"]["mission"] == "go to the red ball"
    (message,) = environment.text_renderer.render(observation, first=False)
    assert message["content"] == "Observation: direction: 2, mission: go to the red ball"


def test_many_actions_are_described_by_their_range() -> None:
    environment = make_test_factory(ManyActionsEnv)()
    observation = environment.reset(seed=1).observation
    assert (observation.legal_actions, observation.num_legal_actions) == (None, 50_257)
    assert environment.text_renderer.legal_answers(observation) == []
    (message,) = environment.text_renderer.render(observation, first=True)
    assert "Answer with one of: the numbers from 3 to 50259." in message["content"]
    assert len(message["content"]) < 500
    fields = environment.observation_type.model_json_schema()["properties"]
    assert "from 3 to 50259" in fields["num_legal_actions"]["description"]
    action = environment.text_renderer.parse("50259", observation)
    with pytest.raises(ActionParseError) as error_info:
        environment.text_renderer.parse("2", observation)
    assert len(str(error_info.value)) < 500
    last_observation = environment.step(action).observation
    assert (last_observation.legal_actions, last_observation.num_legal_actions) == ([], 0)


@pytest.mark.slow
def test_few_legal_actions_of_a_large_space_are_listed() -> None:
    environment = make_test_factory(ManyActionsEnv, mask=[0, 50_256])()
    start = environment.reset(seed=1).observation
    assert (start.legal_actions, start.num_legal_actions) == ([3, 50_259], 2)
    assert environment.text_renderer.legal_answers(start) == ["3", "50259"]
    environment = make_test_factory(ManyActionsEnv, mask=list(range(MAX_LISTED_ACTIONS + 1)))()
    start = environment.reset(seed=1).observation
    assert (start.legal_actions, start.num_legal_actions) == (None, MAX_LISTED_ACTIONS + 1)


MODULE_WITHOUT_LIBRARY = """
from gymnasium.error import DependencyNotInstalled

raise DependencyNotInstalled('Box2D is not installed, run `pip install "gymnasium[box2d]"`')
"""


def test_missing_library_error_names_the_package_to_install(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_a_library.py").write_text(MODULE_WITHOUT_LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("ludus-families/Lacking-v0", "lacks_a_library:Env")
    with pytest.raises(ConfigError, match=r"needs a library: .*gymnasium\[box2d\]"):
        make_factory("ludus-families/Lacking-v0")()
    with pytest.raises(ConfigError, match=r"needs a library: No module.*; pip install mujoco"):
        make_test_factory(PictureEnv, missing_module="mujoco.bindings")()


def test_warning_about_a_slow_determinism_check_names_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not is_deterministic(make_factory("CartPole-v1"), budget_s=0.0)
    assert "serve it with --deterministic" in caplog.text
