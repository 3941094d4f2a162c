"""The `args` and the `trainer` that a rollout function with one of TRL's signatures receives.

Both show the run's configuration under TRL's names. Weights, optimizer and data loader are in other
processes; the error for these attributes names the alternative.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError, RolloutFunctionError, UserError
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.rollout.completion_service import (
    HOST,
    CompletionService,
    Prompt,
    RolloutCall,
)
from ludus.trainer.compat.trl.rollout.contract import REQUIRED_KEYS, SAMPLING_FIELDS
from ludus.trainer.core.types import Sampling

_UNAVAILABLE_MESSAGE = (
    "the model is trained in another process; sample with generate_rollout_completions(trainer, "
    "prompts) or POST /generate/"
)
_FIELD_BY_OVERRIDE = {
    **{name: name for name in (*SAMPLING_FIELDS, "max_tokens")},
    "max_completion_length": "max_tokens",
    "max_new_tokens": "max_tokens",
}
"""Field of Sampling by the name of an override."""
_ALL_TOKENS = 0
"""Value of Sampling.top_k that selects all tokens; vLLM uses -1."""


class RolloutArguments(SimpleNamespace):
    """The fields of a GRPOConfig that rollout functions read, for a run without a GRPOConfig."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no '{name}' in this run, only {sorted(vars(self))}; a run of "
            "ludus.trainer.compat.trl.GRPOTrainer has all fields of its GRPOConfig"
        )


def make_arguments(
    script_args: GRPOConfig | None,
    run: LanguageModelRun,
    sampling: Sampling,
    num_generations: int,
    port: int | None,
) -> Any:
    """Return the `args` of one call, with its sampling settings.

    Args:
        script_args: the script's `args`, which are copied; None for a run without a script.
        port: port of POST /generate/; None if it is not served.
    """
    fields: dict[str, Any] = {
        "num_generations": num_generations,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if script_args is None or port is not None:
        fields |= {
            "vllm_server_host": HOST,
            "vllm_server_port": port,
            "vllm_server_base_url": None if port is None else f"http://{HOST}:{port}",
        }
    if script_args is None:
        return RolloutArguments(
            num_generations_eval=num_generations,
            max_completion_length=sampling.max_tokens,
            seed=run.seed,
            chat_template_kwargs=None,
            generation_kwargs=None,
            use_vllm=True,
            vllm_mode="server",
            **fields,
        )
    args = copy.copy(script_args)
    vars(args).update(fields)
    return args


@dataclass(frozen=True, slots=True)
class RolloutTrainerState:
    """The state of training, as a rollout function can read it."""

    global_step: int
    """Version of the worker's weights."""
    is_evaluation: bool = False
    """True if the episodes are not trained on."""


@dataclass(eq=False)
class RolloutTrainer:
    """The `trainer` of a rollout function with the signature (prompts, trainer).

    It must not be used in the thread of the event loop.
    """

    args: Any
    processing_class: PreTrainedTokenizerBase
    state: RolloutTrainerState
    rows: Sequence[Mapping[str, Any]]
    """[prompts] columns of each prompt's row, without the prompt."""
    _sampling: Sampling
    _completions: CompletionService
    _call: RolloutCall
    _loop: asyncio.AbstractEventLoop
    """Event loop on which the completions are sampled."""

    def __post_init__(self) -> None:
        self.num_generations = self.num_generations_eval = self.args.num_generations
        self.max_completion_length = self.args.max_completion_length

    @property
    def end_token_ids(self) -> frozenset[int]:
        """All tokens that end a completion."""
        return self._completions.end_token_ids

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer.{name} is not available: {_UNAVAILABLE_MESSAGE}")

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
        future = asyncio.run_coroutine_threadsafe(
            self._complete(prompts, sampling, as_chat), self._loop
        )
        return future.result()

    async def _complete(
        self, prompts: Sequence[Prompt], sampling: Sampling, as_chat: bool | None
    ) -> list[dict[str, Any]]:
        encoded_prompts = [
            self._completions.encode_prompt(prompt, as_chat=as_chat) for prompt in prompts
        ]
        completions = await self._completions.complete(encoded_prompts, 1, sampling)
        return [
            {
                "prompt_ids": prompt_ids,
                "completion_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "text": self._completions.decode(completion.token_ids),
            }
            for prompt_ids, completion in zip(encoded_prompts, completions, strict=True)
        ]


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Prompt],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """Return a dictionary `{prompt_ids, completion_ids, logprobs, text}` for each prompt.

    Args:
        trainer: the trainer that the rollout function received.
        prompts: text, messages, or token ids, which the completion continues.
        generation_overrides: settings for this request: temperature, top_p, top_k, min_p,
            repetition_penalty, max_tokens. Tokens that are trained on need the run's settings.
        as_chat: whether to apply the chat template; None applies it to messages only.

    Raises:
        UserError: the function is called outside of a rollout function.
        RolloutFunctionError: a prompt or an override is invalid.
    """
    if not isinstance(trainer, RolloutTrainer):
        raise UserError(
            "generate_rollout_completions needs the trainer that the rollout function receives, "
            f"but got {type(trainer).__name__}; call it in rollout_func(prompts, trainer)"
        )
    return trainer.generate_rollout_completions(prompts, generation_overrides, as_chat)


def sample_completions(prompts: Sequence[Prompt], trainer: Any) -> dict[str, Any]:
    """Sample one completion for each prompt: plain text, or messages with the chat template."""
    outputs = generate_rollout_completions(trainer, prompts)
    return {key: [output[key] for output in outputs] for key in REQUIRED_KEYS}


def override_sampling(sampling: Sampling, overrides: Mapping[str, Any]) -> Sampling:
    """Return the settings with `generation_overrides` applied; None keeps a field."""
    unknown_names = sorted(set(overrides) - _FIELD_BY_OVERRIDE.keys())
    if unknown_names:
        raise RolloutFunctionError(
            f"generation_overrides contains {unknown_names}, but must be in "
            f"{sorted(_FIELD_BY_OVERRIDE)}"
        )
    try:
        return replace(
            sampling,
            **{
                _FIELD_BY_OVERRIDE[name]: _ALL_TOKENS if (name, value) == ("top_k", -1) else value
                for name, value in overrides.items()
                if value is not None
            },
        )
    except ConfigError as error:
        raise RolloutFunctionError(f"generation_overrides: {error}") from None
