"""How GRPOTrainer plays where the script brings no rollout function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludus.trainer.compat.trl.completions import generate_rollout_completions
from ludus.trainer.rollout.batch.completions import Prompt


def sample(prompts: Sequence[Prompt], trainer: Any) -> dict[str, Any]:
    """One completion for each prompt: text as it is, messages through the chat template."""
    outputs = generate_rollout_completions(trainer, prompts)
    return {
        key: [one[key] for one in outputs] for key in ("prompt_ids", "completion_ids", "logprobs")
    }
