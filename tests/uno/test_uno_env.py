"""Tests of Uno: cards, rules, observations and rewards."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections import Counter
from typing import Any

import pytest

from ludus.env.check import check_environment
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.errors import (
    ActionParseError,
    ConfigError,
    EpisodeStateError,
    IllegalActionError,
)
from uno_env import UnoAction, UnoEnv, UnoObservation, make_environment
from uno_env.cards import COLORS, DECK
from uno_env.policies import OPPONENTS, fixed_policies
from uno_env.rules import UnoGame
from uno_env.text import UnoRenderer

OBSERVATION = UnoObservation(
    hand=["red 7", "blue 5", "wild"],
    top="red 5",
    colour="red",
    others=[4],
    legal_actions=["red 7", "blue 5", *(f"wild {color}" for color in COLORS)],
)


def make_game(hands: list[list[str]], top: str, pile: list[str] | None = None) -> UnoGame:
    """Return a game with these hands, this open card and the turn of seat 0."""
    game = UnoGame(len(hands), random.Random(0))
    game.hands = [list(hand) for hand in hands]
    game.played_cards = [top]
    game.color = top.partition(" ")[0]
    game.pile = list(pile if pile is not None else ["green 9"] * 20)
    return game


def play_episode(policy: str, seed: int, **options: Any) -> list[dict[str, Any]]:
    """Return the observations of an episode, and its last transition without the observation."""
    environment = make_environment(**options)
    player, rng = fixed_policies(options)[policy], random.Random(f"player {seed}")
    transition = environment.reset(seed=seed)
    observations = [transition.observation.model_dump()]
    while not (transition.terminated or transition.truncated):
        action = UnoAction.model_validate(player(observations[-1], rng))
        transition = environment.step(action)
        observations.append(transition.observation.model_dump())
    outcome = {
        "reward": transition.reward,
        "terminated": transition.terminated,
        "success": transition.success,
        "winner": environment.state.winner,
    }
    return [*observations, outcome]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_players": 4, "opponent": "greedy"}])
def test_environment_contract(options: dict[str, Any]) -> None:
    def make_with_options() -> Any:
        return make_environment(**options)

    check_environment(make_with_options, seeds=range(2), num_steps=10).raise_if_failed()


@pytest.mark.slow
def test_package_is_importable_under_envs() -> None:
    package = importlib.import_module("envs.uno_env")
    assert package.UnoAction(move="draw").move == "draw"
    assert package.UnoEnv.default_url == "http://localhost:8010"


def test_deck_has_108_cards() -> None:
    card_counts = Counter(DECK)
    assert len(DECK) == 108 and len(card_counts) == 54
    assert card_counts["red 0"] == 1 and card_counts["red 9"] == 2 and card_counts["blue skip"] == 2
    assert card_counts["wild"] == card_counts["wild +4"] == 4


def test_moves_preserve_all_cards() -> None:
    for seed in range(20):
        game, rng = UnoGame(4, random.Random(seed)), random.Random(f"moves {seed}")
        for _ in range(300):
            if game.winner is not None:
                break
            game.make_move(rng.choice(game.list_legal_moves()))
            cards = [
                *game.pile,
                *game.played_cards,
                *(card for hand in game.hands for card in hand),
            ]
            assert Counter(cards) == Counter(DECK)


def test_legal_cards_match_color_number_or_symbol() -> None:
    game = make_game([["red 1", "blue 5", "blue 6", "wild"], ["red 1"]], "red 5")
    wild_moves = [f"wild {color}" for color in COLORS]
    assert game.list_legal_moves() == ["red 1", "blue 5", *wild_moves]
    game = make_game([["blue skip", "blue 6"], ["red 1"]], "red skip")
    assert game.list_legal_moves() == ["blue skip"]


def test_draw_is_legal_without_a_legal_card() -> None:
    assert make_game([["blue 6"], ["red 1"]], "red skip").list_legal_moves() == ["draw"]


def test_wild_draw_four_requires_a_hand_without_the_current_color() -> None:
    assert make_game([["wild +4", "red 1"], ["red 1"]], "red 5").list_legal_moves() == ["red 1"]
    game = make_game([["wild +4", "blue 1", "blue 2"], ["red 1"], ["red 2"]], "red 5")
    assert "wild +4 blue" in game.list_legal_moves()
    assert game.make_move("wild +4 blue") == "plays wild +4 blue"
    assert (game.color, game.current_seat, len(game.hands[1])) == ("blue", 2, 5)


@pytest.mark.parametrize(
    ("card", "num_players", "turn", "num_cards_of_next"),
    [
        ("red 1", 3, 1, 1),
        ("red skip", 3, 2, 1),
        ("red +2", 3, 2, 3),
        ("red reverse", 3, 2, 1),
        ("red reverse", 2, 0, 1),
        ("red skip", 2, 0, 1),
        ("red +2", 2, 0, 3),
    ],
)
def test_cards_have_the_expected_effects(
    card: str, num_players: int, turn: int, num_cards_of_next: int
) -> None:
    game = make_game([[card, "red 9"], *([["blue 1"]] * (num_players - 1))], "red 5")
    game.make_move(card)
    assert (game.current_seat, len(game.hands[1])) == (turn, num_cards_of_next)
    assert game.direction == (-1 if card == "red reverse" and num_players > 2 else 1)


def test_player_can_keep_a_legal_drawn_card() -> None:
    game = make_game([["blue 6"], ["red 1"]], "red 5", pile=["green 1", "red 8"])
    assert game.make_move("draw") == "draws"
    assert (game.current_seat, game.list_legal_moves()) == (0, ["red 8", "pass"])
    game.make_move("pass")
    assert (game.current_seat, game.hands[0]) == (1, ["blue 6", "red 8"])


def test_illegal_drawn_card_ends_the_turn() -> None:
    game = make_game([["blue 6"], ["red 1"]], "red 5", pile=["green 1"])
    game.make_move("draw")
    assert (game.current_seat, game.hands[0]) == (1, ["blue 6", "green 1"])


def test_empty_pile_is_refilled_from_played_cards() -> None:
    game = make_game([["blue 6"], ["green 1"]], "red 5", pile=[])
    assert game.make_move("draw") == "finds no card to draw"
    assert (game.current_seat, len(game.hands[0])) == (1, 1)
    game.played_cards = ["green 7", "yellow 2", "red 5"]
    assert game.make_move("draw") == "draws"
    assert game.top == "red 5" and len(game.hands[1]) == 2


def test_seed_determines_the_cards() -> None:
    assert play_episode("random", 3) == play_episode("random", 3)
    greedy_episode = play_episode("greedy", 3, opponent="greedy")
    assert play_episode("random", 3)[0] == greedy_episode[0]
    hands = {tuple(make_environment().reset(seed=seed).observation.hand) for seed in range(20)}
    assert len(hands) == 20
    assert all(play_episode("greedy", seed)[0]["top"][-1].isdigit() for seed in range(10))


@pytest.mark.slow
def test_greedy_policy_beats_random_policy() -> None:
    num_wins = {
        policy: sum(play_episode(policy, seed)[-1]["success"] is True for seed in range(100))
        for policy in OPPONENTS
    }
    assert num_wins["greedy"] > num_wins["random"] + 10


def test_reward_and_success_match_the_winner() -> None:
    outcomes = [play_episode("greedy", seed)[-1] for seed in range(20)]
    assert {outcome["winner"] for outcome in outcomes} == {0, 1}
    for outcome in outcomes:
        has_won = outcome["winner"] == 0
        assert (outcome["reward"], outcome["success"]) == (1.0 if has_won else -1.0, has_won)
        assert outcome["terminated"]


def test_finished_episode_has_no_legal_moves() -> None:
    environment = make_environment()
    transition = environment.reset(seed=1)
    while not transition.terminated:
        transition = environment.step(UnoAction(move=transition.observation.legal_actions[0]))
    assert transition.observation.legal_actions == []
    with pytest.raises(EpisodeStateError):
        environment.step(UnoAction(move="draw"))


def test_episode_is_truncated_after_max_turns() -> None:
    environment = make_environment(max_turns=1)
    observation = environment.reset(seed=1).observation
    transition = environment.step(UnoAction(move=observation.legal_actions[0]))
    assert (transition.reward, transition.truncated, transition.terminated) == (0.0, True, False)


def test_events_describe_all_moves_since_the_last_observation() -> None:
    environment = make_environment()
    observation = environment.reset(seed=2).observation
    events = environment.step(UnoAction(move=observation.legal_actions[0])).observation.events
    assert events[0].startswith("player 0 ") and events[0].endswith(observation.legal_actions[0])
    assert events[1].startswith("player 1 ")


def test_illegal_moves_do_not_change_the_state() -> None:
    environment = make_environment()
    with pytest.raises(EpisodeStateError):
        environment.step(UnoAction(move="draw"))
    observation = environment.reset(seed=2).observation
    for move in ("", "wild", "red 99", "pass"):
        with pytest.raises(IllegalActionError, match="expected one of"):
            environment.step(UnoAction(move=move))
    assert environment.state.step_count == 0
    transition = environment.step(UnoAction(move=observation.legal_actions[0]))
    assert transition.observation.events[0].endswith(observation.legal_actions[0])


@pytest.mark.parametrize(
    "options",
    [
        {"num_players": 1},
        {"num_players": 11},
        {"max_turns": 0},
        {"opponent": "x"},
        {"text_style": "x"},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: expected"):
        make_environment(**options)


def test_compact_style_renders_and_parses_text() -> None:
    renderer = UnoRenderer("compact")
    (message,) = renderer.render(OBSERVATION, first=True)
    assert message["content"] == "top red 5 hand red 7, blue 5, wild others 4"
    assert renderer.parse("Red 7", OBSERVATION).move == "red 7"
    assert renderer.parse("I play wild green.", OBSERVATION).move == "wild green"
    for text in ("", "red 5", "wild", "red 7 or blue 5"):
        with pytest.raises(ActionParseError, match="expected one of red 7"):
            renderer.parse(text, OBSERVATION)
    wild_observation = OBSERVATION.model_copy(update={"top": "wild", "colour": "green"})
    assert "top wild green" in renderer.render(wild_observation, first=True)[0]["content"]


def test_rules_style_renders_and_parses_text() -> None:
    renderer = UnoRenderer("rules")
    rules, situation = renderer.render(OBSERVATION, first=True)
    assert "The first player without cards wins." in rules["content"]
    assert "Your legal moves: red 7 | blue 5" in situation["content"]
    response = "<think>red 7?</think> <answer>wild blue</answer>"
    assert renderer.parse(response, OBSERVATION).move == "wild blue"


@pytest.mark.slow
async def test_typed_client_plays_over_http() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as server:
        hand = await asyncio.to_thread(play_over_http, server.http_address)
    assert hand == make_environment().reset(seed=3).observation.hand


def play_over_http(address: str) -> list[str]:
    """Play one move over HTTP and return the first hand."""
    with UnoEnv(base_url=address) as env:
        observation = env.reset(seed=3).observation
        env.step(UnoAction(move=observation.legal_actions[0]))
        assert env.state().step_count == 1
        return observation.hand
