"""TRL's function with which a rollout function samples from the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludus.proto.errors import UserError
from ludus.trainer.compat.trl.rollout.arguments import RolloutTrainer
from ludus.trainer.compat.trl.rollout.completion_service import Prompt


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Prompt],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """Return [prompts] `{prompt_ids, completion_ids, logprobs, text}`, one for each prompt.

    Args:
        trainer: the trainer that the rollout function received.
        prompts: text, messages, or token ids, which the completion continues.
        generation_overrides: settings for this request: temperature, top_p, top_k, min_p,
            repetition_penalty, max_tokens. Tokens that are trained on need the run's settings.
        as_chat: apply the chat template; None applies it to messages only.

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
