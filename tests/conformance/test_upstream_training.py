"""A run trains on OpenEnv's servers, given only their address."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.proto.metrics import TrainMetric
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer
from tests.conformance.parties import start_upstream_server
from tests.e2e.runs import start_run
from tests.rollout.scripted_policy import LIMITS, make_player

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]

GAMES = ["tic_tac_toe", "catch(rows=5,columns=3)"]
NUM_STEPS = 3
RUN_SECTIONS = {
    "model": {
        "width": 64,
        "num_heads": 2,
        "max_tokens": 4096,
        "warm_start_games": 128,
        "warm_start_epochs": 4,
        "warm_start_layers": "all",
        "warm_start_learning_rate": 3e-3,
    },
    "rollout": {
        "group_size": 4,
        "num_groups_in_flight": 8,
        "max_completion_tokens": 4,
        "max_tokens": 4096,
    },
    "algorithm": {"zero_variance_groups": "keep"},
    "training": {"num_steps": NUM_STEPS, "groups_per_step": 8},
    "eval": {"num_games": 20, "num_games_during": 0},
}


@pytest.mark.parametrize("game", GAMES)
async def test_policy_plays_upstream_episodes_with_rendered_observations(
    game: str,
) -> None:
    limits = LIMITS.model_copy(update={"max_tokens": 8192})
    with start_upstream_server("0.10.0", game=game) as address:
        async with await AsyncEnvClient.connect(address) as client:
            session, result = await client.open(seed=3)
            observations, responses = [result.text.messages[0]["content"]], []
            while not result.done:
                responses.append(result.text.legal_answers[0])
                result = await session.step(text=responses[-1])
                observations.append(result.text.messages[0]["content"])
            episode_reward = result.reward
            chat = ChatTokenizer(make_tokenizer(observations + responses, 400))
            player, policy = make_player(client, chat, iter(responses), limits)
            rollout = await player.play_episode(3)
            assert (rollout.status, rollout.reward) == (RolloutStatus.TERMINATED, episode_reward)
            assert len(rollout.turns) == len(responses)
            prompt = chat.tokenizer.decode(policy.prompts[0])
            assert "You play" in prompt and "action_id" in prompt and "info_state: [" in prompt
            assert "You play" not in observations[1]
            player, _ = make_player(client, chat, iter(["left"]), limits)
            assert (await player.play_episode(3)).status is RolloutStatus.INVALID_ACTION


@pytest.mark.parametrize("game", GAMES)
def test_run_trains_on_an_upstream_server_given_only_an_address(game: str, tmp_path: Path) -> None:
    with start_upstream_server("0.10.0", game=game) as address:
        config = tmp_path / "run.json"
        config_fields = {"environment": {"kind": "remote", "address": address}, **RUN_SECTIONS}
        config.write_text(json.dumps(config_fields))
        with start_run(tmp_path, config=config) as run:
            summary = run.finish()
        train_rows = [row for row in run.rows if row.kind == "train"]
    assert summary.finished and len(train_rows) == NUM_STEPS
    assert train_rows[0].values[TrainMetric.NUM_TURNS_MEAN] > 1.5, "episodes have too few turns"
    assert any(row.values[TrainMetric.GRAD_NORM] > 0 for row in train_rows), (
        "all gradients are zero"
    )
