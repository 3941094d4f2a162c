"""Tests of the tokenizer of a tiny model after saving and loading."""

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
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model that can tokenize sums; return its folder."""
    tokenizer = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    config = TinyModel(width=32, num_heads=1, intermediate=32, max_tokens=32)
    folder = tmp_path_factory.mktemp("model")
    save(make_model(config, tokenizer, seed=0), tokenizer, folder)
    return folder


@pytest.mark.slow
def test_saved_tokenizer_produces_the_same_tokens(model_folder: Path) -> None:
    expected_tokenizer = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    tokenizer = load_tokenizer(model_folder)
    for text in (*QUESTIONS, *ANSWERS):
        assert tokenizer.encode(text) == expected_tokenizer.encode(text)


@pytest.mark.slow
def test_every_number_is_one_token(model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    assert {len(tokenizer.encode(question)) for question in QUESTIONS} == {5}
    assert {len(tokenizer.encode(answer)) for answer in ANSWERS} == {1}


@pytest.mark.slow
def test_tokenizer_saved_twice_produces_the_same_tokens(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    tokenizer.save_pretrained(tmp_path)
    reloaded_tokenizer = load_tokenizer(tmp_path)
    assert [reloaded_tokenizer.encode(text) for text in QUESTIONS] == [
        tokenizer.encode(text) for text in QUESTIONS
    ]


@pytest.mark.slow
def test_auto_tokenizer_produces_the_same_tokens(model_folder: Path) -> None:
    expected_tokenizer = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert len(tokenizer) == len(expected_tokenizer)
    for text in (*QUESTIONS, *ANSWERS):
        assert tokenizer.encode(text) == expected_tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_of_an_older_model_type_produces_the_same_tokens(
    model_folder: Path, tmp_path: Path
) -> None:
    """Load a Qwen2 model, the model type that older runs used for tiny models."""
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((model_folder / "config.json").read_text())
    old_config = {**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(old_config))
    original_tokenizer, tokenizer = load_tokenizer(model_folder), load_tokenizer(tmp_path)
    for text in QUESTIONS:
        assert tokenizer.encode(text) == original_tokenizer.encode(text)
