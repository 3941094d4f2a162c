"""Forge's completion type, and the conversion of sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ludus.proto.errors import ConfigError
from ludus.trainer.core.types import SampledCompletion

_SAMPLING_PARAMETERS = ("n", "temperature", "max_tokens", "top_p", "seed")


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A completion of a prompt by a policy."""

    prompt: str
    """Text of the prompt, including special tokens."""
    text: str
    """Text of the completion, without special tokens."""
    prompt_ids: Tensor
    """int64 [P], tokens of the prompt."""
    token_ids: Tensor
    """int64 [T], sampled tokens, including the EOS token."""
    logprobs: Tensor
    """float32 [T], log-probs of the sampled tokens at the sampling temperature."""
    stop_reason: str
    """"stop" after an EOS token, "length" at the token limit."""
    generator_version: int
    """Version of the weights that sampled the first token."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def convert(
        cls, prompt: str, text: str, prompt_ids: Sequence[int], completion: SampledCompletion
    ) -> Self:
        """Convert a sampled completion of Ludus."""
        return cls(
            prompt=prompt,
            text=text,
            prompt_ids=torch.tensor(prompt_ids, dtype=torch.long),
            token_ids=torch.tensor(completion.token_ids, dtype=torch.long),
            logprobs=torch.tensor(completion.logprobs, dtype=torch.float32),
            stop_reason="stop" if completion.has_end_token else "length",
            generator_version=completion.policy_version,
        )


def translate_sampling(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's sampling parameters under the names that Ludus uses."""
    unknown_names = sorted(sampling_params.keys() - _SAMPLING_PARAMETERS)
    if unknown_names:
        raise ConfigError(
            f"sampling_params does not support {', '.join(unknown_names)}; the supported "
            f"parameters are {', '.join(_SAMPLING_PARAMETERS)}"
        )
    return {"num" if name == "n" else name: value for name, value in sampling_params.items()}
