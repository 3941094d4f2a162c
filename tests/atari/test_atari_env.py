"""Atari games: what is drawn, seen, said and paid, over any wire."""

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
from atari_env.facts import facts_of
from atari_env.policies import fixed_policies
from ludus.env.check import check_environment
from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.errors import (
    ActionParseError,
    ConfigError,
    EpisodeStateError,
    IllegalActionError,
    InvalidCallError,
    NotFoundError,
)

pytest.importorskip("ale_py", reason="ale-py is optional: it is under the GPL-2.0")

SHORT = {"max_turns": 8}
_made: list[Any] = []


@pytest.fixture(autouse=True)
def leave_consoles_to_the_next_test() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def make_environment(**options: Any) -> Any:
    """An environment that is closed after the test."""
    _made.append(atari_env.make_environment(**options))
    return _made[-1]


def played(policy: str, seed: int, **options: Any) -> list[float]:
    """What the policy is paid in one episode, by decision."""
    environment = make_environment(**options)
    act, rng = fixed_policies(options)[policy], random.Random(f"player {seed}")
    result = environment.reset(seed=seed)
    rewards: list[float] = []
    while not (result.terminated or result.truncated):
        chosen = act(result.observation.model_dump(), rng)
        result = environment.step(AtariAction.model_validate(chosen))
        assert result.reward is not None
        rewards.append(result.reward)
    return rewards


def text_of(environment: Any, observation: AtariObservation) -> str:
    messages = environment.text_renderer.render(observation, first=True)
    return "\n".join(message["content"] for message in messages)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["ms_pacman"])
def test_every_rule_of_the_environment_contract_holds(game: str) -> None:
    def make() -> Any:
        return atari_env.make_environment(game=game, **SHORT)

    check_environment(make, seeds=range(2), num_steps=4).raise_if_failed()


def test_the_classes_are_found_as_the_documents_of_openenv_import_them() -> None:
    package = importlib.import_module("envs.atari_env")
    assert package.AtariAction(action_id=2).game_name == "pong"
    assert package.AtariEnv.default_url == "http://localhost:8007"


@pytest.mark.slow
def test_the_same_seed_is_the_same_game_whatever_was_played_before_and_others_differ() -> None:
    options: dict[str, Any] = {"repeat_action_probability": 0.25, "max_turns": 40}
    environment = make_environment(**options)

    def memories(seed: int) -> list[Any]:
        rng = random.Random(5)
        seen = [environment.reset(seed=seed).observation.screen]
        seen += [environment.step(AtariAction(action_id=rng.randrange(6))).observation.screen]
        while environment.state.step_count < 40:
            step = environment.step(AtariAction(action_id=rng.randrange(6)))
            seen.append(step.observation.screen)
        return seen

    first, other = memories(1), memories(2)
    assert memories(1) == first != other
    environment = make_environment(**options)
    assert memories(1) == first


@pytest.mark.slow
def test_policies_that_follow_the_ball_beat_those_that_do_not_see_it() -> None:
    pong = {"game": "pong", "max_scores": 1}
    points = {
        name: sum(map(sum, (played(name, s, **pong) for s in range(4))))
        for name in ("follow", "wait")
    }
    assert points["wait"] == -4.0
    assert points["follow"] >= 2.0
    breakout = {"game": "breakout", "max_turns": 250}
    follow, guess = (sum(played(name, 1, **breakout)) for name in ("follow", "random"))
    assert follow >= 5 > guess


@pytest.mark.slow
def test_a_game_against_an_opponent_is_won_with_a_score_above_0_and_others_say_nothing() -> None:
    pong = make_environment(max_scores=1)
    result = pong.reset(seed=1)
    while not result.terminated:
        result = pong.step(AtariAction(action_id=0))
    assert (result.reward, result.success, result.observation.legal_actions) == (-1.0, False, [])
    assert text_of(pong, result.observation) == "over"
    with pytest.raises(EpisodeStateError):
        pong.step(AtariAction(action_id=0))
    other = make_environment(game="space_invaders", max_turns=1)
    other.reset(seed=1)
    result = other.step(AtariAction(action_id=1))
    assert (result.truncated, result.terminated, result.success) == (True, False, None)


def test_actions_out_of_the_list_and_for_another_server_are_refused_and_change_nothing() -> None:
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


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"game": "pongg"}, NotFoundError, "did you mean 'pong'"),
        ({"obs_type": "text"}, ConfigError, "ram, rgb, grayscale"),
        ({"frameskip": 0}, ConfigError, "frameskip as a whole number from 1"),
        ({"max_turns": True}, ConfigError, "max_turns"),
        ({"repeat_action_probability": 1.0}, ConfigError, "from 0 to below 1"),
        ({"mode": 77}, ConfigError, "a mode of pong"),
        ({"difficulty": 9}, ConfigError, "a difficulty of pong"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make_environment(**options)


def test_without_the_emulator_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ConfigError, match="pip install 'ale-py"):
        make_environment()


def test_facts_are_read_from_the_memory_and_speeds_from_what_was_before() -> None:
    memory = np.zeros(128, np.uint8)
    assert facts_of("pong", memory, {})["has_ball"] == 0
    memory[[49, 54, 51]] = 100, 80, 60
    before = facts_of("pong", memory, {})
    assert (before["has_ball"], before["ball_speed_x"]) == (1, 0)
    memory[[49, 54]] = 112, 76
    facts = facts_of("pong", memory, before)
    assert (facts["ball_speed_x"], facts["ball_speed_y"]) == (12, -4)
    assert facts_of("ms_pacman", memory, {}) == {}


def test_the_text_tells_the_ball_from_the_paddle_and_takes_the_name_of_an_action() -> None:
    memory = np.zeros(128, np.uint8)
    memory[[49, 54, 51, 50]] = 116, 84, 60, 44
    facts = facts_of("pong", memory, facts_of("pong", memory - 1, {}))
    pong = make_environment()
    shown = pong.reset(seed=1).observation.model_copy(update={"facts": facts})
    assert text_of(pong, shown) == "ball 9 coming down 2 below"
    renderer = pong.text_renderer
    assert renderer is not None
    assert renderer.parse("right", shown).action_id == 2
    assert renderer.parse("LEFTFIRE", shown).action_id == 5
    for text in ("", "up", "LEFT or RIGHT"):
        with pytest.raises(ActionParseError, match="NOOP, FIRE, RIGHT"):
            renderer.parse(text, shown)
    told = make_environment(text_style="rules")
    assert "72 pixels left of your paddle and 16 below its middle" in text_of(told, shown)
    assert told.text_renderer is not None
    answer = "<think>LEFT?</think> Up: <answer>RIGHT</answer>"
    assert told.text_renderer.parse(answer, shown).action_id == 2


@pytest.mark.parametrize(
    ("game", "said"),
    [
        ("breakout", "no ball"),
        ("space_invaders", "cannon 2 right invaders 36 lives 3"),
        ("ms_pacman", "score 0 lives 3\n"),
    ],
)
def test_each_game_has_a_text_also_where_pictures_are_sent(game: str, said: str) -> None:
    environment = make_environment(game=game, obs_type="grayscale", max_waiting_frames=0)
    first = environment.reset(seed=1)
    assert text_of(environment, first.observation).startswith(said)
    assert first.observation.screen is None and first.tensors["screen"].shape == (210, 160)
    assert len(first.observation.memory) == 128


@pytest.mark.slow
async def test_pictures_come_over_every_wire_as_arrays_or_as_lists() -> None:
    def make() -> Any:
        return atari_env.make_environment(obs_type="rgb", **SHORT)

    async with EnvServer(make, ServerOptions(port=0)) as up:
        picture = await asyncio.to_thread(seen_over, up.http_address)
        async with await AsyncEnvClient.connect(up.grpc_address) as client:
            _, first = await client.open(seed=3)
    assert picture.shape == (210, 160, 3) and len(np.unique(picture)) > 3
    assert np.array_equal(picture, first.tensors["screen"])
    listed = make_environment(obs_type="rgb", lists_pixels=True).reset(seed=3)
    assert listed.observation.screen == picture.ravel().tolist() and not listed.tensors


def seen_over(address: str) -> np.ndarray:
    with AtariEnv(base_url=address) as env:
        picture = env.reset(seed=3).tensors["screen"]
        result = env.step(AtariAction(action_id=2))
        assert result.observation.screen_shape == [210, 160, 3]
        assert (env.state().obs_type, env.state().step_count) == ("rgb", 1)
        return picture


@pytest.mark.slow
def test_the_command_of_the_tutorial_serves_the_game(monkeypatch: pytest.MonkeyPatch) -> None:
    application = importlib.import_module("envs.atari_env.server.app")
    monkeypatch.setenv("ATARI_FRAMESKIP", "2")
    served: list[tuple[Any, dict[str, Any], int]] = []
    monkeypatch.setattr(application, "run_server", lambda *given: served.append(given))
    application.main(["--game", "breakout", "--port", "8007"])
    factory, options, port = served[0]
    assert (options["port"], port) == ("8007", 8007)
    state = factory().state
    assert (state.game_name, state.frameskip, state.obs_type) == ("breakout", 2, "ram")
