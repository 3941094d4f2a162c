"""TRL's call by which a rollout function samples from the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludus.proto.errors import UserError
from ludus.trainer.rollout.batch.arguments import RolloutTrainer
from ludus.trainer.rollout.batch.completions import Prompt


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Prompt],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """[prompts] `{prompt_ids, completion_ids, logprobs, text}`, one completion for each prompt.

    Args:
        trainer: what the rollout function was called with.
        prompts: text, messages, or token ids; token ids go on from where they stand.
        generation_overrides: of this request: temperature, top_p, top_k, min_p,
            repetition_penalty, max_tokens. What is trained on must be sampled as the run says.
        as_chat: whether the chat template is applied; None where a prompt is messages.

    Raises:
        UserError: it is called outside of a rollout function.
        RolloutFunctionError: a prompt or an override that cannot be.
    """
    if not isinstance(trainer, RolloutTrainer):
        raise UserError(
            "generate_rollout_completions expected the trainer that a rollout function is called "
            f"with, got {type(trainer).__name__}; call it within rollout_func(prompts, trainer)"
        )
    return trainer.generate_rollout_completions(prompts, generation_overrides, as_chat)
