"""Tests of preference files: all formats, and error messages for invalid rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.reward_model.comparisons import Comparison, read_comparisons

PAIRS = [
    {"prompt": "Tell me about bread.", "chosen": "It is warm.", "rejected": "No."},
    {"prompt": 'Tell me about "snow",\nplease.', "chosen": "Cold.", "rejected": "Hot."},
]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any] | str]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_csv(path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, PAIRS[0].keys())
        writer.writeheader()
        writer.writerows(PAIRS)
    return path


def write_json(path: Path) -> Path:
    path.write_text(json.dumps(PAIRS), encoding="utf-8")
    return path


def write_parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(PAIRS), path)
    return path


def write_dataset_folder(path: Path, *, is_in_split: bool) -> Path:
    """Write a folder in the format of `datasets`: an Arrow stream and a file that lists it."""
    folder = path / "train" if is_in_split else path
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(PAIRS)
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    if is_in_split:
        (path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return path


def convert_to_tuples(comparisons: Iterator[Comparison]) -> list[tuple[Any, ...]]:
    return [
        (comparison.prompt, *comparison.answers, comparison.best_index)
        for comparison in comparisons
    ]


@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "csv", "parquet", "saved", "saved_splits", "folder"]
)
def test_all_file_formats_produce_the_same_comparisons(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    match kind:
        case "jsonl":
            write_jsonl(path, PAIRS)
        case "json":
            write_json(path)
        case "csv":
            write_csv(path)
        case "parquet":
            write_parquet(path)
        case "folder":
            path.mkdir()
            write_jsonl(path / "a.jsonl", PAIRS[:1])
            write_jsonl(path / "b.jsonl", PAIRS[1:])
            (path / "README.md").write_text("no data")
        case _:
            write_dataset_folder(path, is_in_split=kind == "saved_splits")
    rows = convert_to_tuples(read_comparisons(path))
    assert rows == [(row["prompt"], row["chosen"], row["rejected"], 0) for row in PAIRS]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_byte_order_mark_is_ignored(kind: str, tmp_path: Path) -> None:
    writers = {"jsonl": lambda path: write_jsonl(path, PAIRS), "json": write_json, "csv": write_csv}
    path = writers[kind](tmp_path / f"data.{kind}")
    expected_tuples = convert_to_tuples(read_comparisons(path))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert convert_to_tuples(read_comparisons(path)) == expected_tuples


def test_openai_format_with_four_samples_is_read(tmp_path: Path) -> None:
    row = {"query": "Q", "sample0": "a", "sample1": "b", "sample2": "c", "sample3": "d", "best": 2}
    [comparison] = convert_to_tuples(read_comparisons(write_jsonl(tmp_path / "data.jsonl", [row])))
    assert comparison == ("Q", "a", "b", "c", "d", 2)


def test_messages_and_token_ids_are_read_unchanged(tmp_path: Path) -> None:
    user_message, assistant_message = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    )
    rows = [
        {"prompt": [user_message], "chosen": [assistant_message], "rejected": "Go"},
        {"prompt": [5, 6], "chosen": [7], "rejected": [8, 9]},
    ]
    comparisons = convert_to_tuples(read_comparisons(write_jsonl(tmp_path / "data.jsonl", rows)))
    assert comparisons == [([user_message], [assistant_message], "Go", 0), ([5, 6], [7], [8, 9], 0)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "p", "chosen": "a"},
            "row 2: column 'rejected' must be a text, .* got None",
        ),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "row 2: column 'prompt' .* got 3"),
        (
            {"prompt": "p", "chosen": [{"role": "a", "content": "", "tool_calls": [1]}]},
            "row 2: column 'chosen': message 0 has the field 'tool_calls', which a prompt cannot",
        ),
        ({"question": "p"}, r"row 2: the row needs columns prompt, chosen, .* got \['question'\]"),
        ({"query": "q", "sample0": "a", "sample1": "b", "best": 2}, "0 to 1, got 2"),
        ({"query": "q", "sample0": "a", "sample1": "b", "best": None}, "0 to 1, got None"),
        ({"query": "q", "sample0": "a", "sample2": "b", "best": 0}, "column 'sample1'"),
        (
            {"query": "q", "sample0": "a", "sample1": "b", "sample2": "c", "best": 0},
            "row 2: the row has 3 answers, but the rows before have 2",
        ),
        ("[1, 2]", "row 2: a row must be an object with columns, got list"),
        ("{nonsense", "row 2: expected one JSON object per line, got '{nonsense'"),
    ],
)
def test_error_for_an_invalid_row_contains_the_reason(
    row: Mapping[str, Any] | str, message: str, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [PAIRS[0], row])
    with pytest.raises(ConfigError, match=message):
        list(read_comparisons(path))


def test_missing_or_unreadable_data_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        list(read_comparisons(tmp_path / "missing.jsonl"))
    (tmp_path / "data.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"must end with one of \.jsonl"):
        list(read_comparisons(tmp_path / "data.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="contains no file"):
        list(read_comparisons(tmp_path / "empty"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ConfigError, match=r"broken\.parquet' cannot be read"):
        list(read_comparisons(tmp_path / "broken.parquet"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="expected UTF-8"):
        list(read_comparisons(tmp_path / "latin.jsonl"))
    (tmp_path / "nothing.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no rows"):
        list(read_comparisons(tmp_path / "nothing.jsonl"))
