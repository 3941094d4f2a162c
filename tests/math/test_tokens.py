"""Tests that a tiny model tokenizes prompts in the same way as in its warm start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ludus.proto.config import TinyModel
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.models.tiny import make_model, make_tokenizer, save

QUESTIONS = [f"{first} + {second} = ?" for first in range(20) for second in range(20)]
ANSWERS = [str(number) for number in range(39)] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model for sums, as a run writes it."""
    tokenizer = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    config = TinyModel(width=32, num_heads=1, intermediate=32, max_tokens=32)
    path = tmp_path_factory.mktemp("model")
    save(make_model(config, tokenizer, seed=0), tokenizer, path)
    return path


def test_saved_tokenizer_gives_the_same_tokens(folder: Path) -> None:
    expected = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    loaded = load_tokenizer(folder)
    for text in (*QUESTIONS, *ANSWERS):
        assert loaded.encode(text) == expected.encode(text)


def test_every_number_is_one_token(folder: Path) -> None:
    loaded = load_tokenizer(folder)
    assert {len(loaded.encode(question)) for question in QUESTIONS} == {5}
    assert {len(loaded.encode(answer)) for answer in ANSWERS} == {1}


def test_checkpoint_keeps_the_tokens(folder: Path, tmp_path: Path) -> None:
    first = load_tokenizer(folder)
    first.save_pretrained(tmp_path)
    second = load_tokenizer(tmp_path)
    assert [second.encode(text) for text in QUESTIONS] == [first.encode(text) for text in QUESTIONS]


def test_auto_tokenizer_gives_the_same_tokens(folder: Path) -> None:
    expected = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert len(loaded) == len(expected)
    for text in (*QUESTIONS, *ANSWERS):
        assert loaded.encode(text) == expected.encode(text)
        assert loaded.decode(loaded.encode(text)) == text


def test_model_of_another_type_keeps_its_tokens(folder: Path, tmp_path: Path) -> None:
    """Load a Qwen2, the type of tiny models in older runs."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    old = {**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(old))
    original, loaded = load_tokenizer(folder), load_tokenizer(tmp_path)
    for text in QUESTIONS:
        assert loaded.encode(text) == original.encode(text)
