"""`ludus env list` and `ludus env show`, from an empty folder."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow


def list_entries(ludus: RunCli, *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the entries that `ludus env list` prints, by target."""
    result = ludus("env", "list", "--json", *arguments)
    assert result.code == 0, result.err
    return {entry["target"]: entry for entry in json.loads(result.out)}


def test_list_shows_families_with_their_sizes(ludus: RunCli) -> None:
    entries = list_entries(ludus)
    result = ludus("env", "list")
    rows = {line.split()[0]: line.split() for line in result.out.splitlines() if line.strip()}
    for family in {entry["family"] for entry in entries.values()}:
        members = [entry for entry in entries.values() if entry["family"] == family]
        num_readable = sum(entry["text"] == "readable" for entry in members)
        assert rows[family][1:3] == [str(len(members)), str(num_readable)]
    assert f"{len(entries)} environments" in result.out


def test_catalogue_contains_what_the_libraries_contain(ludus: RunCli) -> None:
    import ale_py
    import gymnasium
    import pyspiel

    entries = list_entries(ludus)
    names = {prefix: set[str]() for prefix in ("openspiel", "atari", "gymnasium", "reasoning_gym")}
    for target in entries:
        prefix, _, name = target.partition(":")
        if name:
            names[prefix].add(name)
    assert names["atari"] == set(ale_py.roms.get_all_rom_ids())
    assert names["openspiel"] < set(pyspiel.registered_names())
    assert {"chess", "goofspiel", "leduc_poker"} < names["openspiel"]
    assert names["gymnasium"] < set(gymnasium.registry)
    assert {"CartPole-v1", "Taxi-v4", "phys2d/CartPole-v1"} < names["gymnasium"]
    packages = {target for target, entry in entries.items() if entry["family"] == "packages"}
    assert {"openspiel_env", "uno_env", "math_env"} <= packages


def test_games_that_need_parameters_and_old_versions_are_not_listed(ludus: RunCli) -> None:
    entries = list_entries(ludus)
    for name in ("openspiel:nfg_game", "openspiel:misere", "openspiel:mfg_garnet"):
        assert name not in entries
    for name in ("CartPole-v0", "HalfCheetah-v2", "HalfCheetah-v4", "GymV21Environment-v0"):
        assert f"gymnasium:{name}" not in entries


def test_entries_are_found_by_words_family_seats_and_text(ludus: RunCli) -> None:
    assert set(list_entries(ludus, "POKER", "kuhn")) == {"openspiel:kuhn_poker"}
    assert set(list_entries(ludus, "--text", "none")) == {"gymnasium:CarRacing-v3"}
    toy_text = list_entries(ludus, "--family", "gymnasium/toy_text")
    assert "gymnasium:Taxi-v4" in toy_text
    assert set(toy_text) < set(list_entries(ludus, "--family", "gymnasium"))
    four_seats = list_entries(ludus, "--seats", "4")
    assert {"openspiel:bridge", "openspiel:kuhn_poker"} < set(four_seats)
    assert not {"openspiel:chess", "openspiel:2048", "atari:pong"} & set(four_seats)
    assert list_entries(ludus, "chess", "--seats", "9") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pokr",), "did you mean 'poker'?"),
        (("tic", "tac", "tow"), "did you mean 'openspiel:tic_tac_toe'"),
        (("--family", "gymnasim"), "did you mean 'gymnasium'?"),
        (("--text", "good"), "must be one of readable, raw, none"),
    ],
)
def test_list_suggests_what_was_meant(ludus: RunCli, arguments, message: str) -> None:
    result = ludus("env", "list", *arguments)
    assert result.code == 2
    assert message in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("chess", "did you mean 'openspiel:chess'"),
        ("openspeil:chess", "did you mean 'openspiel:chess'"),
        ("openspiel:ches", "did you mean chess"),
        ("atari:pogn", "did you mean 'pong'?"),
        ("gym:CartPole-v1", "did you mean 'gymnasium:CartPole-v1'"),
        ("gymnasium:CartPoel-v1", "did you mean 'CartPole-v1'?"),
        ("gymnasium:no_such_module:Id-v0", "pip install no_such_module"),
    ],
)
def test_wrong_target_names_the_right_one(ludus: RunCli, target: str, message: str) -> None:
    result = ludus("env", "show", target)
    assert result.code == 2
    assert message in result.err


def test_a_game_that_needs_parameters_says_so(ludus: RunCli) -> None:
    message = "'nfg_game' needs parameters; set some of filename"
    assert message in ludus("env", "play", "openspiel:nfg_game").err
    assert message in ludus("env", "show", "openspiel:nfg_game").out


def test_show_describes_a_game(ludus: RunCli) -> None:
    result = ludus("env", "show", "openspiel:tic_tac_toe", "--option", "text_style=rules")
    assert result.code == 0, result.err
    for line in ("family: openspiel", "seats: 2", "return: from -1 to 1", "episodes are: won"):
        assert line in result.out
    assert "Which free cell do you mark?" in result.out
    assert "1, 2, 3, 4, 5, 6, 7, 8, 9" in result.out
    rows = [line.split() for line in result.out.splitlines()]
    assert ["agent_player", "integer", "0", "The", "player's", "seat."] in rows
    values = ["text_style", "compact", "or", "rules", "or", "brief", "compact"]
    assert any(row[: len(values)] == values for row in rows)
    assert not any(row[:1] == ["game"] for row in rows), "the target sets the game"
    assert ["minimax", "not", "known"] in rows
    assert "tic_tac_toe/tiny.toml: A tiny language model learns tic-tac-toe" in result.out
    assert "(ludus init tic_tac_toe)" in result.out


def test_show_prints_exact_returns_and_the_results_of_examples(ludus: RunCli) -> None:
    by_prefix = json.loads(ludus("env", "show", "openspiel:blackjack", "--json").out)
    by_package = json.loads(
        ludus("env", "show", "openspiel_env", "--option", "game=blackjack", "--json").out
    )
    for details in (by_prefix, by_package):
        assert details["exact_returns"]["basic_strategy"] == pytest.approx(-0.0428, abs=1e-4)
        examples = {example["path"]: example for example in details["examples"]}
        assert "blackjack/tiny.toml" in examples
        assert "catch/tiny.toml" not in examples
        (result,) = examples["mixed/tiny.toml"]["results"]
        assert result["metric"] == "gap_closed"
        assert all(0 < value < 1 for value in result["values"])


def test_a_return_range_is_printed_only_if_it_is_declared(ludus: RunCli) -> None:
    assert "\nreturn: from 0 to 1\n" in ludus("env", "show", "gymnasium:FrozenLake-v1").out
    assert "\nreturn:" not in ludus("env", "show", "gymnasium:CartPole-v1").out


def test_show_prints_the_options_of_an_environment_that_cannot_start_without(ludus: RunCli) -> None:
    result = ludus("env", "show", "prompts_env")
    assert result.code == 0, result.err
    assert "path is required" in result.out
    assert "retry_prompt" in result.out
    wrong_option = ludus("env", "show", "prompts_env", "--option", "max_turns=0")
    assert wrong_option.code == 2
    assert "max_turns" in wrong_option.err


def test_show_says_that_pictures_are_not_text(ludus: RunCli) -> None:
    result = ludus("env", "show", "gymnasium:CarRacing-v3")
    assert result.code == 0, result.err
    assert "there is no text" in result.out


def test_an_option_that_the_target_sets_is_refused(ludus: RunCli) -> None:
    result = ludus("env", "show", "openspiel:chess", "--option", "game=go")
    assert result.code == 2
    assert "the target already sets game = 'chess'" in result.err


def test_baselines_of_a_prefix_play(ludus: RunCli) -> None:
    result = ludus("env", "bench", "openspiel:catch", "--episodes", "20")
    assert result.code == 0, result.err
    (row,) = (line.split() for line in result.out.splitlines() if "follow ball" in line)
    assert "100.0%" in row
