"""Tiny models with random weights and a vocabulary made from texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ludus.proto.config import TinyModel
from ludus.trainer.models.tiny import make_model, make_tokenizer, save

TINY = TinyModel(width=32, num_heads=1, intermediate=64, num_layers=1, max_tokens=256)


def tiny_model(folder: Path, texts: Sequence[str], config: TinyModel = TINY, seed: int = 0) -> str:
    """Write a random model whose tokenizer is trained on `texts`; return its folder."""
    tokenizer = make_tokenizer(list(texts) * 4, config.vocab_size)
    save(make_model(config, tokenizer, seed), tokenizer, folder)
    return str(folder)
