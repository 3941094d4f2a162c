"""A completion ends at every end token that the model's files list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ludus.proto.config import PretrainedModel
from ludus.trainer.core.interfaces import EngineOutput
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import load_language_model
from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine
from tests.rollout.engine_pair import (
    END_TOKEN_ID,
    complete,
    make_folder,
    make_requests,
    prepare_for_vllm,
)

LISTED_IDS = [END_TOKEN_ID, 300, 301]


def write_end_tokens(folder: Path, file_name: str, end_token_ids: int | list[int] | None) -> None:
    """Set the end tokens of a model in one of its files."""
    file = folder / file_name
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["eos_token_id"] = end_token_ids
    file.write_text(json.dumps(settings), encoding="utf-8")


def load_chat(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(str(folder), PretrainedModel(path=str(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path / "model", tie_embeddings=False)
    return tmp_path / "model"


def test_generation_config_lists_end_tokens(folder: Path) -> None:
    write_end_tokens(folder, "generation_config.json", LISTED_IDS)
    assert load_chat(folder).end_token_ids == {*LISTED_IDS}


@pytest.mark.parametrize("end_token_ids", [[END_TOKEN_ID, 300], 300])
def test_model_config_lists_end_tokens(folder: Path, end_token_ids: int | list[int]) -> None:
    (folder / "generation_config.json").unlink()
    write_end_tokens(folder, "config.json", end_token_ids)
    assert load_chat(folder).end_token_ids == {END_TOKEN_ID, 300}


def test_template_decides_if_no_file_lists_end_tokens(folder: Path) -> None:
    write_end_tokens(folder, "generation_config.json", None)
    write_end_tokens(folder, "config.json", None)
    assert load_chat(folder).end_token_ids == {END_TOKEN_ID}


def test_decoded_text_has_no_end_token(folder: Path) -> None:
    write_end_tokens(folder, "generation_config.json", LISTED_IDS)
    chat = load_chat(folder)
    token_ids = chat.tokenizer.encode("HIT")
    assert chat.decode([*token_ids, 300]) == "HIT"


def check_ends(outputs: dict[int, EngineOutput], end_token_ids: set[int]) -> None:
    """Check that completions end at each of the end tokens, and contain none before."""
    last_ids = set()
    for output in outputs.values():
        *earlier_ids, last_id = output.token_ids
        assert not end_token_ids.intersection(earlier_ids)
        assert output.has_end_token == (last_id in end_token_ids)
        last_ids.add(last_id)
    assert end_token_ids <= last_ids


# Tokens that the model of these tests samples often.
SAMPLED_IDS = {20, 21, 22, 23, 24, 25}


def test_transformers_engine_ends_at_every_end_token(folder: Path) -> None:
    engine = TransformersEngine(load_language_model(folder), end_token_ids=SAMPLED_IDS)
    check_ends(complete(engine, make_requests(400, max_tokens=60)), SAMPLED_IDS)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_vllm_engine_ends_at_every_end_token(folder: Path) -> None:
    with prepare_for_vllm():
        from ludus.proto.config import VllmGenerator
        from ludus.trainer.rollout.engines.vllm_engine import VllmEngine

        engine = VllmEngine(
            str(folder),
            VllmGenerator(max_num_seqs=64),
            end_token_ids=SAMPLED_IDS,
            max_tokens=128,
            dtype="float32",
        )
        try:
            check_ends(complete(engine, make_requests(400, max_tokens=60)), SAMPLED_IDS)
        finally:
            engine.close()
