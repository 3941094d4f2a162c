"""What a policy said, in Forge's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ludus.trainer.driver.policy import PolicyCompletion


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One answer of a policy to a prompt."""

    prompt: str
    """As text, special tokens and all."""
    text: str
    """Without special tokens."""
    prompt_ids: Tensor
    """int64 [P]"""
    token_ids: Tensor
    """int64 [T] sampled, the end token included."""
    logprobs: Tensor
    """float32 [T] of the sampled tokens, at the sampling temperature."""
    stop_reason: str
    """"stop" where it ended with an end token, "length" where it ran out of tokens."""
    generator_version: int
    """Of the weights that sampled the first token."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: PolicyCompletion, prompt: str) -> Self:
        """The same in Forge's words."""
        said = answer.completion
        return cls(
            prompt=prompt,
            text=answer.text,
            prompt_ids=torch.tensor(answer.prompt_ids, dtype=torch.long),
            token_ids=torch.tensor(said.token_ids, dtype=torch.long),
            logprobs=torch.tensor(said.logprobs, dtype=torch.float32),
            stop_reason="stop" if said.has_end_token else "length",
            generator_version=said.policy_version,
        )
