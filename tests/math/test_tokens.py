"""What a tiny model is asked is cut into the tokens that it was warm-started on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ludus.proto.config import TinyModel
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.models.tiny import make_model, make_tokenizer, save

QUESTIONS = [f"{left} + {right} = ?" for left in range(20) for right in range(20)]
ANSWERS = [str(number) for number in range(39)] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows sums, as a run leaves it."""
    tokenizer = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    config = TinyModel(width=32, num_heads=1, intermediate=32, max_tokens=32)
    path = tmp_path_factory.mktemp("model")
    save(make_model(config, tokenizer, seed=0), tokenizer, path)
    return path


def test_a_saved_tokenizer_comes_back_with_the_same_tokens(folder: Path) -> None:
    made = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    loaded = load_tokenizer(folder)
    for text in (*QUESTIONS, *ANSWERS):
        assert loaded.encode(text) == made.encode(text)


def test_every_number_of_a_sum_is_one_token(folder: Path) -> None:
    loaded = load_tokenizer(folder)
    assert {len(loaded.encode(question)) for question in QUESTIONS} == {5}
    assert {len(loaded.encode(answer)) for answer in ANSWERS} == {1}


def test_a_checkpoint_of_it_keeps_the_tokens(folder: Path, tmp_path: Path) -> None:
    first = load_tokenizer(folder)
    first.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert [again.encode(text) for text in QUESTIONS] == [first.encode(text) for text in QUESTIONS]


def test_a_loader_that_knows_nothing_of_us_gives_the_same_tokens(folder: Path) -> None:
    made = make_tokenizer([*QUESTIONS, *ANSWERS], 512)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert len(loaded) == len(made)
    for text in (*QUESTIONS, *ANSWERS):
        assert loaded.encode(text) == made.encode(text)
        assert loaded.decode(loaded.encode(text)) == text


def test_a_model_of_another_type_keeps_its_tokens_where_we_load_it(
    folder: Path, tmp_path: Path
) -> None:
    """Tiny models of older runs are Qwen2s."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    old = {**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(old))
    made, loaded = load_tokenizer(folder), load_tokenizer(tmp_path)
    assert [loaded.encode(text) for text in QUESTIONS] == [made.encode(text) for text in QUESTIONS]
