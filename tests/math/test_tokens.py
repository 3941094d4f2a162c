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

QUESTIONS = [f"{a} + {b} = ?" for a in range(20) for b in range(20)]
ANSWERS = [str(number) for number in range(39)] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model for sums, as a run writes it."""
    tokenizer = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    config = TinyModel(width=32, num_heads=1, intermediate=32, max_tokens=32)
    path = tmp_path_factory.mktemp("model")
    save(make_model(config, tokenizer, seed=0), tokenizer, path)
    return path


def test_saved_tokenizer_produces_the_same_tokens(folder: Path) -> None:
    expected_tokenizer = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    tokenizer = load_tokenizer(folder)
    for text in (*QUESTIONS, *ANSWERS):
        assert tokenizer.encode(text) == expected_tokenizer.encode(text)


def test_every_number_is_one_token(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert {len(tokenizer.encode(question)) for question in QUESTIONS} == {5}
    assert {len(tokenizer.encode(answer)) for answer in ANSWERS} == {1}


def test_tokenizer_saved_twice_produces_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.save_pretrained(tmp_path)
    copy = load_tokenizer(tmp_path)
    assert [copy.encode(text) for text in QUESTIONS] == [
        tokenizer.encode(text) for text in QUESTIONS
    ]


def test_auto_tokenizer_produces_the_same_tokens(folder: Path) -> None:
    expected_tokenizer = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(expected_tokenizer)
    for text in (*QUESTIONS, *ANSWERS):
        assert tokenizer.encode(text) == expected_tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_of_an_older_model_type_produces_the_same_tokens(
    folder: Path, tmp_path: Path
) -> None:
    """Load a Qwen2, the type of tiny models in older runs."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    old_config = {**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(old_config))
    original_tokenizer, tokenizer = load_tokenizer(folder), load_tokenizer(tmp_path)
    for text in QUESTIONS:
        assert tokenizer.encode(text) == original_tokenizer.encode(text)
