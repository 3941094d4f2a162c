"""Fixtures: a tiny model on disk, and a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.learner.tiny_policy import make_policy_folder
from tests.process_group import open_single_rank_group


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model with its tokenizer."""
    return make_policy_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def single_rank_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create a gloo process group whose only rank is this process."""
    with open_single_rank_group(tmp_path_factory.mktemp("ranks")):
        yield
