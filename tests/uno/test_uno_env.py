"""Uno: its cards and rules, what seats see, and what is paid."""

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
from uno_env.cards import COLOURS, DECK
from uno_env.policies import POLICIES, fixed_policies
from uno_env.rules import Deal
from uno_env.text import UnoRenderer

SHOWN = UnoObservation(
    hand=["red 7", "blue 5", "wild"],
    top="red 5",
    colour="red",
    others=[4],
    legal_actions=["red 7", "blue 5", *(f"wild {colour}" for colour in COLOURS)],
)


def deal_of(hands: list[list[str]], top: str, pile: list[str] | None = None) -> Deal:
    """A deal that stands so, with seat 0 to move."""
    deal = Deal(len(hands), random.Random(0))
    deal.hands = [list(hand) for hand in hands]
    deal._played = [top]
    deal.colour = top.partition(" ")[0]
    deal._pile = list(pile if pile is not None else ["green 9"] * 20)
    return deal


def played(policy: str, seed: int, **options: Any) -> list[dict[str, Any]]:
    """The observations of a deal, and then whether it was won."""
    environment = make_environment(**options)
    act, rng = fixed_policies(options)[policy], random.Random(f"player {seed}")
    result = environment.reset(seed=seed)
    seen = [result.observation.model_dump()]
    while not (result.terminated or result.truncated):
        result = environment.step(UnoAction.model_validate(act(seen[-1], rng)))
        seen.append(result.observation.model_dump())
    seen.append({"success": result.success})
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_players": 4, "opponent": "greedy"}])
def test_every_rule_of_the_environment_contract_holds(options: dict[str, Any]) -> None:
    def make() -> Any:
        return make_environment(**options)

    check_environment(make, seeds=range(2), num_steps=10).raise_if_failed()


def test_the_classes_are_found_beside_those_of_the_other_packages() -> None:
    package = importlib.import_module("envs.uno_env")
    assert package.UnoAction(move="draw").move == "draw"
    assert package.UnoEnv.default_url == "http://localhost:8010"


def test_the_deck_has_the_cards_of_the_box() -> None:
    count = Counter(DECK)
    assert len(DECK) == 108 and len(count) == 54
    assert count["red 0"] == 1 and count["red 9"] == 2 and count["blue skip"] == 2
    assert count["wild"] == count["wild +4"] == 4


def test_cards_are_neither_lost_nor_made_in_a_whole_deal() -> None:
    for seed in range(20):
        deal, rng = Deal(4, random.Random(seed)), random.Random(f"moves {seed}")
        for _ in range(300):
            if deal.winner is not None:
                break
            deal.move(rng.choice(deal.legal_moves()))
            cards = [*deal._pile, *deal._played, *(c for hand in deal.hands for c in hand)]
            assert Counter(cards) == Counter(DECK)


def test_a_card_fits_by_colour_number_or_sign_and_who_can_play_may_not_draw() -> None:
    deal = deal_of([["red 1", "blue 5", "blue 6", "wild"], ["red 1"]], "red 5")
    wilds = [f"wild {colour}" for colour in COLOURS]
    assert deal.legal_moves() == ["red 1", "blue 5", *wilds]
    deal = deal_of([["blue skip", "blue 6"], ["red 1"]], "red skip")
    assert deal.legal_moves() == ["blue skip"]
    assert deal_of([["blue 6"], ["red 1"]], "red skip").legal_moves() == ["draw"]


def test_a_wild_draw_four_needs_a_hand_without_the_colour_and_calls_one() -> None:
    assert deal_of([["wild +4", "red 1"], ["red 1"]], "red 5").legal_moves() == ["red 1"]
    deal = deal_of([["wild +4", "blue 1", "blue 2"], ["red 1"], ["red 2"]], "red 5")
    assert "wild +4 blue" in deal.legal_moves()
    assert deal.move("wild +4 blue") == "plays wild +4 blue"
    assert (deal.colour, deal.turn, len(deal.hands[1])) == ("blue", 2, 5)


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
def test_signs_do_what_they_say(
    card: str, num_players: int, turn: int, num_cards_of_next: int
) -> None:
    deal = deal_of([[card, "red 9"], *([["blue 1"]] * (num_players - 1))], "red 5")
    deal.move(card)
    assert (deal.turn, len(deal.hands[1])) == (turn, num_cards_of_next)
    assert deal.direction == (-1 if card == "red reverse" and num_players > 2 else 1)


def test_a_drawn_card_that_fits_is_played_at_once_or_kept() -> None:
    deal = deal_of([["blue 6"], ["red 1"]], "red 5", pile=["green 1", "red 8"])
    assert deal.move("draw") == "draws"
    assert (deal.turn, deal.legal_moves()) == (0, ["red 8", "pass"])
    deal.move("pass")
    assert (deal.turn, deal.hands[0]) == (1, ["blue 6", "red 8"])
    deal = deal_of([["blue 6"], ["red 1"]], "red 5", pile=["green 1"])
    deal.move("draw")
    assert (deal.turn, deal.hands[0]) == (1, ["blue 6", "green 1"])


def test_a_used_up_pile_is_shuffled_anew_and_where_no_card_is_left_none_is_drawn() -> None:
    deal = deal_of([["blue 6"], ["green 1"]], "red 5", pile=[])
    assert deal.move("draw") == "finds no card to draw"
    assert (deal.turn, len(deal.hands[0])) == (1, 1)
    deal._played = ["green 7", "yellow 2", "red 5"]
    assert deal.move("draw") == "draws"
    assert deal.top == "red 5" and len(deal.hands[1]) == 2


def test_a_deal_follows_from_its_seed_and_first_cards_whatever_is_played() -> None:
    assert played("random", 3) == played("random", 3)
    assert played("random", 3)[0] == played("greedy", 3, opponent="greedy")[0]
    hands = {tuple(make_environment().reset(seed=seed).observation.hand) for seed in range(20)}
    assert len(hands) == 20  # and no two deals alike
    assert all(played("greedy", seed)[0]["top"][-1].isdigit() for seed in range(10))


@pytest.mark.slow
def test_a_player_with_a_plan_beats_chance() -> None:
    wins = {
        policy: sum(played(policy, seed)[-1]["success"] is True for seed in range(100))
        for policy in POLICIES
    }
    assert wins["greedy"] > wins["random"] + 10


def test_who_plays_the_last_card_wins_and_a_deal_can_be_cut_off() -> None:
    environment = make_environment()
    environment.reset(seed=1)
    environment._deal = deal_of([["red 1"], ["red 2"]], "red 5")
    result = environment.step(UnoAction(move="red 1"))
    assert (result.reward, result.terminated, result.success) == (1.0, True, True)
    assert (environment.state.winner, result.observation.legal_actions) == (0, [])
    with pytest.raises(EpisodeStateError):
        environment.step(UnoAction(move="draw"))
    environment.reset(seed=1)
    environment._deal = deal_of([["red 1", "red 3"], ["red 2"]], "red 5")
    result = environment.step(UnoAction(move="red 1"))
    assert (result.reward, result.success) == (-1.0, False)
    assert result.observation.events == ["player 0 plays red 1", "player 1 plays red 2"]
    short = make_environment(max_turns=1)
    first = short.reset(seed=1).observation
    result = short.step(UnoAction(move=first.legal_actions[0]))
    assert (result.reward, result.truncated, result.terminated) == (0.0, True, False)


def test_moves_that_are_not_legal_change_nothing() -> None:
    environment = make_environment()
    with pytest.raises(EpisodeStateError):
        environment.step(UnoAction(move="draw"))
    before = environment.reset(seed=2).observation
    for move in ("", "wild", "red 99", "pass"):
        with pytest.raises(IllegalActionError, match="expected one of"):
            environment.step(UnoAction(move=move))
    assert environment.state.step_count == 0
    after = environment.step(UnoAction(move=before.legal_actions[0]))
    assert after.observation.events[0].endswith(before.legal_actions[0])


@pytest.mark.parametrize(
    "options",
    [{"num_players": 1}, {"num_players": 11}, {"max_turns": 0}, {"opponent": "x"},
     {"text_style": "x"}],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"expected {next(iter(options))}"):
        make_environment(**options)


def test_the_text_tells_the_seat_and_takes_the_name_of_a_move() -> None:
    compact = UnoRenderer("compact")
    shown = compact.render(SHOWN, first=True)[0]["content"]
    assert shown == "top red 5 hand red 7, blue 5, wild others 4"
    assert compact.parse("Red 7", SHOWN).move == "red 7"
    assert compact.parse("I play wild green.", SHOWN).move == "wild green"
    for text in ("", "red 5", "wild", "red 7 or blue 5"):
        with pytest.raises(ActionParseError, match="expected one of red 7"):
            compact.parse(text, SHOWN)
    rules = UnoRenderer("rules")
    told = [message["content"] for message in rules.render(SHOWN, first=True)]
    assert "Who has no card left wins" in told[0]
    assert "Your legal moves: red 7 | blue 5" in told[1]
    answer = "<think>red 7?</think> <answer>wild blue</answer>"
    assert rules.parse(answer, SHOWN).move == "wild blue"
    called = SHOWN.model_copy(update={"top": "wild", "colour": "green"})
    assert "top wild green" in compact.render(called, first=True)[0]["content"]


@pytest.mark.slow
async def test_the_typed_client_plays_over_http() -> None:
    async with EnvServer(make_environment, ServerOptions(port=0)) as up:
        hand = await asyncio.to_thread(played_over, up.http_address)
    assert hand == make_environment().reset(seed=3).observation.hand


def played_over(address: str) -> list[str]:
    with UnoEnv(base_url=address) as env:
        first = env.reset(seed=3).observation
        env.step(UnoAction(move=first.legal_actions[0]))
        assert env.state().step_count == 1
        return first.hand
