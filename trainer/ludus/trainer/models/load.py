"""Loading a language model and its tokenizer from disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from ludus.proto.errors import NotFoundError

# In the log of a job, each refresh of a bar is a line.
disable_progress_bar()

_SELF_CONTAINED = "TokenizersBackend"
"""What transformers names a tokenizer whose tokenizer.json says all there is to know."""


def load_language_model(
    path: str | Path, dtype: torch.dtype | Literal["auto"] = torch.float32
) -> PreTrainedModel:
    """The causal language model of a folder or a Hugging Face id.

    Args:
        dtype: of its weights; "auto" is that of the files.

    Raises:
        NotFoundError: there is none.
    """
    with _refusing(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")


def load_skeleton(path: str | Path) -> PreTrainedModel:
    """The model of a folder or a Hugging Face id without its weights, of which none is read.

    Raises:
        NotFoundError: there is none.
    """
    with _refusing(path), torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a Hugging Face id, as it was saved.

    For some model types AutoTokenizer takes a class of its own in place of the saved one. A tiny
    model of type qwen2, as older runs have made them, would see every number cut into digits:
    other tokens than those that it was warm-started on.
    """
    file = Path(path) / "tokenizer_config.json"
    saved = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    is_self_contained = saved.get("tokenizer_class") == _SELF_CONTAINED
    return (PreTrainedTokenizerFast if is_self_contained else AutoTokenizer).from_pretrained(path)


@contextmanager
def _refusing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise NotFoundError(
            f"model.path = '{path}': no model can be loaded from there ({reason}); expected a "
            "folder that save_pretrained wrote, or a Hugging Face id"
        ) from error
