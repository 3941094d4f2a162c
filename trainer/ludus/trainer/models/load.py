"""Loading a language model from disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ludus.proto.errors import NotFoundError


def load_language_model(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal language model of a folder or a Hugging Face id.

    Raises:
        NotFoundError: there is none.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise NotFoundError(
            f"model.path = '{path}': no model can be loaded from there ({reason}); expected a "
            "folder that save_pretrained wrote, or a Hugging Face id"
        ) from error
