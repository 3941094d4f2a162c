from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from ludus.env.text.terminal import clean_for_terminal
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.driver.chat import ChatSettings, chat
from tests.controller.trained_run import make_original_model, make_trained_run

GREEDY = ChatSettings(system=None, temperature=0.0, max_completion_tokens=8, seed=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_original_model(tmp_path_factory.mktemp("model"))


class BytesInput(io.TextIOWrapper):
    """Standard input with the given bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")


def talk(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    text: str,
    settings: ChatSettings = GREEDY,
) -> str:
    monkeypatch.setattr(sys, "stdin", BytesInput(os.fsencode(text)))
    chat(str(model), settings, enable_thinking=False)
    return capsys.readouterr().out


def generate(model: Path, messages: list[dict[str, str]]) -> str:
    """Return the most likely answer, according to transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = policy.generate(**inputs, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def show(text: str) -> str:
    return clean_for_terminal(text, keep_newlines=True)


def test_answers_are_those_of_transformers_and_continue_the_conversation(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "hard 16 vs 10"}]
    first = generate(model, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "HIT"}]
    second = generate(model, messages)
    out = talk(monkeypatch, capsys, model, "hard 16 vs 10\n\nHIT\n")
    assert out == show(f"{first}\n{second}\n")


def test_a_new_conversation_forgets_the_previous_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = talk(monkeypatch, capsys, model, "hard 16 vs 10\n/new\nhard 16 vs 10\n")
    first, second = out[: len(out) // 2], out[len(out) // 2 :]
    assert first == second


def test_the_folder_of_a_run_stands_for_its_latest_model(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_trained_run(model, tmp_path / "runs" / "demo")
    trained = run / "checkpoints" / "step-00000004" / "model"
    expected = talk(monkeypatch, capsys, trained, "hard 16 vs 10\n")
    assert talk(monkeypatch, capsys, run, "hard 16 vs 10\n") == expected


def test_a_seed_makes_sampled_answers_repeatable(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        talk(monkeypatch, capsys, model, "hard 16\n", ChatSettings(None, 1.5, 16, seed))
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_conversation_longer_than_the_context_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"reads at most .*; start a new one with /new"):
        talk(monkeypatch, capsys, model, "HIT " * 4000 + "\n")


def test_settings_of_the_model_do_not_change_its_answers(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = shutil.copytree(model, tmp_path / "model")
    settings = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 2}
    (other / "generation_config.json").write_text(json.dumps(settings))
    answers = [talk(monkeypatch, capsys, folder, "hard 16 vs 10\n") for folder in (model, other)]
    assert answers[0] == answers[1]


def test_bytes_that_are_no_text_are_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, capsys, model, os.fsdecode(b"hard \xff\n"))


def test_an_interrupt_ends_a_program_that_answers_a_pipe(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.GenerationMixin, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, capsys, model, "hard 16\nhard 17\n")


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(NotFoundError, match="is a run that has no checkpoint yet"):
        chat(str(tmp_path), GREEDY, enable_thinking=False)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"MODEL './nothing' does not exist; name a folder"):
        chat("./nothing", GREEDY, enable_thinking=False)


@pytest.mark.slow
def test_the_command_answers_standard_input(model: Path, tmp_path: Path) -> None:
    program = "from ludus.services.cli.app import main; main()"
    command = [sys.executable, "-c", program, "chat", str(model), "--temperature", "0"]
    command += ["--max-completion-tokens", "8"]
    process = subprocess.run(
        command, cwd=tmp_path, input="hard 16 vs 10\n", capture_output=True, text=True, check=True
    )
    expected = generate(model, [{"role": "user", "content": "hard 16 vs 10"}])
    assert process.stdout == show(f"{expected}\n")
    assert process.stderr == ""
