"""Fixtures: a tiny model on disk, and a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_tokenizer
from tests.learner.tiny_policy import make_policy_folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model with its tokenizer."""
    return make_policy_folder(tmp_path_factory.mktemp("model"), num_layers=1)


@pytest.fixture(scope="session")
def tokenizer(model_path: str) -> ChatTokenizer:
    """Return the chat tokenizer of the tiny model."""
    return ChatTokenizer(load_tokenizer(model_path))


@pytest.fixture(scope="session")
def single_rank_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create a gloo process group whose only rank is this process."""
    torch.set_num_threads(1)
    rendezvous = Path(tmp_path_factory.mktemp("ranks")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
