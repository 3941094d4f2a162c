"""Tests that random episodes of the board game examples stay within the limits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import LanguageModelRun, TinyModel, load_run_config
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.rollout.runner import episode_limits, sampling_settings
from openspiel_env import make_environment
from tests.rollout.scripted_policy import ScriptedPolicy, start_player

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_SEEDS_BY_EXAMPLE = {
    "connect_four/mcts.toml": 40,
    "go/tiny.toml": 20,
    "chess/qwen3-1.7b.toml": 3,
}
VOCAB_SIZE = 512

EpisodeTexts = tuple[list[str], list[str]]
"""Texts of the observations and the actions of an episode."""


async def play_random_episode(client: AsyncEnvClient, seed: int, max_turns: int) -> EpisodeTexts:
    """Play an episode of random legal actions; return its texts."""
    rng, observations, actions = random.Random(f"answers {seed}"), [], []
    session, result = await client.open(seed=seed, close_when_done=True)
    while not result.done and len(actions) < max_turns:
        assert result.text is not None
        observations += [message["content"] for message in result.text.messages]
        actions.append(rng.choice(result.text.legal_answers))
        result = await session.step(text=actions[-1])
    if not result.done:
        await session.close()
    return observations, actions


def make_example_tokenizer(run: LanguageModelRun, texts: list[str]) -> ChatTokenizer:
    """Return a tokenizer with the vocabulary size of the example, or 512 for a pretrained model."""
    size = run.model.vocab_size if isinstance(run.model, TinyModel) else VOCAB_SIZE
    return ChatTokenizer(make_tokenizer(texts, size))


@pytest.mark.slow
@pytest.mark.parametrize("example", NUM_SEEDS_BY_EXAMPLE)
async def test_random_legal_actions_finish_within_the_example_limits(example: str) -> None:
    run = load_run_config(EXAMPLES / example)
    [(name, environment)] = run.environments.items()
    limits = episode_limits(run, name)
    options = environment.model_dump()["options"]
    async with (
        EnvServer(lambda: make_environment(**options), ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        episodes = [
            await play_random_episode(client, seed, limits.max_turns)
            for seed in range(NUM_SEEDS_BY_EXAMPLE[example])
        ]
        chat = make_example_tokenizer(
            run, [text for observations, actions in episodes for text in observations + actions]
        )
        for seed, (_, actions) in enumerate(episodes):
            policy = ScriptedPolicy(chat, iter(actions))
            player = await start_player(run, name, client, policy, chat)
            [rollout] = await player.evaluate([seed], sampling_settings(limits))
            [sequence] = rollout.sequences
            assert len(sequence.token_ids) <= limits.max_tokens
            assert all(
                len(chat.encode_completion(action)) <= limits.max_completion_tokens
                for action in actions
            )
            assert len(rollout.turns) == len(actions)
            if rollout.status is not RolloutStatus.TERMINATED:
                assert example.startswith("chess"), f"an episode of {example} reached a limit"
                assert len(actions) == limits.max_turns
