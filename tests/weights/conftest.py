"""Fixtures of all tests of weights: one thread for tiny models, time for a slow machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ludus.trainer.weights.store import VersionStore


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Use one thread, and restore the number of threads at the end."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def long_drop_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit for dropping old versions, so that a slow machine drops them, too."""
    monkeypatch.setattr(VersionStore, "drop_timeout_s", 60.0)
