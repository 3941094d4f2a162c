"""The check that all nodes share the run folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ludus.proto.errors import ConfigError
from ludus.trainer.setup import shared_folder
from ludus.trainer.setup.shared_folder import FolderToken


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "VISIBLE_TIMEOUT_S", 0.2)


def test_shared_folder_check_passes_and_leaves_no_files(tmp_path: Path) -> None:
    token = FolderToken.write(tmp_path)
    token.check()
    for rank in range(2):
        token.reply(rank)
    token.check_replies(2)
    token.remove()
    assert list(tmp_path.iterdir()) == []


def test_different_folder_with_the_same_path_fails_the_check(tmp_path: Path) -> None:
    token = FolderToken.write(tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    FolderToken.write(tmp_path)  # token of another run
    with pytest.raises(ConfigError, match=r"does not see the run's folder .* all nodes share"):
        token.check()
    with pytest.raises(ConfigError, match="does not see"):
        token.reply(0)


def test_missing_reply_is_an_error(tmp_path: Path) -> None:
    token = FolderToken.write(tmp_path)
    token.reply(0)
    with pytest.raises(ConfigError, match=r"learner rank 1 writes .* do not reach the driver"):
        token.check_replies(2)


def test_token_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    FolderToken.write(tmp_path).reply(0)
    token = FolderToken.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [token.name]
