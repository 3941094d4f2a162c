"""Conversion of a script's model and tokenizer to the model settings of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl import GRPOConfig
from ludus.trainer.compat.trl.inputs import make_model_section
from ludus.trainer.models.load import load_tokenizer
from tests.rollout.engine_pair import make_folder

ARGS = GRPOConfig(max_completion_length=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"), tie_embeddings=False)


def test_a_model_folder_is_not_changed(folder: str, tmp_path: Path) -> None:
    section = make_model_section(folder, load_tokenizer(folder), None, ARGS, tmp_path / "saved")
    assert (section.settings["path"], section.settings["lora"]) == (folder, None)
    assert not (tmp_path / "saved").exists(), "an unchanged tokenizer was saved again"
    short_limit, long_limit = (
        section.find_max_tokens([text], ARGS, uses_tools=False) for text in ("a", "a" * 9)
    )
    assert long_limit > short_limit
    assert section.find_max_tokens(["a"], ARGS, uses_tools=True) >= short_limit
    limited_args = GRPOConfig(max_completion_length=20, vllm_max_model_length=77)
    assert section.find_max_tokens(["a"], limited_args, uses_tools=False) == 77


@pytest.mark.slow
def test_model_objects_are_saved(folder: str, tmp_path: Path) -> None:
    model, tokenizer = (AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder))
    saved_folder = tmp_path / "saved"
    section = make_model_section(model, tokenizer, None, ARGS, saved_folder)
    assert section.settings["path"] == str(saved_folder)
    assert load_tokenizer(str(saved_folder)).get_vocab() == tokenizer.get_vocab()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    section = make_model_section(folder, tokenizer, None, ARGS, tmp_path / "template")
    assert section.settings["path"] == str(tmp_path / "template")
    assert load_tokenizer(str(tmp_path / "template")).chat_template == tokenizer.chat_template


def test_lora_and_thinking_become_model_settings(folder: str, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    args = GRPOConfig(max_completion_length=20, chat_template_kwargs={"enable_thinking": True})
    settings = make_model_section(folder, None, lora, args, tmp_path).settings
    assert settings["lora"] == {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    assert settings["enable_thinking"] is True
    with pytest.raises(ConfigError, match=r"lora_dropout = 0\.1 is not supported"):
        make_model_section(folder, None, LoraConfig(lora_dropout=0.1), ARGS, tmp_path)
    for field, value in (
        ("target_modules", "all-linear"),
        ("use_rslora", True),
        ("use_dora", True),
        ("bias", "all"),
    ):
        with pytest.raises(ConfigError, match=rf"peft_config\.{field} = .* is not supported"):
            make_model_section(folder, None, LoraConfig(**{field: value}), ARGS, tmp_path)
    settings = {"kind": "pretrained", "path": folder}
    assert (
        make_model_section(settings, None, None, args, tmp_path).settings["enable_thinking"] is True
    )
    date_args = GRPOConfig(chat_template_kwargs={"date": "today"})
    with pytest.raises(ConfigError, match=r"only enable_thinking, but has \['date'\]"):
        make_model_section(folder, None, None, date_args, tmp_path)
    with pytest.raises(ConfigError, match="brings its own tokenizer"):
        make_model_section({"kind": "tiny"}, load_tokenizer(folder), None, ARGS, tmp_path)
