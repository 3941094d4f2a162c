"""The numbers of docs/concepts.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ludus.trainer.algorithms.advantages import group_advantages
from openspiel_env.solutions import reference_returns

PAGE = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")
REWARDS = torch.tensor([1.0, 0.0, -1.0, -1.0], dtype=torch.float64)


def table_under(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    below = PAGE[PAGE.index(f"## {heading}") :]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    found = []
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if found and len(cells) != len(found[0]):
            break
        found.append(cells)
    return found


def test_both_conventions_of_an_advantage_are_computed() -> None:
    rows = table_under("One group, by hand")
    above = REWARDS - REWARDS.mean()
    with_n = above / REWARDS.std(correction=0)
    with_less = group_advantages(REWARDS[None], "mean", "group")[0]
    assert [float(row[1]) for row in rows] == REWARDS.tolist()
    assert [float(row[2]) for row in rows] == above.tolist()
    assert [float(row[3]) for row in rows] == pytest.approx(with_n.tolist(), abs=5e-4)
    assert [float(row[4]) for row in rows] == pytest.approx(with_less.tolist(), abs=5e-5)
    assert with_n.tolist() == pytest.approx([1.508, 0.302, -0.905, -0.905], abs=5e-4)
    assert with_less.tolist() == pytest.approx([1.3054, 0.2611, -0.7833, -0.7833], abs=5e-5)
    assert f"{REWARDS.std(correction=0):.3f}" == "0.829" and "/ std with n: 0.829" in PAGE
    assert f"{REWARDS.std():.3f}" == "0.957" and "/ std with n - 1: 0.957" in PAGE
    assert f"{(4 / 3) ** 0.5:.3f}" == "1.155" and "1.155" in PAGE


def test_the_chance_that_a_group_holds_a_right_answer() -> None:
    for text, wait, of_8, of_64 in table_under("The idea"):
        p = float(text)
        chances = [1 - (1 - p) ** size for size in (8, 64)]
        assert [float(cell.removesuffix(" %")) for cell in (of_8, of_64)] == pytest.approx(
            [100 * chance for chance in chances], abs=0.05
        )
        assert wait == ("never" if p == 0 else f"{1 / p:,.0f}")


def test_a_draw_that_is_paid_for_is_no_win() -> None:
    always_stand = reference_returns("blackjack")["always_stand"]
    said = re.search(r"between (\d+\.\d+) % and (\d+\.\d+) % for a player who always", PAGE)
    assert said is not None
    won, not_lost = always_stand.win_rate, always_stand.win_rate + always_stand.draw_rate
    assert [float(one) for one in said.groups()] == [
        round(100 * won, 2),
        round(100 * not_lost, 2),
    ]
