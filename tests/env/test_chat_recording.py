"""Episodes of a fixed policy as conversations."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ludus.env.recording.chats import play_chat
from ludus.env.targets.policies import find_policies_function, load_policies
from ludus.env.targets.targets import environment_factory
from ludus.proto.errors import ConfigError

POLICIES = [
    ("openspiel_env", {"game": "blackjack"}, "basic_strategy"),
    ("openspiel_env", {"game": "tic_tac_toe"}, "random"),
    ("math_env", {}, "optimal"),
    ("coding_env", {}, "solution"),
    ("uno_env", {}, "random"),
    ("trading_env", {}, "random"),
]


@pytest.mark.parametrize(("target", "options", "name"), POLICIES)
def test_responses_lead_to_the_recorded_episode(
    target: str, options: dict[str, Any], name: str
) -> None:
    """Give the recorded responses to the renderer, as in a rollout, and compare the results."""
    environment = environment_factory(target, options)()
    policy = load_policies(find_policies_function(target), environment.options)[name]
    for seed in range(3):
        episode = play_chat(environment, policy, seed, max_turns=100)
        renderer, transition = environment.text_renderer, environment.reset(seed=seed)
        assert renderer is not None
        messages, episode_return = list(episode.messages), 0.0
        is_first = True
        while messages:
            shown = renderer.render(transition.observation, first=is_first)
            assert messages[: len(shown)] == shown
            response = messages[len(shown)]
            assert response["role"] == "assistant"
            messages = messages[len(shown) + 1 :]
            action = renderer.parse(response["content"], transition.observation)
            transition, is_first = environment.step(action), False
            episode_return += transition.reward or 0.0
        assert transition.terminated or transition.truncated
        assert episode.episode_return == episode_return
        assert episode.success == transition.success
        assert json.loads(json.dumps(episode.to_row()))["messages"] == episode.messages


def test_episode_ends_at_the_limit_of_turns() -> None:
    environment = environment_factory("openspiel_env", {"game": "connect_four"})()
    episode = play_chat(environment, lambda observation, rng: {"action_id": 0}, 0, max_turns=2)
    assert [message["role"] for message in episode.messages] == ["user", "assistant"] * 2


def test_environment_without_text_is_refused() -> None:
    environment = environment_factory("math_env", {})()
    environment.text_renderer = None
    with pytest.raises(ConfigError, match="shows no text to language models"):
        play_chat(environment, lambda observation, rng: {"answer": 1}, 0, max_turns=1)


def test_action_that_no_text_stands_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = environment_factory("math_env", {})()
    parse = environment.text_renderer.parse  # type: ignore[union-attr]
    monkeypatch.setattr(environment.text_renderer, "parse", lambda text, shown: parse("7", shown))

    def answer(observation: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        return {"answer": 8}

    with pytest.raises(ConfigError, match="no text stands for the policy's action"):
        play_chat(environment, answer, 0, max_turns=1)
