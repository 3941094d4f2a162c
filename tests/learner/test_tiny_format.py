"""Tokenizers of tiny models, and errors for environments without legal answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.env.types import Transition
from ludus.proto.config import LanguageModelRun, LocalEnvironment
from ludus.proto.errors import ConfigError
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.rollout.adapters.environment_adapter import ServerRenderer
from ludus.trainer.setup.environments import ConnectedEnvironment
from ludus.trainer.setup.tiny_model import prepare_model
from tests.env.counting_env import CountingEnv, CountingRenderer, CountObservation
from tests.rollout.calculator_env import CalculatorEnv


class EnvWithoutRenderer(CountingEnv):
    text_renderer = None


class LegalActionsObservation(CountObservation):
    legal_actions: list[int] = [1, 2]  # noqa: RUF012 - pydantic copies defaults


class PictureEnv(EnvWithoutRenderer):
    def reset(self, *, seed: int | None = None) -> Transition[CountObservation]:
        picture = np.zeros((4, 4), np.uint8)
        return Transition(super().reset(seed=seed).observation, tensors={"picture": picture})


class EmptyRenderer(CountingRenderer):
    def legal_answers(self, observation: CountObservation) -> list[str]:
        return []


class EnvWithoutLegalAnswers(CountingEnv):
    observation_type = LegalActionsObservation
    text_renderer = EmptyRenderer()

    def _observe(self, note: str = "") -> LegalActionsObservation:
        return LegalActionsObservation(**super()._observe(note).model_dump())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (EnvWithoutRenderer, "'counting' has no text_renderer; define one"),
        (PictureEnv, "policies read text only"),
        (CalculatorEnv, "'calculator' has a text_renderer whose legal_answers() is empty; list"),
        (EnvWithoutLegalAnswers, "is empty, although the observation has legal_actions; list"),
    ],
)
async def test_environment_without_legal_answers_is_refused(
    factory: type[CountingEnv], message: str, tmp_path: Path
) -> None:
    async with (
        EnvServer(factory, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        config = LocalEnvironment()
        environment = ConnectedEnvironment(
            config, server.grpc_address, client, await client.describe(), ServerRenderer("game")
        )
        with pytest.raises(ConfigError) as error_info:
            await prepare_model(LanguageModelRun(), {"counting": environment}, tmp_path)
    assert message in str(error_info.value)
    assert "model.kind = 'pretrained'" in str(error_info.value)


async def test_environment_with_pictures_only_is_refused() -> None:
    async with (
        EnvServer(PictureEnv, ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        _, step_result = await client.open(seed=1)
    with pytest.raises(ConfigError, match="option picture_columns"):
        ServerRenderer("game").render_messages(step_result, is_first=True)


def test_tags_are_single_tokens_and_decode_unchanged() -> None:
    text = "<think>3 + 4</think><final_answer>7</final_answer>"
    tokenizer = make_tokenizer([text] * 4, 300)
    assert len(tokenizer) <= 300
    tokens = tokenizer.tokenize(text)
    assert [token for token in tokens if token.startswith("<")] == [
        *("<think>", "</think>", "<final_answer>", "</final_answer>")
    ]
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
