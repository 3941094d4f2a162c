"""Forge's completion type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ludus.trainer.driver.policy import PolicyCompletion


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A completion of a prompt by a policy."""

    prompt: str
    """Text of the prompt, including special tokens."""
    text: str
    """Text of the completion, without special tokens."""
    prompt_ids: Tensor
    """int64 [P]"""
    token_ids: Tensor
    """int64 [T], sampled tokens, including the EOS token."""
    logprobs: Tensor
    """float32 [T] of the sampled tokens, at the sampling temperature."""
    stop_reason: str
    """"stop" after an EOS token, "length" at the token limit."""
    generator_version: int
    """Version of the weights that sampled the first token."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def convert(cls, source: PolicyCompletion, prompt: str) -> Self:
        """Convert a completion of Ludus."""
        completion = source.completion
        return cls(
            prompt=prompt,
            text=source.text,
            prompt_ids=torch.tensor(source.prompt_ids, dtype=torch.long),
            token_ids=torch.tensor(completion.token_ids, dtype=torch.long),
            logprobs=torch.tensor(completion.logprobs, dtype=torch.float32),
            stop_reason="stop" if completion.has_end_token else "length",
            generator_version=completion.policy_version,
        )
