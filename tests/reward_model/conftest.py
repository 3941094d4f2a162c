"""Fixtures: comparisons ranked by a hidden rule, and tiny models of two families."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ludus.trainer.models.tiny import make_model, make_tokenizer, save

EXAMPLE = Path(__file__).parents[2] / "examples/reward_model/make_preferences.py"


def load_example() -> ModuleType:
    """Import the example program that generates comparisons."""
    spec = importlib.util.spec_from_file_location("make_preferences", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def use_one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def example() -> ModuleType:
    """Return the example program that generates comparisons."""
    return load_example()


@pytest.fixture(scope="session")
def model_path(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a tiny Llama model with a chat template; return its folder."""
    config = example.MODEL.model_copy(
        update={"width": 32, "num_heads": 1, "intermediate": 32, "num_layers": 1}
    )
    texts = [
        f" {word} Tell me about {topic}." for word in example.WORDS for topic in example.TOPICS
    ]
    tokenizer = make_tokenizer(texts, config.vocab_size)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save(make_model(config, tokenizer, 0), tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="session")
def gpt2_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a tiny GPT-2 model without padding token or chat template; return its folder."""
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    tokenizer = make_tokenizer(["Tell me about bread. good calm"] * 5, 300)
    tokenizer.chat_template = None
    tokenizer.pad_token = None
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = GPT2Config(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **sizes
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def preferences_path(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file with 64 comparisons of four answers each; return its path."""
    path = tmp_path_factory.mktemp("data") / "preferences.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in example.make_comparisons(64, seed=1)))
    return path
