"""What a rollout function of TRL's is handed: `args`, and a `trainer` that generates.

Both show what the run is configured with, under TRL's names. Weights, optimizer and data loader
live in other processes: whoever asks for them is told so, and what to do instead.
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
from ludus.trainer.core.types import Sampling
from ludus.trainer.rollout.batch.completions import Call, Completions, Prompt

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
"""What the names of others mean in ours."""
_ALL_TOKENS = 0
"""What vLLM calls a top_k of -1."""


@dataclass(frozen=True, slots=True)
class RolloutArguments:
    """Of a run that was not made from a GRPOConfig: the fields of one that rollouts read."""

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
            f"args expected to be asked for one of {sorted(self.__dataclass_fields__)}, got "
            f"'{name}', which this run does not have; a run of "
            "ludus.trainer.compat.trl.GRPOTrainer has all fields of its GRPOConfig"
        )


def arguments_of(
    limits: RolloutConfig, sampling: Sampling, num_generations: int, port: int | None, seed: int
) -> RolloutArguments:
    """The `args` of a run, for one call.

    Args:
        port: where this worker answers POST /generate/; None where it does not.
    """
    return RolloutArguments(
        num_generations=num_generations,
        num_generations_eval=num_generations,
        **_of_sampling(sampling),
        max_completion_length=limits.max_completion_tokens,
        **_server(port),
        seed=seed,
    )


def adapted(given: Any, sampling: Sampling, num_generations: int, port: int | None) -> Any:
    """A copy of a program's own `args`, which says how this worker samples in this call."""
    args = copy.copy(given)
    values = {
        "num_generations": num_generations,
        **_of_sampling(sampling),
        **({} if port is None else _server(port)),
    }
    for name, value in values.items():
        object.__setattr__(args, name, value)
    return args


def _of_sampling(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty,
    }


def _server(port: int | None) -> dict[str, Any]:
    return {
        "vllm_server_host": "127.0.0.1",
        "vllm_server_port": port,
        "vllm_server_base_url": None if port is None else f"http://127.0.0.1:{port}",
    }


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where training stands, as a rollout function may ask."""

    global_step: int
    """Version of the weights that the worker holds."""
    is_evaluation: bool = False
    """Whether nothing is learned from what is played."""


class RolloutTrainer:
    """`trainer` as a rollout function of the form (prompts, trainer) sees it."""

    def __init__(
        self,
        args: Any,
        processing_class: PreTrainedTokenizerBase,
        state: TrainerState,
        rows: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        completions: Completions,
        call: Call,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """To be used in another thread than that of `loop`, on which `completions` lives.

        Args:
            rows: [prompts] what the data set says beside each prompt.
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
        raise AttributeError(f"trainer.{name} is not here: {_NO_TRAINER}")

    def generate_rollout_completions(
        self,
        prompts: Sequence[Prompt],
        generation_overrides: Mapping[str, Any] | None,
        as_chat: bool | None,
    ) -> list[dict[str, Any]]:
        """See `ludus.trainer.compat.trl.generate_rollout_completions`."""
        if self._call.is_over:
            raise RolloutFunctionError(
                "expected completions to be asked for within the call of the rollout function, got "
                "a request after its end; raise rollout.group_timeout_s if it took too long"
            )
        if isinstance(prompts, str):
            raise RolloutFunctionError(
                f"expected a list of prompts, got the text {prompts!r:.60}; write [prompt]"
            )
        sampling = with_overrides(self._sampling, generation_overrides or {})
        answering = asyncio.run_coroutine_threadsafe(
            self._answers(prompts, sampling, as_chat), self._loop
        )
        return answering.result()

    async def _answers(
        self, prompts: Sequence[Prompt], sampling: Sampling, as_chat: bool | None
    ) -> list[dict[str, Any]]:
        ids = [self._completions.prompt_ids(prompt, as_chat=as_chat) for prompt in prompts]
        completions = await self._completions.complete(ids, 1, sampling)
        return [
            {
                "prompt_ids": prompt_ids,
                "completion_ids": one.token_ids,
                "logprobs": one.logprobs,
                "text": self._completions.text(one.token_ids),
            }
            for prompt_ids, one in zip(ids, completions, strict=True)
        ]


def with_overrides(sampling: Sampling, overrides: Mapping[str, Any]) -> Sampling:
    """The sampling with what `generation_overrides` sets; None leaves a field as it is.

    Raises:
        RolloutFunctionError: it sets something that no engine of ours knows, or takes.
    """
    unknown = sorted(set(overrides) - _OVERRIDES.keys())
    if unknown:
        raise RolloutFunctionError(
            f"generation_overrides expected some of {sorted(_OVERRIDES)}, got {unknown}; remove it"
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
