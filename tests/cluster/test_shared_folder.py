"""Nodes that do and do not share the run's folder with its driver."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ludus.proto.errors import ConfigError
from ludus.trainer.setup import shared_folder
from ludus.trainer.setup.shared_folder import FolderToken


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "_TIMEOUT_S", 0.2)


def test_a_folder_that_is_shared_is_found_to_be_and_holds_nothing_afterwards(
    tmp_path: Path,
) -> None:
    token = FolderToken.write(tmp_path)
    token.check()
    for rank in range(2):
        token.answer(rank)
    token.check_answers(2)
    token.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_same_name_is_not_the_same_folder(tmp_path: Path) -> None:
    token = FolderToken.write(tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    FolderToken.write(tmp_path)  # another run's
    with pytest.raises(ConfigError, match=r"does not see the run's folder .* all nodes share"):
        token.check()
    with pytest.raises(ConfigError, match="does not see"):
        token.answer(0)


def test_an_answer_that_does_not_arrive_is_missed(tmp_path: Path) -> None:
    token = FolderToken.write(tmp_path)
    token.answer(0)
    with pytest.raises(ConfigError, match=r"what learner rank 1 writes .* does not reach"):
        token.check_answers(2)


def test_a_token_that_a_killed_run_has_left_is_cleared_away(tmp_path: Path) -> None:
    FolderToken.write(tmp_path).answer(0)
    token = FolderToken.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [token.name]
