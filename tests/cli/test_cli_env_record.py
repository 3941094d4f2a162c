"""`ludus env record`, which writes the episodes of a fixed policy as conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ludus.trainer.sft.examples import read_examples
from tests.cli.commands import RunCli

BLACKJACK = ("env", "record", "openspiel_env", "--option", "game=blackjack")


def test_recorded_episodes_are_data_for_fine_tuning(ludus: RunCli, tmp_path: Path) -> None:
    arguments = ("--policy", "basic_strategy", "--episodes", "30", "--output", "data/games.jsonl")
    outcome = ludus(*BLACKJACK, *arguments)
    assert outcome.code == 0, outcome.err
    assert (
        "30 episodes of 'basic_strategy', mean return" in outcome.out and "success" in outcome.out
    )
    path = tmp_path / "data/games.jsonl"
    examples = list(read_examples(str(path), split="train", field="data.path"))
    assert len(examples) == 30
    responses = {exchange.response for example in examples for exchange in example.exchanges}
    assert responses == {"HIT", "STAND"}
    first_text = path.read_text()
    assert ludus(*BLACKJACK, *arguments).code == 0
    assert path.read_text() == first_text


def test_only_episodes_with_the_lowest_return_are_written(ludus: RunCli, tmp_path: Path) -> None:
    options = ("--policy", "random", "--episodes", "20", "--output", "wins.jsonl")
    assert ludus(*BLACKJACK, *options, "--min-return", "1").code == 0
    rows = [json.loads(line) for line in (tmp_path / "wins.jsonl").read_text().splitlines()]
    assert 0 < len(rows) < 20
    assert {(row["return"], row["success"]) for row in rows} == {(1.0, True)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "nobody", "--output", "a.jsonl"), "--policy must be one of random, always"),
        (("--policy", "random", "--output", "a.csv"), "--output must end with .jsonl"),
        (
            ("--policy", "random", "--output", "a.jsonl", "--episodes", "3", "--min-return", "9"),
            "none of 3 episodes has a return of at least --min-return = 9",
        ),
        (("--policy", "random", "--output", "file/a.jsonl"), "cannot write 'file/a.jsonl'"),
    ],
)
def test_mistakes_write_nothing(
    ludus: RunCli, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").touch()
    outcome = ludus(*BLACKJACK, *options)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
