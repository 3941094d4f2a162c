"""What all tests of weights need: one thread for tiny models, time for a slow machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Set the number of threads, and set it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def time_to_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old versions that are not dropped in time stay until the next, which no test waits for."""
    monkeypatch.setattr("ludus.trainer.weights.store._DROP_TIMEOUT_S", 60.0)
