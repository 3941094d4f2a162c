"""Conversations in which the model calls the tools of an environment."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ludus.env.serving.subprocess import LocalServer
from ludus.proto.config import TinyModel
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.driver import chat as chat_module
from ludus.trainer.driver.chat import ChatSettings, chat
from ludus.trainer.driver.chat_tools import ToolSettings
from ludus.trainer.models.tiny import make_model, save
from tests.controller.trained_run import make_original_model
from tests.rollout.chat_templates import QWEN25, make_family_tokenizer

pytestmark = pytest.mark.slow

SETTINGS = ChatSettings(system=None, temperature=0.0, max_completion_tokens=300, seed=None)
Talk = Callable[..., "Conversation"]


class Conversation:
    """The output of a conversation, and the prompts of its completions."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.out = ""
        self.err = ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model whose chat template lists tools."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    tokenizer = make_family_tokenizer(QWEN25)
    config = TinyModel(num_layers=1, width=32, num_heads=2, intermediate=32, max_tokens=8192)
    save(make_model(config, tokenizer, seed=0), tokenizer, folder)
    return folder


def start_server(target: str) -> Iterator[ToolSettings]:
    with LocalServer(target, max_sessions=1) as server:
        assert server.addresses is not None
        yield ToolSettings(server.addresses.grpc, {}, token_env="", max_calls=8)


@pytest.fixture(scope="module")
def calculator() -> Iterator[ToolSettings]:
    yield from start_server("tests.rollout.calculator_env:CalculatorEnv")


@pytest.fixture(scope="module")
def ending() -> Iterator[ToolSettings]:
    yield from start_server("tests.controller.ending_env:EndingEnv")


@pytest.fixture
def talk(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Return a function that talks to a model with scripted completions."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def run(settings: ToolSettings, text: str, *completions: str) -> Conversation:
        conversation, script = Conversation(), iter(completions)

        def generate(_: Any, prompt: torch.Tensor, streamer: Any, **__: Any) -> None:
            conversation.prompts.append(tokenizer.decode(prompt[0]))
            streamer.put(prompt)
            for token_id in [*tokenizer.encode(next(script)), tokenizer.eos_token_id]:
                streamer.put(torch.tensor([token_id]))
            streamer.end()

        monkeypatch.setattr(transformers.GenerationMixin, "generate", generate)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        chat(str(model), SETTINGS, enable_thinking=False, tool_settings=settings)
        assert next(script, None) is None
        conversation.out, conversation.err = capsys.readouterr()
        return conversation

    return run


def format_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD = format_call("add", a=7, b=12)


def test_a_called_tool_runs_and_the_model_continues_with_its_result(
    talk: Talk, calculator: ToolSettings
) -> None:
    conversation = talk(calculator, "7 + 12?\n", f"I will add. {ADD}", "The sum is 19.")
    assert conversation.out == "I will add. \nThe sum is 19.\n"
    assert conversation.err == f'{ADD}\nadd: {{"sum": 19}}\n'
    first_prompt, second_prompt = conversation.prompts
    assert "Adds two numbers." in first_prompt
    assert second_prompt.startswith(first_prompt)
    assert '<tool_response>\n{"sum": 19}\n</tool_response>' in second_prompt


def test_an_answer_without_a_call_needs_no_call(talk: Talk, calculator: ToolSettings) -> None:
    conversation = talk(calculator, "Hello\nAgain\n", "[1, 2]", '{"a": 1}')
    assert conversation.out == '[1, 2]\n{"a": 1}\n'
    assert conversation.err == ""


def test_a_terminal_shows_calls_and_results_dimmed(
    talk: Talk, calculator: ToolSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "_is_terminal", lambda: True)
    conversation = talk(calculator, "7 + 12?\n", f"Wait: {ADD}", "19")
    dimmed_call, dimmed_result = (f"\x1b[2m{text}\x1b[0m\n" for text in (ADD, 'add: {"sum": 19}'))
    assert conversation.out == f"Wait: \n{dimmed_call}{dimmed_result}19\n"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (format_call("add", a="x"), "expected two integers a and b"),
        (format_call("subtract"), "expected one of the tools add, recite, got 'subtract'"),
        ("<tool_call>{oops", "expected JSON between <tool_call> and </tool_call>"),
    ],
)
def test_the_model_sees_the_error_of_its_call(
    talk: Talk, calculator: ToolSettings, call: str, error: str
) -> None:
    conversation = talk(calculator, "7 + 12?\n", call, ADD, "19")
    assert error in conversation.prompts[1]
    assert error in conversation.err
    assert conversation.out == "19\n"


def test_the_calls_of_a_message_are_limited(talk: Talk, calculator: ToolSettings) -> None:
    settings = replace(calculator, max_calls=2)
    conversation = talk(settings, "7 + 12?\nContinue\n", ADD, ADD, ADD, ADD, "19")
    assert conversation.err.count('"sum"') == 3  # two for the first message, one for the second
    assert "not called: the limit is 2 calls for each message" in conversation.err
    assert conversation.out == "19\n"


def test_a_tool_that_ends_the_episode_says_so_and_the_next_call_starts_another(
    talk: Talk, ending: ToolSettings
) -> None:
    count, finish = format_call("count"), format_call("finish")
    conversation = talk(ending, "Go\n", count, finish + count, count, "Done")
    assert [line for line in conversation.err.splitlines() if line[0] not in "<{"] == [
        'count: {"calls": 1}',
        'finish (reward 2): {"calls": 2}',
        "the tool ended the episode (terminated); the next call starts another",
        'count: {"calls": 1}',
    ]
    assert '{"error": "the episode has ended"}' in conversation.prompts[2]


def test_a_new_conversation_starts_another_episode(talk: Talk, ending: ToolSettings) -> None:
    count = format_call("count")
    conversation = talk(ending, "Go\n/new\nGo\n", count, "1", count, "1")
    assert conversation.err.count('count: {"calls": 1}') == 2


def test_the_conversation_keeps_its_episode(talk: Talk, ending: ToolSettings) -> None:
    count = format_call("count")
    conversation = talk(ending, "Go\nGo\n", count, "1", count, "2")
    assert 'count: {"calls": 2}' in conversation.err


def test_a_target_is_served_during_the_conversation(talk: Talk) -> None:
    target = "tests.rollout.calculator_env:CalculatorEnv"
    conversation = talk(ToolSettings(target, {}, "", 8), "7 + 12?\n", ADD, "19")
    assert 'add: {"sum": 19}' in conversation.err


def test_a_model_whose_template_lists_no_tools_is_refused(
    tmp_path: Path, calculator: ToolSettings
) -> None:
    plain_model = make_original_model(tmp_path)
    with pytest.raises(ConfigError, match=r"the chat template of '.*' does not list tools; choose"):
        chat(str(plain_model), SETTINGS, enable_thinking=False, tool_settings=calculator)


def test_an_environment_without_tools_is_refused(model: Path) -> None:
    target = "tests.env.counting_env:CountingEnv"
    with pytest.raises(ConfigError, match="--env is set, but 'counting' offers no tools; remove"):
        chat(
            str(model),
            SETTINGS,
            enable_thinking=False,
            tool_settings=ToolSettings(target, {}, "", 8),
        )


def test_a_missing_server_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.trainer.driver.chat_tools._CONNECT_TIMEOUT_S", 0.2)
    settings = ToolSettings("grpc://127.0.0.1:9", {}, "", 8)
    with pytest.raises(NotFoundError, match="start a server with `ludus env serve`"):
        chat(str(model), SETTINGS, enable_thinking=False, tool_settings=settings)
