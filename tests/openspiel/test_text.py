"""Tests of the text renderers of OpenSpiel games: prompts and parsing."""

from __future__ import annotations

import random

import pytest

from ludus.env import TextRenderer
from ludus.proto.errors import ActionParseError
from openspiel_env import OpenSpielObservation, make_environment
from openspiel_env.games import load_game
from tests.openspiel.seats import (
    GENERIC_GAMES,
    HIT,
    RENDERED_GAMES,
    make_action,
    play,
    render_state,
)

# A card id is the sum of a suit offset and a rank.
CLUBS, DIAMONDS, HEARTS, SPADES = 0, 13, 26, 39
ACE, TWO, FIVE, SIX, SEVEN, NINE, TEN, KING = 0, 1, 4, 5, 6, 8, 9, 12
EMPTY_ROW = ". . . . . . .\n"


def start_game(game: str, style: str, seed: int = 0) -> tuple[TextRenderer, OpenSpielObservation]:
    environment = make_environment(game=game, text_style=style)
    return environment.text_renderer, environment.reset(seed=seed).observation


def parse_answer(renderer: TextRenderer, observation: OpenSpielObservation, text: str) -> str:
    action_id = renderer.parse(text, observation).action_id
    return renderer.legal_answers(observation)[observation.legal_actions.index(action_id)]


# -- every game ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("style", ["compact", "rules", "brief"])
@pytest.mark.parametrize("game", [*RENDERED_GAMES, *GENERIC_GAMES])
def test_every_legal_response_parses_to_the_matching_action(game: str, style: str) -> None:
    environment = make_environment(game=game, text_style=style)
    renderer = environment.text_renderer
    for seed in range(3):
        for transition in play(environment, seed):
            observation = transition.observation
            answers = renderer.legal_answers(observation)
            assert len(set(answers)) == len(answers) == len(observation.legal_actions)
            for answer, action_id in zip(answers, observation.legal_actions, strict=True):
                assert renderer.parse(answer, observation).action_id == action_id
                assert renderer.parse(f"  {answer}\n", observation).action_id == action_id
                if style != "compact":
                    response = f"<think>or not?</think>I choose <answer> {answer} </answer>."
                    assert renderer.parse(response, observation).action_id == action_id


@pytest.mark.parametrize("game", [*RENDERED_GAMES, *GENERIC_GAMES])
def test_only_the_first_prompt_contains_the_rules(game: str) -> None:
    environment = make_environment(game=game, text_style="rules")
    renderer = environment.text_renderer
    transitions = list(play(environment, seed=1))
    roles = [
        [message["role"] for message in renderer.render(transition.observation, first=index == 0)]
        for index, transition in enumerate(transitions)
    ]
    assert roles == [["system", "user"]] + [["user"]] * (len(transitions) - 1)
    system_message = renderer.render(transitions[0].observation, first=True)[0]["content"]
    first_answer = renderer.legal_answers(transitions[0].observation)[0]
    assert system_message.endswith(f"for example <answer>{first_answer}</answer>.")


@pytest.mark.parametrize("game", [*RENDERED_GAMES, *GENERIC_GAMES])
def test_compact_prompt_is_one_message(game: str) -> None:
    renderer, observation = start_game(game, "compact")
    for is_first in (True, False):
        assert [message["role"] for message in renderer.render(observation, first=is_first)] == [
            "user"
        ]


# -- hidden information -------------------------------------------------------


@pytest.mark.parametrize("style", ["compact", "rules"])
@pytest.mark.parametrize(
    ("game", "moves", "replacements"),
    [
        # the dealer's second card, before and after a hit
        ("blackjack", [TEN, DIAMONDS + SIX, SPADES + TWO, HEARTS + KING], {2: SPADES + ACE}),
        (
            "blackjack",
            [TWO, DIAMONDS + SIX, SPADES + TWO, HEARTS + KING, HIT, FIVE],
            {2: SPADES + ACE},
        ),
        # the opponent's card, before and after moves
        ("kuhn_poker", [1, 0], {1: 2}),
        ("kuhn_poker", [1, 0, 0, 1], {1: 2}),
        ("leduc_poker", [0, 1, 1], {1: 4}),
        ("liars_dice", [2, 4, 3, 5], {1: 0}),
        # the cell that the opponent marked
        ("phantom_ttt", [4, 0], {1: 8}),
    ],
)
def test_prompt_omits_hidden_information(
    game: str, moves: list[int], replacements: dict[int, int], style: str
) -> None:
    variant = [replacements.get(index, action) for index, action in enumerate(moves)]
    assert variant != moves
    assert render_state(game, moves, style=style) == render_state(game, variant, style=style)


@pytest.mark.parametrize(
    ("game", "moves", "replacements"),
    [
        ("blackjack", [TEN, DIAMONDS + SIX, SPADES + TWO, HEARTS + KING], {3: HEARTS + NINE}),
        ("blackjack", [TEN, DIAMONDS + SIX, SPADES + TWO, HEARTS + KING], {1: DIAMONDS + ACE}),
        ("kuhn_poker", [1, 0], {0: 2}),
        ("kuhn_poker", [1, 0, 0, 1], {0: 2}),
        ("leduc_poker", [0, 1, 1], {0: 4}),
        ("phantom_ttt", [4, 0], {0: 5}),
    ],
)
def test_prompt_includes_visible_information(
    game: str, moves: list[int], replacements: dict[int, int]
) -> None:
    variant = [replacements.get(index, action) for index, action in enumerate(moves)]
    assert render_state(game, moves) != render_state(game, variant)


def test_kuhn_poker_prompt_shows_the_card_of_the_seat() -> None:
    assert render_state("kuhn_poker", [1, 0, 0], player=1) == ["card J moves PASS"]
    assert render_state("kuhn_poker", [1, 0, 0, 1], player=0) == ["card Q moves PASS BET"]


# -- blackjack -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hand", "text"),
    [
        ([TEN, DIAMONDS + SIX], "hard 16 vs 10"),
        ([KING, DIAMONDS + KING], "hard 20 vs 10"),
        ([TWO, DIAMONDS + TWO], "hard 4 vs 10"),
        ([ACE, DIAMONDS + ACE], "soft 12 vs 10"),
        ([ACE, DIAMONDS + KING], "soft 21 vs 10"),
        ([ACE, DIAMONDS + SEVEN], "soft 18 vs 10"),
        ([ACE, DIAMONDS + SEVEN, NINE], "hard 17 vs 10"),
        ([ACE, DIAMONDS + TWO, FIVE], "soft 18 vs 10"),
        ([TEN, DIAMONDS + FIVE, SIX], "hard 21 vs 10"),
    ],
)
def test_blackjack_prompt_describes_the_hand(hand: list[int], text: str) -> None:
    moves = [*hand[:2], SPADES + NINE, HEARTS + KING]
    for card in hand[2:]:
        moves += [HIT, card]
    assert render_state("blackjack", moves) == [text]


@pytest.mark.parametrize(("rank", "name"), [(ACE, "A"), (TWO, "2"), (TEN, "10"), (KING, "10")])
def test_dealer_card_has_the_expected_name(rank: int, name: str) -> None:
    moves = [TEN, DIAMONDS + SIX, SPADES + NINE, HEARTS + rank]
    assert render_state("blackjack", moves) == [f"hard 16 vs {name}"]


def test_blackjack_total_matches_the_cards() -> None:
    environment = make_environment(game="blackjack", text_style="rules")
    num_soft = 0
    for seed in range(200):
        for transition in play(environment, seed):
            if transition.terminated:
                continue
            (message,) = environment.text_renderer.render(transition.observation, first=False)
            hand, total, up_card = parse_blackjack_prompt(message["content"])
            values = [{"A": 1, "J": 10, "Q": 10, "K": 10}.get(card) or int(card) for card in hand]
            is_soft = "A" in hand and sum(values) <= 11
            assert total == f"{'soft' if is_soft else 'hard'} {sum(values) + 10 * is_soft}"
            assert up_card in ("A", *map(str, range(2, 11)))
            num_soft += is_soft
    assert num_soft > 10


def parse_blackjack_prompt(text: str) -> tuple[list[str], str, str]:
    """Return the hand, the total and the dealer's up card."""
    hand, description = text.removeprefix("Your hand: ").split(" (", 1)
    total, dealer = description.split("). The dealer shows: ", 1)
    return hand.split(", "), total, dealer.split(".")[0]


def test_prompt_after_a_hit_shows_the_complete_hand() -> None:
    environment = make_environment(game="blackjack", text_style="rules")
    renderer = environment.text_renderer
    num_hits = 0
    for seed in range(30):
        deal = environment.reset(seed=seed).observation
        hit_observation = environment.step(make_action(HIT)).observation
        if hit_observation.game_phase == "terminal":
            continue
        [message] = renderer.render(hit_observation, first=False)
        first_hand = parse_blackjack_prompt(renderer.render(deal, first=False)[0]["content"])[0]
        second_hand = parse_blackjack_prompt(message["content"])[0]
        assert message["role"] == "user"
        assert len(second_hand) == 3
        assert set(first_hand) <= set(second_hand)
        num_hits += 1
    assert num_hits > 5


def test_brief_style_names_the_moves_and_repeats_only_what_changes() -> None:
    moves = [TEN, DIAMONDS + TWO, SPADES + NINE, HEARTS + KING]
    system_text, first_text = render_state("blackjack", moves, style="brief")
    assert system_text.endswith("\n\nAnswer with your move alone, HIT or STAND.")
    assert first_text == "The dealer shows a ten. You have a hard twelve."

    later_texts = render_state("blackjack", [*moves, HIT, SEVEN], style="brief", first=False)
    assert later_texts == ["You have a hard nineteen."]


@pytest.mark.parametrize(
    ("game", "format_rule"),
    [
        ("kuhn_poker", "Answer with your move alone, PASS or BET."),
        ("catch", "Answer with your move alone, for example LEFT."),
    ],
)
def test_brief_style_asks_for_the_move_alone(game: str, format_rule: str) -> None:
    renderer, observation = start_game(game, "brief")
    system_message = renderer.render(observation, first=True)[0]
    assert system_message["content"].endswith(f"\n\n{format_rule}")


def test_final_blackjack_text_shows_both_totals() -> None:
    environment = make_environment(game="blackjack")
    for seed in range(60):
        *_, last_transition = play(environment, seed)
        [message] = environment.text_renderer.render(last_transition.observation, first=False)
        totals = message["content"].removeprefix("over ").split(" vs ")
        player, dealer = (int(total) for total in totals)
        is_win = player <= 21 and (dealer > 21 or player > dealer)
        is_draw = player == dealer and player <= 21
        assert last_transition.reward == (1.0 if is_win else 0.0 if is_draw else -1.0)


# -- other games -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("game", "moves", "player", "text"),
    [
        ("catch", [1], 0, "ball 2 up 9 paddle 3"),
        ("catch", [4, 0, 0], 0, "ball 5 up 7 paddle 1"),
        ("tic_tac_toe", [2, 3], 0, ". . x\no . .\n. . .\nyou x"),
        ("tic_tac_toe", [8], 1, ". . .\n. . .\n. . x\nyou o"),
        ("connect_four", [0, 0], 0, EMPTY_ROW * 4 + "o . . . . . .\nx . . . . . .\nyou x"),
        ("connect_four", [6], 1, EMPTY_ROW * 5 + ". . . . . . x\nyou o"),
        ("kuhn_poker", [2, 0], 0, "card K"),
        ("kuhn_poker", [2, 1, 1], 1, "card Q moves BET"),
        ("kuhn_poker(players=3)", [3, 0, 1, 0, 1], 2, "card 2 moves PASS BET"),
        ("connect_four(rows=4,columns=5)", [4], 1, ". . . . .\n" * 3 + ". . . . x\nyou o"),
    ],
)
def test_compact_style_renders_the_expected_text(
    game: str, moves: list[int], player: int, text: str
) -> None:
    assert render_state(game, moves, player) == [text]


@pytest.mark.parametrize(
    ("game", "moves", "player", "text"),
    [
        ("catch", [1], 0, "The ball is in column 2, 9 rows above the paddle. The paddle is in "),
        ("tic_tac_toe", [2, 3], 0, "1 2 x\no 5 6\n7 8 9\nYou are x."),
        ("connect_four", [6], 1, "1 2 3 4 5 6 7\n. . . . . . ."),
        ("kuhn_poker", [2, 1, 1], 1, "You are player 2 of 2. Your card: Q. Moves so far: BET."),
        (
            "liars_dice",
            [2, 4, 3, 11],
            0,
            "Your opponent's move: 2-6.\nYour dice: 3. Bids so far: 1-4, 2-6.\n"
            "It is your turn. Your legal moves: Liar",
        ),
        (
            "leduc_poker",
            [0, 4, 1],
            1,
            "Your opponent's move: Call.\nRound 1. Your card: K. You have 99 chips, your opponent "
            "99. Pot: 2 chips.\nMoves in round 1: call. Moves in round 2: none.\n"
            "It is your turn. Your legal moves: Call | Raise",
        ),
    ],
)
def test_rules_style_renders_the_expected_text(
    game: str, moves: list[int], player: int, text: str
) -> None:
    assert render_state(game, moves, player, "rules")[1].startswith(text)


def test_prompt_includes_earlier_moves_and_public_cards() -> None:
    moves_with_public_card = [0, 4, 1, 1, 2]
    [text] = render_state("leduc_poker", moves_with_public_card)
    assert "[Public: 2][Round1: 1 1]" in text
    assert text.endswith("moves: Call | Raise")


def test_chess_prompt_shows_the_board_the_colour_and_the_last_move() -> None:
    state = load_game("chess").game.new_initial_state()
    system_text, text = render_state("chess", [state.string_to_action("e4")], style="rules")
    assert system_text.startswith("You play chess as Black against one opponent")
    lines = text.splitlines()
    assert lines[0] == "White's last move: e4."
    assert lines[1:9] == [
        "8 r n b q k b n r",
        "7 p p p p p p p p",
        "6 . . . . . . . .",
        "5 . . . . . . . .",
        "4 . . . . P . . .",
        "3 . . . . . . . .",
        "2 P P P P . P P P",
        "1 R N B Q K B N R",
    ]
    assert lines[9] == "  a b c d e f g h"
    assert lines[-1].startswith("It is your turn. Your legal moves: a6 | a5 | ")


def test_go_prompt_shows_the_board_and_the_last_move() -> None:
    game = "go(board_size=3)"
    system_text, text = render_state(game, [4], player=1, style="rules")
    assert system_text.startswith("You play Go as White on a board of 3 by 3 points")
    assert text == (
        "Black's last move: b2.\n 3 . . .\n 2 . X .\n 1 . . .\n   a b c\nIt is your turn as White. "
        "You may pass or choose one of 8 free points, for example a1."
    )


def test_2048_prompt_shows_the_board() -> None:
    system_text, text = render_state("2048", [0, 19], style="rules")
    assert system_text.startswith("You play 2048 alone")
    assert text == (
        "     2     .     .     .\n     .     .     .     .\n     .     4     .     .\n"
        "     .     .     .     .\nIt is your turn. Your legal moves: Up | Right | Down | Left"
    )


def test_generic_rules_state_the_seat_the_reward_and_the_length() -> None:
    system_text, _ = render_state("breakthrough", [], style="rules")
    assert "You are the first of two players and move first" in system_text
    assert "from -1 (worst) to 1 (best); what one player wins, the others lose." in system_text
    assert "A game has at most" in system_text


def test_generic_prompt_names_the_opponents_last_move() -> None:
    state = load_game("breakthrough").game.new_initial_state()
    move = state.legal_actions()[0]
    name = state.action_to_string(0, move)
    text = render_state("breakthrough", [move], player=1, style="rules")[1]
    assert text.startswith(f"Your opponent's move: {name}.")


# -- parsing -------------------------------------------------------------------


@pytest.mark.parametrize("text", ["HIT", "hit", " Hit\n", "<think>stand?</think>hit"])
def test_compact_style_accepts_a_bare_move(text: str) -> None:
    renderer, observation = start_game("blackjack", "compact")
    assert parse_answer(renderer, observation, text) == "HIT"


@pytest.mark.parametrize(
    "text", ["", "HIT.", "I hit", "HIT STAND", "HITHIT", "0", "<answer>HIT</answer>"]
)
def test_compact_style_rejects_other_text(text: str) -> None:
    renderer, observation = start_game("blackjack", "compact")
    with pytest.raises(ActionParseError, match="expected one of HIT, STAND"):
        renderer.parse(text, observation)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("stand", "STAND"),
        ("I will hit.", "HIT"),
        ("**STAND**", "STAND"),
        ("Hit, hit, hit!", "HIT"),
        ("<answer>stand</answer>", "STAND"),
        ("HIT or STAND? <answer>HIT</answer>", "HIT"),
        ("<answer>HIT</answer> no: <ANSWER>\nSTAND\n</ANSWER>", "STAND"),
        ("<think>I could hit, or stand.</think>\nSTAND", "STAND"),
        ("I could hit, or <answer>HIT</answer></think> STAND", "STAND"),
    ],
)
def test_rules_style_accepts_the_last_tag_or_a_single_move(text: str, answer: str) -> None:
    renderer, observation = start_game("blackjack", "rules")
    assert parse_answer(renderer, observation, text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I hit because I cannot stand it",
        "whit",
        "standing",
        "<answer>fold</answer> HIT",
        "<answer>HIT</answer> <answer>HIT or STAND</answer>",
        "<think>HIT",
        "<think><answer>HIT</answer></think>",
    ],
)
def test_rules_style_rejects_ambiguous_text(text: str) -> None:
    renderer, observation = start_game("blackjack", "rules")
    with pytest.raises(ActionParseError, match="exactly one"):
        renderer.parse(text, observation)


def test_illegal_move_fails_to_parse() -> None:
    environment = make_environment(game="tic_tac_toe", text_style="rules", opponent="first")
    environment.reset(seed=0)
    observation = environment.step(make_action(4)).observation  # 1 and 5 are marked
    renderer = environment.text_renderer
    assert parse_answer(renderer, observation, "cell 9 then") == "9"
    for text in ("5", "I take 5", "9, as 5 is taken", "<answer>1</answer>", "10"):
        with pytest.raises(ActionParseError, match="expected one of 2, 3, 4, 6, 7, 8, 9, got"):
            renderer.parse(text, observation)


def test_parsing_is_case_sensitive_if_moves_differ_only_by_case() -> None:
    renderer, _ = start_game("chess", "rules")
    observation = OpenSpielObservation(
        info_state=[],
        legal_actions=[4, 7, 9],
        metadata={"view": "", "answers": ["bxc3", "Bxc3", "Nf3"]},
    )
    assert renderer.parse("<answer>Bxc3</answer>", observation).action_id == 7
    assert renderer.parse("bxc3 it is", observation).action_id == 4
    assert renderer.parse("nf3", observation).action_id == 9
    with pytest.raises(ActionParseError):
        renderer.parse("BXC3", observation)


def test_longest_matching_move_is_chosen() -> None:
    renderer, _ = start_game("backgammon", "rules")
    observation = OpenSpielObservation(
        info_state=[], legal_actions=[1, 2], metadata={"view": "", "answers": ["Bet", "Bet 10"]}
    )
    assert renderer.parse("I will bet 10 now", observation).action_id == 2
    assert renderer.parse("I will bet", observation).action_id == 1


def test_parsing_does_not_depend_on_earlier_prompts() -> None:
    rng = random.Random(0)
    renderer, observation = start_game("connect_four", "compact")
    second_renderer, _ = start_game("connect_four", "compact", seed=9)
    for answer in rng.sample(renderer.legal_answers(observation), 5):
        assert second_renderer.parse(answer, observation) == renderer.parse(answer, observation)
