"""Functions of the tutorial's notebook, for reading and changing.

Changes here affect training: `setup_forge_training` passes `BlackJackReward` and
`ComputeAdvantages` to the run. Its caller can also pass `render` and `parse`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from ludus.env import Message
from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import OutcomeKind, classify_outcome, play_policy, wilson_interval
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ActionParseError, ConfigError
from ludus.trainer.compat.forge import ComputeAdvantages as GroupAdvantages
from ludus.trainer.compat.forge import ForgeActor, GRPOTrainer, endpoint
from ludus.trainer.compat.forge import setup_forge_training as setup_run
from openspiel_env import OpenSpielObservation
from openspiel_env.policies import fixed_policies
from openspiel_env.text.blackjack import format_situation, read_hand_and_up_card

ACTION_NAMES = ("HIT", "STAND")
"""Names of blackjack's actions, by action id."""
_BLACKJACK_TENSOR = 189
"""Length of blackjack's info_state, which differs from that of all other games."""
_NUM_SHOWN_VALUES = 10
_WORD_PATTERN = re.compile(r"[A-Z]+")

ResultT = TypeVar("ResultT")


class Baseline(TypedDict):
    """Results of a fixed policy."""

    total_games: int
    wins: int
    losses: int
    pushes: int
    win_rate: float
    win_rate_ci95: tuple[float, float]
    """95 % confidence interval of the win rate."""


def show_openenv_observation(observation: OpenSpielObservation) -> None:
    """Print an observation and the text that a language model sees."""
    print("Observation:")
    print(f"  game phase: {observation.game_phase}")
    print(f"  legal actions: {observation.legal_actions}")
    print(f"  info state: {len(observation.info_state)} numbers")
    print(f"  the first {_NUM_SHOWN_VALUES}: {observation.info_state[:_NUM_SHOWN_VALUES]}")
    if len(observation.info_state) == _BLACKJACK_TENSOR and observation.legal_actions:
        print(f"  what a model sees: {describe(observation)}")


def play_random_policy(server_url: str, num_games: int = 100, seed: int = 0) -> Baseline:
    """Play with random legal actions and return the results."""
    return _measure_policy(server_url, "random", num_games, seed)


def play_heuristic_policy(server_url: str, num_games: int = 100, seed: int = 0) -> Baseline:
    """Play by the dealer's rule, to hit below 17, and return the results."""
    return _measure_policy(server_url, "dealer_rule", num_games, seed)


class BlackJackReward(ForgeActor):
    """The reward of an episode in training. Change it freely; win rates do not depend on it."""

    @endpoint
    def evaluate_response(self, prompt: str, response: str, game_reward: float) -> float:
        """Return 2 for a win, 0.5 for a push and the game's reward for a loss."""
        if game_reward > 0:
            return 2.0
        return 0.5 if game_reward == 0 else float(game_reward)


class ComputeAdvantages(GroupAdvantages):
    """The advantages of a group, as in the GRPO paper. Override `compute` to change them."""


def format_prompt(observation: OpenSpielObservation, tokenizer: Any) -> str:
    """Return the prompt for an observation, in the model's chat template."""
    messages = render(observation.model_dump(), first=True)
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def parse_action(response_text: str, legal_actions: Sequence[int]) -> int:
    """Return the id of the only action that a response names.

    Raises:
        ActionParseError: the response names no action, several actions or an illegal action. No
            default is used, because it would teach the policy that an empty response stands.
    """
    words = _WORD_PATTERN.findall(response_text.upper())
    action_ids = {action_id for action_id, word in enumerate(ACTION_NAMES) if word in words}
    if len(action_ids) != 1 or not action_ids <= set(legal_actions):
        choices = ", ".join(ACTION_NAMES[action_id] for action_id in legal_actions)
        raise ActionParseError(f"expected one of {choices}, got {response_text[:100]!r}")
    return action_ids.pop()


def describe(observation: OpenSpielObservation) -> str:
    """Describe the hand and the dealer's card, for example "hard 16 vs 10"."""
    return format_situation(*read_hand_and_up_card(observation.info_state))


def render(observation: Mapping[str, Any], first: bool) -> list[Message]:
    """Return the messages of an observation, for `setup_forge_training(render=render)`."""
    typed_observation = OpenSpielObservation.model_construct(**observation)
    text = describe(typed_observation) if typed_observation.legal_actions else "over"
    return [{"role": "user", "content": text}]


def parse(text: str, observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action of a response, for `setup_forge_training(parse=parse)`.

    Raises:
        ActionParseError: the text is not an action.
    """
    return {"action_id": parse_action(text, observation["legal_actions"])}


async def setup_forge_training(
    config: LanguageModelRun | Mapping[str, Any] | Path | str,
    overrides: Sequence[str] = (),
    **options: Any,
) -> GRPOTrainer:
    """Return a trainer with this file's reward and advantages; see `ludus.trainer.compat.forge`."""
    functions = {"reward": BlackJackReward, "compute_advantages": ComputeAdvantages}
    return await setup_run(config, overrides, **{**functions, **options})


def _measure_policy(server_url: str, name: str, num_games: int, seed: int) -> Baseline:
    episodes = _run_in_thread(_play_games(server_url, name, num_games, seed))
    outcomes = [
        classify_outcome(episode.episode_return, episode.success)
        for episode in episodes
        if episode.episode_return is not None
    ]
    wins = outcomes.count(OutcomeKind.WON)
    return Baseline(
        total_games=len(outcomes),
        wins=wins,
        losses=outcomes.count(OutcomeKind.LOST),
        pushes=outcomes.count(OutcomeKind.DRAWN),
        win_rate=wins / len(outcomes),
        win_rate_ci95=wilson_interval(wins, len(outcomes)),
    )


async def _play_games(server_url: str, name: str, num_games: int, seed: int) -> list[Any]:
    async with await AsyncEnvClient.connect(server_url) as client:
        options = (await client.describe()).options
        policies = fixed_policies(options)
        if name not in policies:
            raise ConfigError(
                f"'{options.get('game')}' has no policy '{name}'; it has {', '.join(policies)}"
            )
        seeds = range(seed * num_games, (seed + 1) * num_games)
        return list(await play_policy(client, policies[name], seeds))


def _run_in_thread(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine in a thread, because a notebook already has a running event loop."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
