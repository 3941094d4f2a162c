"""Reading of conversations: formats, columns, and messages about invalid rows."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.sft.examples import ChatExample, read_examples
from tests.sft.chats import write_rows

PAIRS = [{"prompt": "hard 16", "completion": "HIT"}, {"prompt": "a,\nb", "completion": "STAND"}]
USER, ASSISTANT = {"role": "user", "content": "16"}, {"role": "assistant", "content": "HIT"}
TOOL = {"type": "function", "function": {"name": "draw", "parameters": {"type": "object"}}}


def read(path: Path | str, split: str = "train") -> list[ChatExample]:
    return list(read_examples(str(path), split=split, field="data.path"))


def list_texts(examples: list[ChatExample]) -> list[list[tuple[list[str], str]]]:
    return [
        [
            ([message["content"] for message in exchange.messages], exchange.response)
            for exchange in example.exchanges
        ]
        for example in examples
    ]


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_saved_folder(path: Path, split: str) -> Path:
    (path / split).mkdir(parents=True)
    table = pa.Table.from_pylist(PAIRS)
    with pa.ipc.new_stream(path / split / "data.arrow", table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (path / split / "state.json").write_text(json.dumps(state))
    (path / "dataset_dict.json").write_text(json.dumps({"splits": [split]}))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "saved", "hub"])
def test_all_formats_give_the_same_conversations(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, split = tmp_path / f"data.{kind}", "train"
    match kind:
        case "jsonl":
            write_rows(path, PAIRS)
        case "csv":
            write_csv(path, PAIRS)
        case "parquet":
            pq.write_table(pa.Table.from_pylist(PAIRS), path)
        case "saved":
            path, split = write_saved_folder(path, "chats"), "chats"
        case "hub":
            path, split = Path("someone/chats"), "test"
            hub = {("someone/chats", "test"): PAIRS}
            fake = SimpleNamespace(load_dataset=lambda name, split: hub[name, split])
            monkeypatch.setitem(sys.modules, "datasets", fake)
    texts = list_texts(read(path, split))
    assert texts == [[(["hard 16"], "HIT")], [(["a,\nb"], "STAND")]]


def test_messages_and_tools_may_be_lists_or_json_texts(tmp_path: Path) -> None:
    row: dict[str, Any] = {"messages": [USER, ASSISTANT], "tools": [TOOL]}
    json_row = {name: json.dumps(value) for name, value in row.items()}
    paths = [
        write_rows(tmp_path / "lists.jsonl", [row]),
        write_csv(tmp_path / "texts.csv", [json_row]),
        tmp_path / "table.parquet",
    ]
    # A table fills rows without a value with null.
    table_rows = [row, {"messages": [{**USER, "name": "me"}, ASSISTANT], "tools": None}]
    pq.write_table(pa.Table.from_pylist(table_rows), paths[-1])
    for path in paths:
        example = read(path)[0]
        assert list_texts([example]) == [[(["16"], "HIT")]]
        assert list(example.exchanges[0].tools) == [TOOL]


def test_prompt_and_completion_may_be_lists_of_messages(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Play."}, USER]
    completion = [ASSISTANT, {"role": "tool", "content": "7"}, ASSISTANT]
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": completion}])
    assert list_texts(read(path)) == [[(["Play.", "16"], "HIT"), (["7"], "HIT")]]


def test_prompt_and_completion_may_be_json(tmp_path: Path) -> None:
    call = '[{"name": "add", "arguments": {"a": 1}}]'
    path = write_rows(tmp_path / "chats.jsonl", [{"prompt": '[{"a": 1}]', "completion": call}])
    assert list_texts(read(path)) == [[(['[{"a": 1}]'], call)]]


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", [{"prompt": "a\ud800", "completion": "b\udfff"}])
    assert list_texts(read(path)) == [[(["a\ufffd"], "b\ufffd")]]


def make_invalid_rows() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name of a mistake, a row with it, and the expected message."""
    unsupported_message = {**ASSISTANT, "tool_calls": [{"id": "1"}]}
    yield "no columns", {"mesages": [USER]}, r"got mesages; 'mesages': did you mean 'messages'\?"
    yield "no completion", {"prompt": "a", "completions": "b"}, r"did you mean 'completion'\?"
    yield "empty column", {"messages": None}, "without a value in messages"
    yield "text", {"text": "a"}, "needs the column messages, or the columns prompt and completion"
    yield "no list", {"messages": "hello"}, "messages must be a list of messages, got 'hello'"
    yield "empty list", {"messages": []}, r"messages must be a list of messages, got \[\]"
    yield "no assistant", {"messages": [USER]}, "has no message of the assistant"
    yield "starts", {"messages": [ASSISTANT]}, "message 1 is of the assistant, with no message"
    yield "two", {"messages": [USER, ASSISTANT, ASSISTANT]}, "message 3 is of the assistant"
    yield "empty", {"messages": [USER, {**ASSISTANT, "content": " "}]}, "message 2.* is empty"
    yield "role", {"messages": [{"role": "human", "content": ""}]}, r"messages\[0\].role must be"
    yield "keys", {"messages": [{"from": "a", "value": "b"}]}, r"\[0\] needs role and content"
    yield (
        "typo",
        {"messages": [{"role": "user", "contant": "b"}]},
        r"'contant': did you mean 'content'\?",
    )
    yield "image", {"messages": [{**USER, "content": [{"type": "image"}]}]}, "must be a text"
    yield "calls", {"messages": [USER, unsupported_message]}, r"messages\[1\].tool_calls is not"
    yield "weight", {"messages": [USER, {**ASSISTANT, "weight": 0}]}, r"messages\[1\].weight"
    yield "train", {"messages": [USER, {**ASSISTANT, "train": False}]}, r"messages\[1\].train is"
    yield "pictures", {"messages": [USER, ASSISTANT], "images": ["a"]}, "the column images is not"
    yield (
        "part",
        {"messages": [USER, {**ASSISTANT, "content": [{"type": "reasoning", "text": "a"}]}]},
        "must be a text",
    )
    yield "prompt", {"prompt": "", "completion": "b"}, "prompt is empty"
    yield "user", {"prompt": "a", "completion": [USER]}, r"completion\[0\].role must be assistant"
    yield "tools", {"messages": [USER, ASSISTANT], "tools": [{"name": "a"}]}, r"tools\[0\] must"
    yield "tool text", {"messages": [USER, ASSISTANT], "tools": "a"}, "tools must be a list"


@pytest.mark.parametrize(
    ("row", "message"), [pytest.param(*case[1:], id=case[0]) for case in make_invalid_rows()]
)
def test_invalid_row_is_named_with_its_field(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "chats.jsonl", [PAIRS[0], row])
    with pytest.raises(ConfigError, match=rf"chats.jsonl, row 2: .*{message}"):
        read(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.jsonl", "data.path = 'missing.jsonl' does not exist"),
        ("missing", "data.path = 'missing' does not exist"),
        ("someone/chats", "needs the package datasets"),
    ],
)
def test_missing_data_is_refused(path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(NotFoundError, match=message):
        read(path)


def test_unreachable_data_set_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, split: str) -> None:
        raise OSError("no route to host\nTraceback")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(NotFoundError, match=r"cannot be loaded .*\(no route to host\)"):
        read("someone/chats")
