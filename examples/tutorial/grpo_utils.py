"""The functions that the tutorial's cells import, to be read and changed.

What is changed here is what trains: `setup_forge_training` hands `BlackJackReward` and
`ComputeAdvantages` to the run, and `render` and `parse` where its caller asks for them.
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
from openspiel_env.text.blackjack import brief_situation, hand_and_up_card

WORDS = ("HIT", "STAND")
"""Blackjack's actions, in the order of their numbers."""
_BLACKJACK_TENSOR = 189
"""Numbers in blackjack's info_state; no other game has as many."""
_NUM_SHOWN = 10
_WORD = re.compile(r"[A-Z]+")

ResultT = TypeVar("ResultT")


class Baseline(TypedDict):
    """How a policy that does not learn did."""

    total_games: int
    wins: int
    losses: int
    pushes: int
    win_rate: float
    win_rate_ci95: tuple[float, float]
    """What 95 of 100 such samples hold the true rate in."""


def show_openenv_observation(observation: OpenSpielObservation) -> None:
    """Print what the environment tells, and what a language model is shown of it."""
    print("Observation:")
    print(f"  game phase: {observation.game_phase}")
    print(f"  legal actions: {observation.legal_actions}")
    print(f"  info state: {len(observation.info_state)} numbers")
    print(f"  the first {_NUM_SHOWN}: {observation.info_state[:_NUM_SHOWN]}")
    if len(observation.info_state) == _BLACKJACK_TENSOR and observation.legal_actions:
        print(f"  what a model sees: {describe(observation)}")


def play_random_policy(server_url: str, num_games: int = 100, seed: int = 0) -> Baseline:
    """How any legal action, all equally likely, does in games of the seed."""
    return _played(server_url, "random", num_games, seed)


def play_heuristic_policy(server_url: str, num_games: int = 100, seed: int = 0) -> Baseline:
    """How the dealer's own rule, to hit below 17, does in games of the seed."""
    return _played(server_url, "dealer_rule", num_games, seed)


class BlackJackReward(ForgeActor):
    """What a game is worth to the training: change it as you like, wins are counted without it."""

    @endpoint
    def evaluate_response(self, prompt: str, response: str, game_reward: float) -> float:
        """2 for a win, 0.5 for a push, and what the game paid for a loss."""
        if game_reward > 0:
            return 2.0
        return 0.5 if game_reward == 0 else float(game_reward)


class ComputeAdvantages(GroupAdvantages):
    """How the games of a group are compared: as in the paper, until you override `compute`."""


def format_prompt(observation: OpenSpielObservation, tokenizer: Any) -> str:
    """The text that a model is asked with, in the words of its chat template."""
    messages = render(observation.model_dump(), first=True)
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def parse_action(response_text: str, legal_actions: Sequence[int]) -> int:
    """The action that a response means: the only one of its words that names one.

    Raises:
        ActionParseError: it names none, or several, or one that is not legal. Nothing is
            guessed: a policy that says nothing must not be taught that it stood.
    """
    said = _WORD.findall(response_text.upper())
    named = {number for number, word in enumerate(WORDS) if word in said}
    if len(named) != 1 or not named <= set(legal_actions):
        legal = ", ".join(WORDS[number] for number in legal_actions)
        raise ActionParseError(f"expected one of {legal}, got {response_text[:100]!r}")
    return named.pop()


def describe(observation: OpenSpielObservation) -> str:
    """Total, soft or hard, and the dealer's card: all that decides. For example "hard 16 vs 10"."""
    return brief_situation(*hand_and_up_card(observation.info_state))


def render(observation: Mapping[str, Any], first: bool) -> list[Message]:
    """What a model is shown, for `setup_forge_training(render=render, parse=parse)`."""
    seen = OpenSpielObservation.model_construct(**observation)
    asked = describe(seen) if seen.legal_actions else "over"
    return [{"role": "user", "content": asked}]


def parse(text: str, observation: Mapping[str, Any]) -> dict[str, Any]:
    """What the environment is asked to do.

    Raises:
        ActionParseError: the text is no action.
    """
    return {"action_id": parse_action(text, observation["legal_actions"])}


async def setup_forge_training(
    config: LanguageModelRun | Mapping[str, Any] | Path | str,
    overrides: Sequence[str] = (),
    **options: Any,
) -> GRPOTrainer:
    """The trainer, with this file's reward and advantages; see `ludus.trainer.compat.forge`."""
    own = {"reward": BlackJackReward, "compute_advantages": ComputeAdvantages}
    return await setup_run(config, overrides, **{**own, **options})


def _played(server_url: str, name: str, num_games: int, seed: int) -> Baseline:
    outcomes = _in_a_thread(_play(server_url, name, num_games, seed))
    standings = [
        classify_outcome(one.episode_return, one.success)
        for one in outcomes
        if one.episode_return is not None
    ]
    wins = standings.count(OutcomeKind.WON)
    return Baseline(
        total_games=len(standings),
        wins=wins,
        losses=standings.count(OutcomeKind.LOST),
        pushes=standings.count(OutcomeKind.DRAWN),
        win_rate=wins / len(standings),
        win_rate_ci95=wilson_interval(wins, len(standings)),
    )


async def _play(server_url: str, name: str, num_games: int, seed: int) -> list[Any]:
    async with await AsyncEnvClient.connect(server_url) as client:
        options = (await client.describe()).options
        policies = fixed_policies(options)
        if name not in policies:
            raise ConfigError(
                f"'{options.get('game')}' has no policy '{name}'; it has {', '.join(policies)}"
            )
        seeds = range(seed * num_games, (seed + 1) * num_games)
        return list(await play_policy(client, policies[name], seeds))


def _in_a_thread(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The coroutine's result; in a thread, since a notebook has an event loop of its own."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(asyncio.run, coroutine).result()
