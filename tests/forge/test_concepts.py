"""Correctness of the numbers in docs/concepts.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ludus.trainer.algorithms.advantages import group_advantages
from openspiel_env.solutions import reference_returns

PAGE = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")
REWARDS = torch.tensor([1.0, 0.0, -1.0, -1.0], dtype=torch.float64)


def read_table(heading: str) -> list[list[str]]:
    """Return the rows of the first table below a heading, without the header row."""
    section = PAGE[PAGE.index(f"## {heading}") :]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows: list[list[str]] = []
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if rows and len(cells) != len(rows[0]):
            break
        rows.append(cells)
    return rows


def test_documented_advantages_are_correct_for_both_std_conventions() -> None:
    rows = read_table("One group, by hand")
    deviations = REWARDS - REWARDS.mean()
    scaled_n = deviations / REWARDS.std(correction=0)
    scaled_n_minus_1 = group_advantages(REWARDS[None], "mean", "group")[0]
    assert [float(row[1]) for row in rows] == REWARDS.tolist()
    assert [float(row[2]) for row in rows] == deviations.tolist()
    assert [float(row[3]) for row in rows] == pytest.approx(scaled_n.tolist(), abs=5e-4)
    assert [float(row[4]) for row in rows] == pytest.approx(scaled_n_minus_1.tolist(), abs=5e-5)
    assert scaled_n.tolist() == pytest.approx([1.508, 0.302, -0.905, -0.905], abs=5e-4)
    assert scaled_n_minus_1.tolist() == pytest.approx([1.3054, 0.2611, -0.7833, -0.7833], abs=5e-5)
    assert f"{REWARDS.std(correction=0):.3f}" == "0.829" and "/ std with n: 0.829" in PAGE
    assert f"{REWARDS.std():.3f}" == "0.957" and "/ std with n - 1: 0.957" in PAGE
    assert f"{(4 / 3) ** 0.5:.3f}" == "1.155" and "1.155" in PAGE


def test_documented_probability_of_a_correct_completion_is_correct() -> None:
    for text, expected_wait, chance_of_8, chance_of_64 in read_table("The idea"):
        probability = float(text)
        chances = [1 - (1 - probability) ** size for size in (8, 64)]
        assert [
            float(cell.removesuffix(" %")) for cell in (chance_of_8, chance_of_64)
        ] == pytest.approx([100 * chance for chance in chances], abs=0.05)
        assert expected_wait == ("never" if probability == 0 else f"{1 / probability:,.0f}")


def test_documented_win_rate_excludes_draws() -> None:
    always_stand = reference_returns("blackjack")["always_stand"]
    match = re.search(r"between (\d+\.\d+) % and (\d+\.\d+) % for a player who always", PAGE)
    assert match is not None
    win_rate, non_loss_rate = always_stand.win_rate, always_stand.win_rate + always_stand.draw_rate
    assert [float(percentage) for percentage in match.groups()] == [
        round(100 * win_rate, 2),
        round(100 * non_loss_rate, 2),
    ]
