"""Fixtures: engines with untied and tied models, and a server, a client and a tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer
from openspiel_env import make_environment
from tests.rollout.engine_pair import TRANSFORMERS, VLLM, EnginePair, open_pair


@pytest.fixture(scope="module", params=[*TRANSFORMERS, *VLLM], ids=str)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnginePair]:
    """Yield each kind of engine with a plain model of the same weights."""
    torch.set_num_threads(1)
    with open_pair(request.param, tmp_path_factory.mktemp("model")) as engine_pair:
        yield engine_pair


@pytest_asyncio.fixture
async def server() -> AsyncIterator[EnvServer]:
    async with EnvServer(
        lambda: make_environment(game="blackjack"), ServerOptions(port=0)
    ) as env_server:
        yield env_server


@pytest_asyncio.fixture
async def client(server: EnvServer) -> AsyncIterator[AsyncEnvClient]:
    async with await AsyncEnvClient.connect(server.grpc_address) as env_client:
        yield env_client


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(["hard 16 vs 10", "HIT", "STAND"] * 5, 320))
