"""The engines under test, each with an untied and a tied model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.rollout.engine_pair import TRANSFORMERS, VLLM, EnginePair, open_pair


@pytest.fixture(scope="module", params=[*TRANSFORMERS, *VLLM], ids=str)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnginePair]:
    """Each kind of engine with its plain model, one after the other."""
    torch.set_num_threads(1)
    with open_pair(request.param, tmp_path_factory.mktemp("model")) as opened:
        yield opened
