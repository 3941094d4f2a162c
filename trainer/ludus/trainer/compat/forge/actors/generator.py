"""Forge's Generator: an engine that completes prompts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ludus.proto.config import VllmGenerator
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.actor_support import get_weight_exchange, make_actor_settings
from ludus.trainer.compat.forge.controller.actor import ForgeActor, endpoint
from ludus.trainer.compat.forge.data_models.completion import Completion, translate_sampling
from ludus.trainer.core.streams import Stream, derive_key
from ludus.trainer.core.types import Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.engines.async_engine import AsyncEngine, make_engine
from ludus.trainer.rollout.engines.vllm_process import prepare_process
from ludus.trainer.weights.canary import CanaryJudge, check_canary

_DEFAULT_MAX_TOKENS = 2048


@dataclass
class Generator(ForgeActor):
    """An inference engine, chosen by `engine` or by the presence of a GPU."""

    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM, such as model. `keys.py` lists all of them."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of vLLM: n, max_tokens, temperature, top_p."""
    seed: int = 0
    """Seed of the samples, combined with the index of the call."""
    engine: str | None = None
    """"vllm" or "transformers". None selects vLLM on a GPU and transformers on a CPU."""

    def setup(self) -> None:
        """Load the model."""
        max_tokens = self.engine_args.get("max_model_len", _DEFAULT_MAX_TOKENS)
        self._run, model_path = make_actor_settings(
            "policy", vars(self), max_tokens=max_tokens, engine=self.engine
        )
        if isinstance(self._run.generator, VllmGenerator):
            self._prepare_for_vllm()
        self._chat = ChatTokenizer.load(model_path, self._run.model)
        self._generator = AsyncEngine(make_engine(self._run, model_path, self._chat))
        self._judge = CanaryJudge(self._run.weights.canary)
        self._version = 0
        # Replicas that are called in turn sample the same completions as a single replica.
        self._call_indices = itertools.count(self.replica, self.num_replicas)

    @endpoint
    async def generate(
        self, prompt: str, *, sampling_params: Mapping[str, Any] | None = None
    ) -> list[Completion]:
        """Return completions of a text to which the chat template has already been applied.

        Args:
            sampling_params: overrides of the generator's parameters.
        """
        options = translate_sampling({**self.sampling_params, **(sampling_params or {})})
        rollout, call_index = self._run.rollout, next(self._call_indices)
        sampling = Sampling(
            temperature=options.get("temperature", rollout.temperature),
            max_tokens=options.get("max_tokens", rollout.max_completion_tokens),
            top_p=options.get("top_p", rollout.top_p),
        )
        prompt_ids = self._chat.encode(prompt)
        seed, num = options.get("seed", self.seed), options.get("num", 1)
        keys = [derive_key(seed, Stream.ANSWER, call_index, index) for index in range(num)]
        samples = await asyncio.gather(
            *(self._generator(prompt_ids, sampling, key) for key in keys)
        )
        return [
            Completion.convert(prompt, self._chat.decode(sample.token_ids), prompt_ids, sample)
            for sample in samples
        ]

    @endpoint
    async def update_weights(self, version: int) -> None:
        """Load weights that an RLTrainer of this process has pushed.

        Raises:
            WeightSyncError: the version is not available or did not arrive completely.
            CanaryError: the engine does not use the new weights.
        """
        manifest, fetched_weights = await asyncio.to_thread(get_weight_exchange().pull, version)
        await self._generator.load_weights(fetched_weights.state, version)
        logprobs = await self._generator.score(manifest.canary)
        canary_config, dtype = self._run.weights.canary, self._run.learner.dtype
        self._judge.check(check_canary(manifest, logprobs, canary_config, dtype), worker=0)
        self._version = version

    @endpoint
    async def get_version(self) -> int:
        """Return the version of the weights in use."""
        return self._version

    async def shutdown(self) -> None:
        """Close the engine.

        vLLM also destroys the process group, so shut down RLTrainers first.
        """
        self._generator.close()

    def _prepare_for_vllm(self) -> None:
        if self.num_replicas > 1:
            raise ConfigError(
                f"num_replicas = {self.num_replicas} must be 1 with vLLM, because a process can "
                "run one vLLM engine; set engine='transformers', or use setup_forge_training, "
                "which runs several processes"
            )
        # vLLM reads these variables when it is imported, which has not happened yet.
        prepare_process(torch.get_num_threads(), uses_gpu=torch.cuda.is_available())
