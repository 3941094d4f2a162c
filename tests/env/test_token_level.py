"""Token-level environments, in which each completion is one step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ludus.env.adapters.gymnasium.token_level import TokenAction, TokenLevelEnvironment
from ludus.env.check import check_environment
from ludus.env.targets.targets import environment_factory
from ludus.proto.errors import ConfigError, EpisodeStateError, IllegalActionError
from tests.env.token_env import END_TOKEN, NUM_TOKENS, TOKENS_ENV_ID, CountingTokens


def start_episode(**options):
    environment = TokenLevelEnvironment(TOKENS_ENV_ID, **options)
    transition = environment.reset(seed=3)
    return environment, transition.observation.token_ids


def test_large_vocabulary_is_not_listed_in_observation_or_prompt() -> None:
    environment = environment_factory(f"gymnasium:{TOKENS_ENV_ID}", {})()
    transition = environment.reset(seed=0)
    assert transition.observation.num_legal_actions == NUM_TOKENS
    assert len(transition.observation.to_json()) < 200
    assert environment.text_renderer is not None
    prompt = json.dumps(environment.text_renderer.render(transition.observation, first=True))
    assert len(prompt) < 400 and "0 to 50256" in prompt
    assert environment.text_renderer.legal_answers(transition.observation) == []


@pytest.mark.slow
def test_token_level_environment_passes_all_checks() -> None:
    check_environment(environment_factory(f"gymnasium:{TOKENS_ENV_ID}", {})).raise_if_failed()
    target = f"{TokenLevelEnvironment.__module__}:TokenLevelEnvironment"
    check_environment(environment_factory(target, {"env_id": TOKENS_ENV_ID})).raise_if_failed()


def test_every_completion_token_has_a_reward() -> None:
    environment, (_, last_id) = start_episode()
    result = environment.step(TokenAction(token_ids=[last_id + 1, last_id + 2, 40]))
    assert result.observation.rewards == [1.0, 1.0, 0.0]
    assert result.observation.token_ids == [0, last_id, last_id + 1, last_id + 2, 40]
    assert result.reward == 2.0 and not result.terminated


def test_tokens_after_the_end_token_are_ignored() -> None:
    environment, _ = start_episode()
    result = environment.step(TokenAction(token_ids=[8, END_TOKEN, 10, 11]))
    assert result.observation.rewards == [0.0, 1.0]
    assert result.terminated and result.info == {"last": END_TOKEN}
    with pytest.raises(EpisodeStateError):
        environment.step(TokenAction(token_ids=[1]))


def test_a_completion_stops_when_the_environment_inserts_a_token() -> None:
    environment, (_, last_id) = start_episode()
    result = environment.step(TokenAction(token_ids=[5, 6, 7]))
    assert result.observation.rewards == [0.0]
    assert result.observation.token_ids == [0, last_id, 5, 50]


def test_token_limit_truncates_the_episode() -> None:
    environment, _ = start_episode(max_episode_steps=2)
    result = environment.step(TokenAction(token_ids=[1, 1, 1]))
    assert len(result.observation.rewards) == 2
    assert result.truncated and not result.terminated


def test_token_outside_the_vocabulary_is_illegal_and_changes_no_state() -> None:
    environment, prompt_ids = start_episode()
    with pytest.raises(IllegalActionError, match="50256, got 50257"):
        environment.step(TokenAction(token_ids=[1, NUM_TOKENS]))
    assert environment.step(TokenAction(token_ids=[2])).observation.token_ids == [*prompt_ids, 2]


def test_unregistered_id_is_created_from_the_entry_point() -> None:
    entry_point = f"{CountingTokens.__module__}:CountingTokens"
    environment = TokenLevelEnvironment(
        "ludus-tests/Elsewhere-v0", entry_point=entry_point, first_token=7
    )
    assert environment.reset(seed=0).observation.token_ids[0] == 7
    assert environment.options["entry_point"] == entry_point


def test_entry_point_module_can_be_imported_from_a_given_folder(tmp_path: Path) -> None:
    text = "from tests.env.token_env import CountingTokens\n\nclass Tokens(CountingTokens): ...\n"
    (tmp_path / "ludus_tests_imported.py").write_text(text)
    options = {"entry_point": "ludus_tests_imported:Tokens", "import_from": str(tmp_path)}
    environment = TokenLevelEnvironment("ludus-tests/Imported-v0", **options)
    assert environment.reset(seed=0).observation.rewards == []


def test_closed_environment_is_reused_by_the_next_session() -> None:
    environment, _ = start_episode(first_token=3)
    initial_count = CountingTokens.num_created
    environment.close()
    next_env, prompt_ids = start_episode(first_token=3)
    third_env, _ = start_episode(first_token=3)
    assert CountingTokens.num_created == initial_count + 1
    next_env.step(TokenAction(token_ids=[1]))
    assert third_env.step(TokenAction(token_ids=[2])).observation.token_ids == [*prompt_ids, 2]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1"])
def test_non_token_spaces_raise_a_config_error(env_id: str) -> None:
    with pytest.raises(ConfigError, match="token-level environment"):
        TokenLevelEnvironment(env_id)
