"""Tests of Atari games: seeds, observations, text and rewards."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import atari_env
from atari_env import AtariAction, AtariEnv, AtariObservation
from atari_env.facts import read_facts
from atari_env.policies import fixed_policies
from ludus.env.check import check_environment
from ludus.env.client import AsyncEnvClient
from ludus.env.serving import application as serving_application
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.errors import (
    ActionParseError,
    ConfigError,
    EpisodeStateError,
    IllegalActionError,
    InvalidCallError,
    NotFoundError,
)

pytest.importorskip("ale_py", reason="ale-py is optional because it is under the GPL-2.0")

SHORT_EPISODE = {"max_turns": 8}
_environments: list[Any] = []


@pytest.fixture(autouse=True)
def close_environments() -> Iterator[None]:
    """Close the environments of a test."""
    yield
    while _environments:
        _environments.pop().close()


def make_environment(**options: Any) -> Any:
    """Return an environment that is closed after the test."""
    _environments.append(atari_env.make_environment(**options))
    return _environments[-1]


def play_episode(policy: str, seed: int, **options: Any) -> list[float]:
    """Play an episode, and return the reward of each step."""
    environment = make_environment(**options)
    choose_action, rng = fixed_policies(options)[policy], random.Random(f"player {seed}")
    transition = environment.reset(seed=seed)
    rewards: list[float] = []
    while not (transition.terminated or transition.truncated):
        action = choose_action(transition.observation.model_dump(), rng)
        transition = environment.step(AtariAction.model_validate(action))
        assert transition.reward is not None
        rewards.append(transition.reward)
    return rewards


def render(environment: Any, observation: AtariObservation) -> str:
    messages = environment.text_renderer.render(observation, first=True)
    return "\n".join(message["content"] for message in messages)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["ms_pacman"])
def test_environment_contract(game: str) -> None:
    def make_with_options() -> Any:
        return atari_env.make_environment(game=game, **SHORT_EPISODE)

    check_environment(make_with_options, seeds=range(2), num_steps=4).raise_if_failed()


def test_module_is_importable_as_in_openenv_docs() -> None:
    atari_module = importlib.import_module("envs.atari_env")
    assert atari_module.AtariAction(action_id=2).game_name == "pong"
    assert atari_module.AtariEnv.default_url == "http://localhost:8007"


@pytest.mark.slow
def test_seed_determines_the_screens() -> None:
    options: dict[str, Any] = {"repeat_action_probability": 0.25, "max_turns": 40}
    environment = make_environment(**options)

    def record_screens(seed: int) -> list[Any]:
        rng = random.Random(5)
        screens = [environment.reset(seed=seed).observation.screen]
        screens += [environment.step(AtariAction(action_id=rng.randrange(6))).observation.screen]
        while environment.state.step_count < 40:
            transition = environment.step(AtariAction(action_id=rng.randrange(6)))
            screens.append(transition.observation.screen)
        return screens

    first_screens, second_screens = record_screens(1), record_screens(2)
    assert record_screens(1) == first_screens != second_screens
    environment = make_environment(**options)
    assert record_screens(1) == first_screens


@pytest.mark.long
@pytest.mark.slow
def test_ball_following_policy_beats_waiting_and_random_policies() -> None:
    pong = {"game": "pong", "max_scores": 1}
    returns = {
        name: sum(map(sum, (play_episode(name, seed, **pong) for seed in range(4))))
        for name in ("follow", "wait")
    }
    assert returns["wait"] == -4.0
    assert returns["follow"] >= 2.0
    breakout = {"game": "breakout", "max_turns": 250}
    follow_return, random_return = (
        sum(play_episode(name, 1, **breakout)) for name in ("follow", "random")
    )
    assert follow_return >= 5 > random_return


@pytest.mark.slow
def test_only_games_with_an_opponent_report_success() -> None:
    pong = make_environment(max_scores=1)
    result = pong.reset(seed=1)
    while not result.terminated:
        result = pong.step(AtariAction(action_id=0))
    assert (result.reward, result.success, result.observation.legal_actions) == (-1.0, False, [])
    assert render(pong, result.observation) == "over"
    with pytest.raises(EpisodeStateError):
        pong.step(AtariAction(action_id=0))
    shooter = make_environment(game="space_invaders", max_turns=1)
    shooter.reset(seed=1)
    result = shooter.step(AtariAction(action_id=1))
    assert (result.truncated, result.terminated, result.success) == (True, False, None)


@pytest.mark.slow
def test_invalid_actions_do_not_change_the_state() -> None:
    environment = make_environment()
    with pytest.raises(EpisodeStateError):
        environment.step(AtariAction(action_id=0))
    environment.reset(seed=1)
    with pytest.raises(IllegalActionError, match=r"from 0 to 5 .*RIGHTFIRE.*got 6"):
        environment.step(AtariAction(action_id=6))
    with pytest.raises(InvalidCallError, match=r"game_name 'pong'.*'breakout'"):
        environment.step(AtariAction(action_id=0, game_name="breakout"))
    with pytest.raises(InvalidCallError, match="full_action_space False"):
        environment.step(AtariAction(action_id=0, full_action_space=True))
    with pytest.raises(InvalidCallError, match=r"obs_type 'ram'.*'grayscale'"):
        environment.step(AtariAction(action_id=0, obs_type="grayscale"))
    assert environment.state.step_count == 0
    environment.step(AtariAction(action_id=0, game_name="pong", obs_type="rgb"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"game": "pongg"}, NotFoundError, "did you mean 'pong'"),
        ({"obs_type": "text"}, ConfigError, "'ram', 'rgb' or 'grayscale'"),
        ({"frameskip": 0}, ConfigError, "frameskip: expected at least 1"),
        ({"max_turns": True}, ConfigError, "max_turns"),
        (
            {"repeat_action_probability": 1.0},
            ConfigError,
            "expected less than 1",
        ),
        ({"mode": 77}, ConfigError, "a mode of pong"),
        ({"difficulty": 9}, ConfigError, "a difficulty of pong"),
    ],
)
def test_invalid_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_environment(**options)


def test_missing_emulator_error_contains_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ConfigError, match="pip install 'ale-py"):
        make_environment()


def test_facts_contain_positions_and_speeds() -> None:
    memory = np.zeros(128, np.uint8)
    assert read_facts("pong", memory, {})["has_ball"] == 0
    memory[[49, 54, 51]] = 100, 80, 60
    previous_facts = read_facts("pong", memory, {})
    assert (previous_facts["has_ball"], previous_facts["ball_speed_x"]) == (1, 0)
    memory[[49, 54]] = 112, 76
    facts = read_facts("pong", memory, previous_facts)
    assert (facts["ball_speed_x"], facts["ball_speed_y"]) == (12, -4)
    assert read_facts("ms_pacman", memory, {}) == {}


@pytest.mark.slow
def test_pong_text_is_rendered_and_parsed() -> None:
    memory = np.zeros(128, np.uint8)
    memory[[49, 54, 51, 50]] = 116, 84, 60, 44
    facts = read_facts("pong", memory, read_facts("pong", memory - 1, {}))
    pong = make_environment()
    observation = pong.reset(seed=1).observation.model_copy(update={"facts": facts})
    assert render(pong, observation) == "ball 9 coming down 2 below"
    renderer = pong.text_renderer
    assert renderer is not None
    assert renderer.parse("right", observation).action_id == 2
    assert renderer.parse("LEFTFIRE", observation).action_id == 5
    for text in ("", "up", "LEFT or RIGHT"):
        with pytest.raises(ActionParseError, match="NOOP, FIRE, RIGHT"):
            renderer.parse(text, observation)
    rules_environment = make_environment(text_style="rules")
    sentence = "72 pixels left of your paddle and 16 pixels below its center."
    assert sentence in render(rules_environment, observation)
    assert rules_environment.text_renderer is not None
    response = "<think>LEFT?</think> Up: <answer>RIGHT</answer>"
    assert rules_environment.text_renderer.parse(response, observation).action_id == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "text"),
    [
        ("breakout", "no ball"),
        ("space_invaders", "cannon 2 right invaders 36 lives 3"),
        ("ms_pacman", "score 0 lives 3\n"),
    ],
)
def test_text_is_available_with_image_observations(game: str, text: str) -> None:
    environment = make_environment(game=game, obs_type="grayscale", max_waiting_frames=0)
    result = environment.reset(seed=1)
    assert render(environment, result.observation).startswith(text)
    assert result.observation.screen is None and result.tensors["screen"].shape == (210, 160)
    assert len(result.observation.memory) == 128


@pytest.mark.slow
async def test_images_are_sent_as_tensors_or_lists() -> None:
    def make_with_options() -> Any:
        return atari_env.make_environment(obs_type="rgb", **SHORT_EPISODE)

    async with EnvServer(make_with_options, ServerOptions(port=0)) as server:
        picture = await asyncio.to_thread(fetch_picture, server.http_address)
        async with await AsyncEnvClient.connect(server.grpc_address) as client:
            _, result = await client.open(seed=3)
    assert picture.shape == (210, 160, 3) and len(np.unique(picture)) > 3
    assert np.array_equal(picture, result.tensors["screen"])
    list_result = make_environment(obs_type="rgb", lists_pixels=True).reset(seed=3)
    assert list_result.observation.screen == picture.ravel().tolist() and not list_result.tensors


def fetch_picture(address: str) -> np.ndarray:
    """Return the first picture of an episode, received over HTTP."""
    with AtariEnv(base_url=address) as env:
        picture = env.reset(seed=3).tensors["screen"]
        result = env.step(AtariAction(action_id=2))
        assert result.observation.screen_shape == [210, 160, 3]
        assert (env.state().obs_type, env.state().step_count) == ("rgb", 1)
        return picture


@pytest.mark.slow
def test_openenv_tutorial_command_serves_the_selected_game(monkeypatch: pytest.MonkeyPatch) -> None:
    application = importlib.import_module("envs.atari_env.server.app")
    monkeypatch.setenv("ATARI_FRAMESKIP", "2")
    calls: list[tuple[Any, dict[str, Any], int]] = []
    monkeypatch.setattr(serving_application, "run_server", lambda *call: calls.append(call))
    application.main(["--game", "breakout", "--port", "8007"])
    factory, options, port = calls[0]
    assert (options["port"], port) == ("8007", 8007)
    state = factory().state
    assert (state.game_name, state.frameskip, state.obs_type) == ("breakout", 2, "ram")
