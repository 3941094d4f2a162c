"""Chat templates whose turns, thoughts and tool calls have separate forms."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest

from ludus.env import Message
from ludus.proto.config import LanguageModelRun, PretrainedModel, RolloutConfig
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.driver.checks import check_first_prompts
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.messages import (
    AssistantMessage,
    make_result,
    make_template_calls,
    mark_completion,
    name_results,
)
from ludus.trainer.models.tool_calls import ToolCall, ToolSpec
from ludus.trainer.setup.chat_template import check_chat_template, keep_chat_template
from tests.rollout.chat_templates import (
    CALL_IDS,
    CHANNELS,
    MISTRAL,
    NEXT_ROLE,
    NO_CALLS,
    PLAIN,
    QWEN3,
    UNKNOWN_CALLS,
    XML_CALLS,
    Family,
    make_family_tokenizer,
)
from tests.rollout.engine_pair import make_folder

ADD_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
USER: Message = {"role": "user", "content": "2 + 3?"}


def make_chat(family: Family, *end_tokens: str, **options: Any) -> ChatTokenizer:
    tokenizer = make_family_tokenizer(family)
    end_token_ids = [tokenizer.convert_tokens_to_ids(token) for token in end_tokens]
    return ChatTokenizer(tokenizer, end_token_ids=end_token_ids, **options)


def decode(chat: ChatTokenizer, token_ids: list[int]) -> str:
    return chat.tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("end_token", "role", "text"),
    [
        ("<|user|>", "user", "hi<|assistant|>"),
        ("<|observation|>", "tool", "hi<|assistant|>"),
        ("<|user|>", "tool", "<|observation|>hi<|assistant|>"),
        (None, "tool", "<|observation|>hi<|assistant|>"),
        (None, "user", "<|user|>hi<|assistant|>"),
    ],
)
def test_sampled_token_of_the_next_role_is_not_repeated(
    end_token: str | None, role: str, text: str
) -> None:
    chat = make_chat(NEXT_ROLE, "<|user|>", "<|observation|>")
    assert decode(chat, [chat.end_token_id]) == "<|user|>"
    token_ids = chat.encode_next_prompt(
        [{"role": role, "content": "hi"}],
        has_end_token=end_token is not None,
        end_token_id=chat.tokenizer.convert_tokens_to_ids(end_token) if end_token else None,
    )
    assert decode(chat, token_ids) == text


def test_conversation_cannot_grow_if_earlier_turns_end_differently() -> None:
    chat = make_chat(CHANNELS)
    with pytest.raises(ConfigError, match=r"set model\.keep_thinking = false"):
        chat.check_turns()
    with pytest.raises(ConfigError, match=r"set model\.keep_thinking = false"):
        chat.encode_next_prompt([USER], has_end_token=True)
    make_chat(CHANNELS, keep_thinking=False).check_turns()


@pytest.mark.parametrize("thought", ["", "<|thoughts|>hmm<|end|><|start|>assistant"])
def test_thoughts_in_a_separate_message_are_separated(thought: str) -> None:
    chat = make_chat(CHANNELS, keep_thinking=False)
    text = f"{thought}<|final|>five"
    assert chat.thoughts.split(text) == ("hmm" if thought else "", "five")
    assert not thought or chat.thoughts.get_answer("<|thoughts|>hmm, 2 + ") == ""
    completion = mark_completion({"role": "assistant", "content": text})
    token_ids = chat.encode_whole_prompt([USER, completion, USER])
    assert decode(chat, token_ids) == (
        "<|start|>user<|message|>2 + 3?<|end|><|start|>assistant<|final|>five<|end|>"
        "<|start|>user<|message|>2 + 3?<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("keep_thinking", [True, False])
def test_results_follow_calls_in_the_form_of_the_template(keep_thinking: bool) -> None:
    chat = make_chat(XML_CALLS, keep_thinking=keep_thinking)
    text = "<tool_call><function=add><parameter=a>2</parameter></function></tool_call>"
    assert chat.call_form.read_calls(text, [ADD_TOOL]) == [ToolCall("add", {"a": 2})]
    result = make_result(ToolCall("add", {"a": 2}), "5")
    token_ids = chat.encode_first_prompt([USER], [ADD_TOOL])
    if keep_thinking:
        token_ids += chat.encode_completion(text)
        token_ids += chat.encode_next_prompt([result], has_end_token=True)
    else:
        completion = mark_completion({"role": "assistant", "content": text})
        token_ids = chat.encode_whole_prompt([USER, completion, result], [ADD_TOOL])
    prompt = decode(chat, token_ids)
    assert prompt.endswith(f"assistant: {text}<|end|>result of add: 5<|end|>assistant: ")


def test_result_has_the_id_that_the_model_gave_the_call() -> None:
    chat = make_chat(CALL_IDS)
    text = '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 2}'
    (call,) = chat.call_form.read_calls(text, [ADD_TOOL])
    calls = make_template_calls([call])
    answer: AssistantMessage = {"role": "assistant", "content": "", "calls": calls}
    tool_message: Message = {"role": "tool", "content": "5"}
    for result in (make_result(call, "5"), name_results([answer, tool_message])[1]):
        tail = decode(chat, chat.encode_next_prompt([result], has_end_token=True))
        assert tail == "result of abcdefghi: 5<|end|>assistant: "
    without_id = chat.encode_next_prompt(
        [make_result(ToolCall("add", {}), "5")], has_end_token=True
    )
    assert "<tool_response>\n5" in decode(chat, without_id)


@pytest.mark.parametrize(("max_turns", "is_refused"), [(1, False), (2, True)])
async def test_run_with_several_turns_is_refused_when_it_starts(
    max_turns: int, is_refused: bool
) -> None:
    run = LanguageModelRun(rollout=RolloutConfig(max_turns=max_turns))
    check = check_first_prompts(run, dict.fromkeys(run.environments, None), make_chat(CHANNELS))  # type: ignore[arg-type]
    # Without an environment, the check of a run that is not refused fails later.
    with pytest.raises(ConfigError if is_refused else AttributeError):
        await check


def test_default_serves_all_conversations_if_there_are_several_templates() -> None:
    tokenizer = copy.deepcopy(make_family_tokenizer(PLAIN))
    tokenizer.chat_template = {"default": PLAIN.template, "tool_use": XML_CALLS.template}
    chat = ChatTokenizer(tokenizer)
    prompt = decode(chat, chat.encode_first_prompt([USER], [ADD_TOOL]))
    assert prompt.startswith("System: You may call these tools")
    tokenizer.chat_template = {"tool_use": XML_CALLS.template}
    with pytest.raises(ConfigError, match="consists of tool_use without a default"):
        ChatTokenizer(tokenizer)


def test_message_of_the_assistant_cannot_join_the_sampled_completion() -> None:
    answer: Message = {"role": "assistant", "content": "five"}
    with pytest.raises(ConfigError, match="refuses conversations with the roles assistant, user"):
        make_chat(MISTRAL).encode_next_prompt([answer, USER], has_end_token=True)


def test_result_without_a_call_is_shown_as_text_of_the_user() -> None:
    chat = make_chat(XML_CALLS)
    token_ids = chat.encode_next_prompt(
        [{"role": "tool", "content": "no such tool"}], has_end_token=True
    )
    assert "user: <tool_response>\nno such tool" in decode(chat, token_ids)


def test_unknown_form_of_calls_is_refused_by_name() -> None:
    chat = make_chat(UNKNOWN_CALLS)
    with pytest.raises(ConfigError, match=r"unknown form, such as '\(probe_tool"):
        chat.encode_first_prompt([USER], [ADD_TOOL])
    assert "2 + 3?" in decode(chat, chat.encode_first_prompt([USER]))


def test_tool_whose_calls_cannot_be_read_back_is_refused() -> None:
    tool: Any = {"type": "function", "function": {**ADD_TOOL["function"], "name": "add>two"}}
    with pytest.raises(ConfigError, match=r"'add>two' .* in the form xml; rename"):
        make_chat(XML_CALLS).encode_first_prompt([USER], [tool])


def test_template_without_calls_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    chat = make_chat(NO_CALLS)
    with caplog.at_level(logging.WARNING):
        chat.encode_first_prompt([USER], [ADD_TOOL])
    assert "renders no tool calls; calls are expected in the form hermes" in caplog.text


def test_call_with_thoughts_is_shown_again_as_the_template_would() -> None:
    chat = make_chat(QWEN3, keep_thinking=False)
    call_text = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    text = f"<think>hm</think>\n\nAsk.\n{call_text}"
    completion = mark_completion({"role": "assistant", "content": text})
    result = make_result(ToolCall("add", {"a": 2}), "5")
    prompt = decode(chat, chat.encode_whole_prompt([USER, completion, result], [ADD_TOOL]))
    assert '"arguments": {"a": 2}' in prompt and "5" in prompt.rpartition("</tool_call>")[2]


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    """Return a model without a chat template."""
    make_folder(tmp_path / "model", tie_embeddings=False)
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    return tmp_path / "model"


def test_missing_template_names_the_setting(base_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"no chat template; set model\.chat_template"):
        ChatTokenizer.load(str(base_model), PretrainedModel(path=str(base_model)))


def test_template_of_the_configuration_is_kept_with_the_run(
    base_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text(PLAIN.template, encoding="utf-8")
    model = PretrainedModel(path=str(base_model), chat_template=str(file))
    run = LanguageModelRun(name="kept", output_dir=str(tmp_path), model=model)
    run.folder.mkdir()
    check_chat_template(run)
    kept_run = keep_chat_template(run)
    file.unlink()
    check_chat_template(run)  # as in a resumed run
    chat = ChatTokenizer.load(str(base_model), kept_run.model)
    assert decode(chat, chat.encode_first_prompt([USER])) == "User: 2 + 3?\nAssistant: "
    assert (run.folder / "chat_template.jinja").read_text(encoding="utf-8") == PLAIN.template


def test_missing_template_file_is_named(base_model: Path, tmp_path: Path) -> None:
    model = PretrainedModel(path=str(base_model), chat_template="none.jinja")
    run = LanguageModelRun(name="missing", output_dir=str(tmp_path), model=model)
    with pytest.raises(NotFoundError, match=r"model\.chat_template = 'none\.jinja'"):
        check_chat_template(run)
