"""Rollout workers outside a training run, with real Ray, environment server and engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from transformers import PreTrainedModel

from ludus.proto.config import LanguageModelRun, load_run_config
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cluster import start_ray
from ludus.trainer.actors.placement import Placement, place_on_one_machine
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.weight_store import make_store
from ludus.trainer.core.interfaces import PublishedWeights, StateDict
from ludus.trainer.core.types import GroupSpec, ScoringRequest
from ludus.trainer.data.mixture import derive_group_seeds
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_language_model
from ludus.trainer.setup.environments import (
    ConnectedEnvironment,
    connect_environments,
    start_local_servers,
)
from ludus.trainer.setup.first_prompts import make_canary_prompts
from ludus.trainer.setup.tiny_model import prepare_model
from ludus.trainer.weights.payload import make_manifest
from ludus.trainer.weights.store import VersionStore

EXAMPLE = Path(__file__).parents[2] / "examples" / "blackjack" / "tiny.toml"
SMALL_RUN_OVERRIDES = (
    "model.warm_start_games=64",
    "rollout.num_groups_in_flight=16",
    "environment.baselines=[]",
    "environment.random_policy=null",
    "environment.optimal_policy=null",
)


@dataclass(frozen=True)
class Fleet:
    """The environment server, model and weight store that rollout workers need."""

    run: LanguageModelRun
    environment: ConnectedEnvironment
    model_path: str
    canary: tuple[ScoringRequest, ...]
    state: StateDict
    store: VersionStore

    @property
    def spec(self) -> RolloutWorkerSpec:
        """Settings of the workers."""
        addresses = {name: self.environment.address for name in self.run.environments}
        return RolloutWorkerSpec(self.run, self.model_path, addresses, self.run.weights)

    @property
    def placement(self) -> Placement:
        """Placement of the actors."""
        return place_on_one_machine(self.run)

    def start_buffer(self) -> RemoteBuffer:
        """Start a new buffer."""
        return RemoteBuffer(self.run, self.placement)

    def publish(self, version: int, logprob_error: float = 0.0) -> PublishedWeights:
        """Publish the model's weights as `version`; a log-prob error makes the canary fail."""
        model = load_language_model(self.model_path)
        logprobs = [
            [logprob + logprob_error for logprob in score_completion(model, prompt)]
            for prompt in self.canary
        ]
        return self.store.publish(
            make_manifest(version, self.state, self.canary, logprobs), self.state
        )

    def make_groups(self, *indices: int) -> list[GroupSpec]:
        """Return the groups with these indices."""
        [name] = self.run.environments
        size = self.run.rollout.group_size
        return [
            GroupSpec(index, name, derive_group_seeds(0, index, size, shared=True))
            for index in indices
        ]


@torch.no_grad()
def score_completion(model: PreTrainedModel, prompt: ScoringRequest) -> list[float]:
    """Return the log-probs of the prompt's completion."""
    token_ids = torch.tensor([prompt.prompt_ids + prompt.completion_ids])
    completion_start = len(prompt.prompt_ids)
    logprobs = torch.log_softmax(model(token_ids).logits[0, completion_start - 1 : -1].float(), -1)
    return logprobs.gather(-1, token_ids[0, completion_start:, None])[:, 0].tolist()


@asynccontextmanager
async def run_fleet(folder: Path, *overrides: str) -> AsyncIterator[Fleet]:
    """Start Ray, an environment server and a model, and stop them after the block."""
    run = load_run_config(EXAMPLE, [*SMALL_RUN_OVERRIDES, *overrides])
    with start_local_servers(run, folder) as servers:
        start_ray()
        try:
            async with connect_environments(run, servers) as environments:
                [environment] = environments.values()
                model_path = await prepare_model(run, environments, folder / "model")
                tokenizer = ChatTokenizer.load(model_path, run.model)
                canary = await make_canary_prompts(environment, tokenizer, run.rollout.max_tokens)
                state = dict(load_language_model(model_path).state_dict())
                yield Fleet(run, environment, model_path, canary, state, make_store(run.weights))
        finally:
            ray.shutdown()
