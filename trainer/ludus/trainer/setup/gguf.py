"""Conversion of a model in the GGUF format to a folder in the Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers.utils.quantization_config import GgufConfig

from ludus.proto.errors import ConfigError


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to a folder, with weights in bfloat16.

    Needs the package gguf.

    Raises:
        ConfigError: the file cannot be converted.
    """
    options = {"gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            **options,
        )
    # Damaged files raise many types of errors.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"'{file}' cannot be converted: {reason}; expected a complete GGUF file of a language "
            "model that transformers supports"
        ) from error
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
