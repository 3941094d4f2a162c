"""Verdicts on the chat templates of well-known models: is each prompt the template's own text?

    exact     the tokens are those of apply_chat_template for the same messages
    as text   the template has no such messages; they are exact as text of a user or system message
    refused   a run with such messages is refused by name

A conversation with appended prompts is exact if its first prompt and the text between each
completion and the next one are the template's. Earlier turns keep the tokens that were sampled.

    python -m tests.conformance.template_families     writes docs/chat-templates.md
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from upstream_environment import build_virtual_environment, download_source

from ludus.proto.errors import ConfigError
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.messages import make_result, mark_completion
from tests.conformance.parties import TRL_PACKAGES

TRL_ENVIRONMENT = "upstream-trl-1.16.0+openenv-0.10.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
PAGE = Path(__file__).parents[2] / "docs" / "chat-templates.md"

EXACT, AS_TEXT, REFUSED, WRONG = "exact", "as text", "refused", "WRONG"

_SPECIAL_PATTERN = re.compile(
    r"<\|[a-zA-Z0-9_/\"]+\|>|<｜[^'｜]+｜>|<\|?(?:start_of_turn|end_of_turn|turn|channel|tool_call|"
    r"tool_response|tool|think)\|?>|<bos>|<eos>|</?s>|\[gMASK\]|<sop>|<\|?[a-z_]+\|?>(?=['\"]\s*[-+}])"
    r"|\[/?[A-Z_]{4,}\]|<SPECIAL_\d+>|</?(?:assistant|user|system)>|<sep>"
)
_TAGS = re.compile(r"</?[a-z_]+>")
_EOS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>"),
    *("<｜end▁of▁sentence｜>", "<|return|>", "<|eot|>", "</s>", "<|end_of_text|>", "<|endoftext|>"),
    *("<|end|>", "<|assistant_end|>", "<|im_user|>"),
)
_FURTHER_ENDS = ("<|user|>", "<|observation|>", "<|call|>", "<|tool_response>", "<|eom_id|>")
"""Tokens that generation_config.json lists besides the EOS token."""

ADD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_sum",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "A word."},
                "number": {"type": "integer", "description": "A number."},
            },
            "required": ["word", "number"],
        },
    },
}

_MARKER = "<!-- verdicts -->\n"
"""Line of the page after which the table starts."""

Messages = list[dict[str, Any]]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


@dataclass(frozen=True)
class Family:
    """The chat template of a model family."""

    name: str
    template: str

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A byte-level tokenizer with the special tokens in the template."""
        tokens_in_template = {
            token for token in _SPECIAL_PATTERN.findall(self.template) if len(token) > 2
        }
        specials = {token for token in tokens_in_template if not _TAGS.fullmatch(token)}
        specials |= tokens_in_template & {
            "<bos>",
            "<eos>",
            "<s>",
            "</s>",
            "<sop>",
            "<start_of_turn>",
        }
        specials |= tokens_in_template & {"<end_of_turn>", "</assistant>", "<sep>"}
        eos = next((token for token in _EOS if token in specials), "<|endoftext|>")
        if "[gMASK]" in specials:
            eos = "<|endoftext|>"
        bos = next((token for token in sorted(specials) if "begin_of" in token), "<bos>")
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {symbol: token_id for token_id, symbol in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokens = sorted({*specials, eos, bos})
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in tokens]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=eos,
            pad_token=eos,
            bos_token=bos,
            chat_template=self.template,
            clean_up_tokenization_spaces=False,
        )

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end a completion, as generation_config.json lists them."""
        vocabulary = self.tokenizer.get_vocab()
        return [vocabulary[token] for token in _FURTHER_ENDS if token in vocabulary]


class Judge:
    """A comparison of Ludus's prompts with those of one template."""

    def __init__(self, family: Family, *, enable_thinking: bool) -> None:
        self.tokenizer = family.tokenizer
        self.enable_thinking = enable_thinking
        self.chat = self.make_chat(family, keep_thinking=True)
        self.whole_chat = self.make_chat(family, keep_thinking=False)
        self.end = self.tokenizer.decode([self.chat.end_token_id])

    def make_chat(self, family: Family, *, keep_thinking: bool) -> ChatTokenizer:
        return ChatTokenizer(
            self.tokenizer,
            end_token_ids=family.end_token_ids,
            enable_thinking=self.enable_thinking,
            keep_thinking=keep_thinking,
        )

    def render(self, messages: Messages, tools: Any = None, *, is_prompt: bool = True) -> str:
        """Return the template's text of messages in OpenAI's format."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=is_prompt,
                    enable_thinking=self.enable_thinking,
                )
            )
        except Exception as error:
            raise TemplateError(str(error)) from error

    def compare(self, token_ids: list[int], *expected: Callable[[], str]) -> str:
        """Return EXACT if the tokens are the first expected text, AS_TEXT for the others."""
        for index, make_text in enumerate(expected):
            try:
                text = make_text()
            except TemplateError:
                continue
            if token_ids == self.tokenizer.encode(text, add_special_tokens=False):
                return EXACT if index == 0 else AS_TEXT
        return WRONG

    # -- properties

    def judge_system(self) -> str:
        messages = [system("be brief"), user("one")]
        token_ids = self.chat.encode_first_prompt(messages)
        merged = [user("be brief\n\none")]
        return self.compare(token_ids, lambda: self.render(messages), lambda: self.render(merged))

    def judge_later_system(self) -> str:
        later = [system("mid"), user("three")]
        tail = self.decode_tail(later)
        merged = [user("mid\n\nthree")]
        return self.compare_tail("two", tail, [user("one"), self.answer("two")], later, merged)

    def judge_appended(self) -> str:
        self.chat.check_turns()
        verdict = self.compare(
            self.chat.encode_first_prompt([user("one")]), lambda: self.render([user("one")])
        )
        tail = self.decode_tail([user("three")])
        start = [user("zero"), self.answer("minus"), user("one"), self.answer("two")]
        return worst(verdict, self.compare_tail("two", tail, start, [user("three")]))

    def judge_whole(self) -> str:
        thoughts = self.chat.thoughts
        verdicts = []
        for thought in ("", "hmm"):
            text = f"{thoughts.answer_start}two"
            if thought:
                start = "" if thoughts.is_open else f"{thoughts.start}\n"
                text = f"{start}{thought}\n{thoughts.end}{text}"
            elif thoughts.is_open:
                text = f"\n{thoughts.end}\n\ntwo"
            sampled = mark_completion({"role": "assistant", "content": text})
            token_ids = self.whole_chat.encode_whole_prompt([user("one"), sampled, user("three")])
            opening = f"{thoughts.start}\n" if thoughts.is_open else ""
            raw = {"role": "assistant", "content": opening + text}
            answers = [self.answer("two", thought), raw, self.answer("two")]
            texts = [lambda a=a: self.render([user("one"), a, user("three")]) for a in answers]
            verdict = self.compare(token_ids, *texts)
            verdicts.append(EXACT if verdict == AS_TEXT else verdict)
        return worst(*verdicts)

    def judge_tools(self) -> str:
        token_ids = self.chat.encode_first_prompt([user("one")], [ADD_TOOL])
        if "<tool_call>\n{" in self.tokenizer.decode(token_ids) and not self.lists_tools:
            return AS_TEXT
        return self.compare(token_ids, lambda: self.render([user("one")], [ADD_TOOL]))

    @property
    def lists_tools(self) -> bool:
        try:
            return "find_sum" in self.render([user("one")], [ADD_TOOL])
        except TemplateError:
            return False

    def judge_results_appended(self) -> str:
        """Return the verdict on the second of two rounds of calls and results."""
        self.chat.check_turns()
        self.chat.check_tools([ADD_TOOL])
        tool_call = self.chat.call_form.read_calls(self.call_text("needle2", 1), [ADD_TOOL])[0]
        result = make_result(tool_call, "five")
        tail = self.decode_tail([result])
        start = [user("one"), *self.round("needle1", 0), self.call("needle2", 1)]
        verdict = self.compare_tail("needle2", tail, start, [self.result(1)], is_call=True)
        if verdict != WRONG:
            return verdict
        text = "<tool_response>\nfive\n</tool_response>"
        answers = [user("one"), self.answer("two")]
        for role in ("tool", "user"):
            content = text if role == "user" else "five"
            messages = [{"role": role, "content": content}]
            if self.compare_tail("two", tail, answers, messages) == EXACT:
                return AS_TEXT
        return WRONG

    def judge_results_whole(self) -> str:
        chat = self.whole_chat
        chat.check_tools([ADD_TOOL])
        messages: list[Any] = [user("one")]
        for index, needle in enumerate(("needle1", "needle2")):
            text = self.call_text(needle, index)
            opening = self.chat.thoughts.end if self.chat.thoughts.is_open else ""
            messages.append(mark_completion({"role": "assistant", "content": opening + text}))
            messages.append(make_result(chat.call_form.read_calls(text, [ADD_TOOL])[0], "five"))
        token_ids = chat.encode_whole_prompt(messages, [ADD_TOOL])
        expected = [user("one"), *self.round("needle1", 0), *self.round("needle2", 1)]
        if not self.renders_calls:
            expected = [
                {"role": message["role"], "content": message["content"]} for message in messages
            ]
        verdict = self.compare(token_ids, lambda: self.render(expected, [ADD_TOOL]))
        if verdict == WRONG and not self.lists_tools:
            text = self.tokenizer.decode(token_ids)
            parts = ["one", "needle1", "five", "needle2", "five"]
            return AS_TEXT if re.search(".*".join(parts), text, re.DOTALL) else WRONG
        return verdict

    # -- parts

    def answer(self, content: str, thought: str = "") -> dict[str, Any]:
        fields = ("reasoning_content", "thinking", "reasoning") if thought else ()
        return {"role": "assistant", "content": content, **dict.fromkeys(fields, thought)}

    def call(self, needle: str, index: int, number: int = 7) -> dict[str, Any]:
        arguments = {"word": needle, "number": number}
        function = {"name": "find_sum", "arguments": arguments}
        entry = {"id": f"call{index:05d}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [entry]}

    def result(self, index: int) -> dict[str, Any]:
        call_id = f"call{index:05d}"
        return {"role": "tool", "name": "find_sum", "tool_call_id": call_id, "content": "five"}

    def round(self, needle: str, index: int) -> Messages:
        return [self.call(needle, index), self.result(index)]

    @property
    def renders_calls(self) -> bool:
        """True if the template shows calls of the tools that it lists."""
        messages = [user("one"), self.call("needle", 0)]
        try:
            return self.lists_tools and "needle" in self.render(messages, is_prompt=False)
        except TemplateError:
            return False

    def call_text(self, needle: str, index: int, number: int = 7) -> str:
        """Return the text with which a completion calls the tool."""
        if not self.renders_calls:
            return (
                f'<tool_call>\n{{"name": "find_sum", "arguments": {{"word": "{needle}", '
                '"number": 7}}\n</tool_call>'
            )
        text = self.render([user("one"), self.call(needle, index, number)], is_prompt=False)
        other = self.render([user("one"), self.answer("~~")], is_prompt=False)
        pairs = enumerate(zip(text, other, strict=False))
        start = next(position for position, (a, b) in pairs if a != b)
        text = text[start:]
        ends = [text.find(self.tokenizer.decode([i])) for i in self.chat.end_token_ids]
        return text[: min((end for end in ends if end > 0), default=len(text))]

    def decode_tail(self, messages: list[Any]) -> str:
        """Return the text that follows a completion without an end token."""
        token_ids = self.chat.encode_next_prompt(messages, has_end_token=False)
        return str(self.tokenizer.decode(token_ids))

    def compare_tail(
        self,
        needle: str,
        tail: str,
        start: Messages,
        *alternatives: Messages,
        is_call: bool = False,
    ) -> str:
        """Return whether the template's text after the needle is the tail."""
        for index, messages in enumerate(alternatives):
            try:
                text = self.render([*start, *messages])
                rest = text[text.rindex(needle) + len(needle) :]
                if is_call:
                    call_text = self.call_text(needle, 1)
                    call_rest = call_text[call_text.index(needle) + len(needle) :].rstrip()
                    if not rest.startswith(call_rest):
                        return WRONG
                    rest = rest[len(call_rest) :]
            except (TemplateError, ValueError):
                continue
            texts = (tail, self.end + tail, tail.removeprefix(self.end))
            if rest.lstrip() in [text.lstrip() for text in texts]:
                return EXACT if index == 0 else AS_TEXT
        return WRONG


def worst(*verdicts: str) -> str:
    """Return the worst of some verdicts."""
    return max(verdicts, key=[EXACT, AS_TEXT, REFUSED, WRONG].index)


PROPERTIES: Mapping[str, Callable[[Judge], str]] = {
    "system": Judge.judge_system,
    "later system": Judge.judge_later_system,
    "appended turns": Judge.judge_appended,
    "whole prompts": Judge.judge_whole,
    "tools": Judge.judge_tools,
    "results, appended": Judge.judge_results_appended,
    "results, whole": Judge.judge_results_whole,
}


def judge_family(family: Family) -> dict[str, str]:
    """Return the cells of a family's row in the table."""
    cells_by_mode = [_judge_mode(family, enable_thinking=mode) for mode in (False, True)]
    plain_cells, thinking_cells = cells_by_mode
    return {
        name: cell if thinking_cells[name] == cell else f"{cell}; thinking: {thinking_cells[name]}"
        for name, cell in plain_cells.items()
    }


def _judge_mode(family: Family, *, enable_thinking: bool) -> dict[str, str]:
    try:
        judge = Judge(family, enable_thinking=enable_thinking)
    except ConfigError:
        return dict.fromkeys(["end token", "calls", *PROPERTIES], REFUSED)
    cells = {"end token": f"`{judge.end}`", "calls": judge.chat.call_form.name}
    for name, judge_property in PROPERTIES.items():
        try:
            cells[name] = judge_property(judge)
        except ConfigError as error:
            assert "the chat template of" in str(error)
            cells[name] = REFUSED
    if cells["tools"] == REFUSED:
        cells["calls"] = "unknown"
    return cells


def load_families() -> Iterator[Family]:
    """Yield the templates in TRL's package and in llama.cpp, which a source package contains."""
    python = build_virtual_environment(TRL_ENVIRONMENT, TRL_PACKAGES)
    for folder in (python.parent.parent / "lib").glob("*/site-packages/trl/chat_templates"):
        for path in sorted(folder.glob("*.jinja")):
            if "training" not in path.stem:  # these differ only in marks for loss masks
                yield Family(f"trl/{path.stem}", path.read_text("utf-8"))
    with tarfile.open(download_source(LLAMA_CPP)) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                content = archive.extractfile(member)
                assert content is not None
                name = f"llama.cpp/{Path(member.name).stem}"
                yield Family(name, content.read().decode("utf-8"))


def make_page(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page of the documentation with a table of these verdicts."""
    columns = ["end token", "calls", *PROPERTIES]
    lines = [
        f"| template | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(
            f"| {name} | {' | '.join(_escape(cells[column]) for column in columns)} |"
            for name, cells in rows.items()
        ),
    ]
    introduction, marker, _ = PAGE.read_text("utf-8").partition(_MARKER)
    return introduction + marker + "\n".join(lines) + "\n"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")


def main() -> None:
    """Write the page."""
    PAGE.write_text(make_page({family.name: judge_family(family) for family in load_families()}))


if __name__ == "__main__":
    main()
