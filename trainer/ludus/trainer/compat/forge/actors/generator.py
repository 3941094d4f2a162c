"""An engine that answers prompts, by Forge's name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ludus.proto.config import VllmGenerator
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.controller.actor import ForgeActor
from ludus.trainer.compat.forge.controller.endpoint import endpoint
from ludus.trainer.compat.forge.data_models.completion import Completion
from ludus.trainer.compat.forge.part_settings import path_of_model, settings_of
from ludus.trainer.compat.forge.policy import own_words
from ludus.trainer.compat.forge.weight_exchange import process_exchange
from ludus.trainer.core.streams import Stream, derive_key
from ludus.trainer.core.types import Sampling
from ludus.trainer.driver.policy import PolicyCompletion
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.engines.factory import make_engine
from ludus.trainer.rollout.engines.vllm_process import prepare_process
from ludus.trainer.weights import CanaryJudge, check_canary

_LONGEST = 2048


@dataclass
class Generator(ForgeActor):
    """An engine; which one, `engine` says, or whether there is a GPU."""

    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's: model, and what else there is (`known_keys`)."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's: n, max_tokens, temperature, top_p."""
    seed: int = 0
    """Decides, with the number of the call, what is sampled."""
    engine: str | None = None
    """"vllm" or "transformers"; None takes vLLM on a GPU and transformers on a CPU."""

    def setup(self) -> None:
        """Load the model.

        Raises:
            UserError: there is none, or the settings mean what no engine here does.
        """
        fields = {"engine_args": self.engine_args, "sampling_params": self.sampling_params}
        longest = self.engine_args.get("max_model_len", _LONGEST)
        self._run = settings_of("policy", fields, longest=longest, engine=self.engine)
        if isinstance(self._run.generator, VllmGenerator):
            self._prepare_for_vllm()
        path = path_of_model(self._run)
        self._chat = ChatTokenizer.load(path, self._run.model)
        self._generator = AsyncEngine(make_engine(self._run, path, self._chat))
        self._judge = CanaryJudge(self._run.weights.canary)
        self._version = 0
        # Replicas that take turns sample what one would.
        self._calls = itertools.count(self.replica, self.num_replicas)

    @endpoint
    async def generate(
        self, prompt: str, *, sampling_params: Mapping[str, Any] | None = None
    ) -> list[Completion]:
        """The answers to a text that went through the chat template already.

        Args:
            sampling_params: in place of the generator's own.

        Raises:
            ConfigError: parameters that are not known.
        """
        asked = {**self.sampling_params, **(sampling_params or {})}
        words = own_words(asked)
        rollout, call = self._run.rollout, next(self._calls)
        sampling = Sampling(
            temperature=words.get("temperature", rollout.temperature),
            max_tokens=words.get("max_tokens", rollout.max_completion_tokens),
            top_p=words.get("top_p", rollout.top_p),
        )
        prompt_ids = self._chat.encode(prompt)
        seed = words.get("seed", self.seed)
        keys = [
            derive_key(seed, Stream.ANSWER, call, number) for number in range(words.get("num", 1))
        ]
        said = await asyncio.gather(*(self._generator(prompt_ids, sampling, key) for key in keys))
        answers = [
            PolicyCompletion(self._chat.decode(one.token_ids), prompt_ids, one) for one in said
        ]
        return [Completion.of(answer, prompt) for answer in answers]

    @endpoint
    async def update_weights(self, version: int) -> None:
        """Sample with weights that an RLTrainer of this process has pushed.

        Raises:
            WeightSyncError: they are not there, or did not arrive whole.
            CanaryError: the engine does not sample from them.
        """
        manifest, fetched = await asyncio.to_thread(process_exchange().pull, version)
        await self._generator.load_weights(fetched.state, version)
        answers = await self._generator.score(manifest.canary)
        canary, dtype = self._run.weights.canary, self._run.learner.dtype
        self._judge.check(check_canary(manifest, answers, canary, dtype), worker=0)
        self._version = version

    @endpoint
    async def get_version(self) -> int:
        """Of the weights that sample now."""
        return self._version

    async def shutdown(self) -> None:
        """End the engine; vLLM's takes the process group with it, so RLTrainers end before it."""
        self._generator.close()

    def _prepare_for_vllm(self) -> None:
        if self.num_replicas > 1:
            raise ConfigError(
                f"num_replicas = {self.num_replicas}: expected 1 with vLLM, whose engines would "
                "meet in this process; set engine='transformers', or let setup_forge_training "
                "spread a run over processes"
            )
        # vLLM reads them when the engine's module imports it, which has not happened yet.
        prepare_process(torch.get_num_threads(), on_gpu=torch.cuda.is_available())
