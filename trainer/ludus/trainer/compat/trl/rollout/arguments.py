"""The `args` and the `trainer` that a rollout function with a signature of TRL receives.

Both show the run's configuration under TRL's names. Weights, optimizer and data loader are in other
processes; the error for these attributes names the alternative.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ludus.proto.config import RolloutConfig
from ludus.proto.errors import ConfigError, RolloutFunctionError
from ludus.trainer.compat.trl.rollout.completion_service import (
    CompletionService,
    Prompt,
    RolloutCall,
)
from ludus.trainer.core.types import Sampling

_NO_TRAINER = (
    "the model is trained in another process; sample with generate_rollout_completions(trainer, "
    "prompts) or POST /generate/"
)
_OVERRIDES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "max_new_tokens": "max_tokens",
}
"""Fields of Sampling by the names of other libraries."""
_ALL_TOKENS = 0
"""Value of Sampling.top_k for vLLM's -1."""


@dataclass(frozen=True, slots=True)
class RolloutArguments:
    """The fields of a GRPOConfig that rollout functions read, for a run without a GRPOConfig."""

    num_generations: int
    num_generations_eval: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float
    max_completion_length: int
    vllm_server_host: str
    vllm_server_port: int | None
    vllm_server_base_url: str | None
    seed: int
    chat_template_kwargs: None = None
    generation_kwargs: None = None
    use_vllm: bool = True
    vllm_mode: str = "server"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no '{name}' in this run, only {sorted(self.__dataclass_fields__)}; a run of "
            "ludus.trainer.compat.trl.GRPOTrainer has all fields of its GRPOConfig"
        )


def make_arguments(
    limits: RolloutConfig, sampling: Sampling, num_generations: int, port: int | None, seed: int
) -> RolloutArguments:
    """Return the `args` of a run for one call.

    Args:
        port: port of POST /generate/; None if it is not served.
    """
    return RolloutArguments(
        num_generations=num_generations,
        num_generations_eval=num_generations,
        **_sampling_fields(sampling),
        max_completion_length=limits.max_completion_tokens,
        **_server_fields(port),
        seed=seed,
    )


def copy_arguments(
    script_args: Any, sampling: Sampling, num_generations: int, port: int | None
) -> Any:
    """Return a copy of a script's `args` with the sampling settings of this call."""
    args = copy.copy(script_args)
    values = {
        "num_generations": num_generations,
        **_sampling_fields(sampling),
        **({} if port is None else _server_fields(port)),
    }
    for name, value in values.items():
        object.__setattr__(args, name, value)
    return args


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty,
    }


def _server_fields(port: int | None) -> dict[str, Any]:
    return {
        "vllm_server_host": "127.0.0.1",
        "vllm_server_port": port,
        "vllm_server_base_url": None if port is None else f"http://127.0.0.1:{port}",
    }


@dataclass(frozen=True, slots=True)
class RolloutTrainerState:
    """The state of training, as a rollout function can read it."""

    global_step: int
    """Version of the worker's weights."""
    is_evaluation: bool = False
    """True if the episodes are not trained on."""


class RolloutTrainer:
    """The `trainer` of a rollout function with the signature (prompts, trainer)."""

    def __init__(
        self,
        args: Any,
        processing_class: PreTrainedTokenizerBase,
        state: RolloutTrainerState,
        rows: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        completions: CompletionService,
        call: RolloutCall,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Create the trainer, which must be used in another thread than the one of `loop`.

        Args:
            rows: [prompts] the other columns of each prompt's row.
            loop: the event loop on which `completions` runs.
        """
        self.args = args
        self.processing_class = processing_class
        self.state = state
        self.rows = rows
        self.num_generations = self.num_generations_eval = args.num_generations
        self.max_completion_length = args.max_completion_length
        self._sampling = sampling
        self._completions = completions
        self._call = call
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer.{name} is not available: {_NO_TRAINER}")

    def generate_rollout_completions(
        self,
        prompts: Sequence[Prompt],
        generation_overrides: Mapping[str, Any] | None,
        as_chat: bool | None,
    ) -> list[dict[str, Any]]:
        """See `ludus.trainer.compat.trl.generate_rollout_completions`."""
        if self._call.is_over:
            raise RolloutFunctionError(
                "completions must be requested during the call of the rollout function, but the "
                "call has ended; raise rollout.group_timeout_s if it was too slow"
            )
        if isinstance(prompts, str):
            raise RolloutFunctionError(
                f"expected a list of prompts, got the text {prompts!r:.60}; write [prompt]"
            )
        sampling = override_sampling(self._sampling, generation_overrides or {})
        outputs = asyncio.run_coroutine_threadsafe(
            self._complete(prompts, sampling, as_chat), self._loop
        )
        return outputs.result()

    async def _complete(
        self, prompts: Sequence[Prompt], sampling: Sampling, as_chat: bool | None
    ) -> list[dict[str, Any]]:
        ids = [self._completions.prompt_ids(prompt, as_chat=as_chat) for prompt in prompts]
        completions = await self._completions.complete(ids, 1, sampling)
        return [
            {
                "prompt_ids": prompt_ids,
                "completion_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "text": self._completions.text(completion.token_ids),
            }
            for prompt_ids, completion in zip(ids, completions, strict=True)
        ]


def override_sampling(sampling: Sampling, overrides: Mapping[str, Any]) -> Sampling:
    """Return the settings with `generation_overrides` applied; None keeps a field.

    Raises:
        RolloutFunctionError: an override is unknown or has an invalid value.
    """
    unknown_names = sorted(set(overrides) - _OVERRIDES.keys())
    if unknown_names:
        raise RolloutFunctionError(
            f"generation_overrides contains {unknown_names}, but must be in {sorted(_OVERRIDES)}"
        )
    try:
        return replace(
            sampling,
            **{
                _OVERRIDES[name]: _ALL_TOKENS if (name, value) == ("top_k", -1) else value
                for name, value in overrides.items()
                if value is not None
            },
        )
    except ConfigError as error:
        raise RolloutFunctionError(f"generation_overrides: {error}") from None
