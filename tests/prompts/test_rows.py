"""Tests of data set files: formats, invalid rows and memory use."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.proto.errors import ConfigError, ExecutionError
from prompts_env import write_rows
from prompts_env.data.files import open_rows
from prompts_env.data.prompt_format import PromptFormat

pyarrow = pytest.importorskip("pyarrow")

ROWS = [
    {"prompt": "plain", "answer": "1"},
    {"prompt": 'a "quoted", one', "answer": "2"},
    {"prompt": "two\nlines, é", "answer": "3"},
    {"prompt": "last", "answer": "4"},
]


def check_row(row: dict[str, Any]) -> None:
    PromptFormat().make_messages(row)


def write_json_lines(folder: Path) -> Path:
    return write_rows(ROWS, folder / "rows.jsonl")


def write_json_list(folder: Path) -> Path:
    (folder / "rows.json").write_text(json.dumps(ROWS))
    return folder / "rows.json"


def write_json_columns(folder: Path) -> Path:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    (folder / "columns.json").write_text(json.dumps(columns))
    return folder / "columns.json"


def write_csv(folder: Path) -> Path:
    lines = ["prompt,answer", "plain,1", '"a ""quoted"", one",2', '"two\nlines, é",3', "", "last,4"]
    (folder / "rows.csv").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    (folder / "rows.csv").write_bytes(
        ("\ufeff" + "\r\n".join(lines)).replace("two\r\n", "two\n").encode()
    )
    return folder / "rows.csv"


def write_parquet(folder: Path) -> Path:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def write_data_set(folder: Path) -> Path:
    """Write the rows in the format of `Dataset.save_to_disk`, split over two files."""
    path = folder / "saved"
    path.mkdir()
    table = pyarrow.Table.from_pylist(ROWS)
    names = [f"data-0000{index}-of-00002.arrow" for index in range(2)]
    for index, name in enumerate(names):
        part = table.slice(2 * index, 2)
        with pyarrow.ipc.new_stream(str(path / name), table.schema) as writer:
            writer.write_table(part)
    files = [{"filename": name} for name in names]
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    return path


def write_data_set_with_splits(folder: Path) -> Path:
    path = folder / "with_splits"
    path.mkdir()
    write_data_set(path).rename(path / "train")
    (path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    return path


FORMATS = [
    write_json_lines,
    write_json_list,
    write_json_columns,
    write_csv,
    write_parquet,
    write_data_set,
    write_data_set_with_splits,
]


@pytest.mark.slow
@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_all_file_formats_produce_the_same_rows(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    rows = open_rows(write(tmp_path), "train", check_row)
    assert rows.columns == ("prompt", "answer") and len(rows) == len(ROWS)
    assert [rows[index] for index in (3, 1, 2, 0)] == [ROWS[index] for index in (3, 1, 2, 0)]


def test_missing_column_is_null(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "level": 2}]
    data_set = open_rows(write_rows(rows, tmp_path / "rows.jsonl"), None, check_row)
    assert data_set[0] == {"prompt": "a", "level": None} and data_set.columns == ("prompt", "level")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"prompt": "a"}\n\n{"prompt": 3}\n',
            "row 2: .*'prompt' must be text .*3",
        ),
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"\n', "row 2: line 3: expected a JSON object"),
        ("a.jsonl", '["prompt"]\n', "row 1: line 1: expected a JSON object, got list"),
        ("a.jsonl", '{"question": "a"}\n', r"row 1: .* got no 'prompt' \(the row has question\)"),
        ("a.jsonl", '{"prompt": [{"role": "boss", "content": "a"}]}\n', "a role out of system"),
        ("a.jsonl", "\n\n", "must have at least one row"),
        ("a.csv", "", "must have at least one row"),
        ("a.csv", "prompt,answer\na,1\nb\n", "row 2: line 3: expected 2 values"),
        ("a.csv", "prompt,prompt\na,1\n", "row 1: line 1: .*'prompt' twice"),
        ("a.csv", 'prompt\n"a\n', "row 1: line 2: unexpected end of data"),
        ("a.json", '{"prompt": ["a"], "answer": []}', "columns must have the same length"),
        ("a.json", '{"prompt": "a"}', "but 'prompt' is not a list"),
        ("a.json", '[{"prompt": "a"}, 3]', "row 2: expected an object, got int"),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}', "rename it to .jsonl"),
        ("a.txt", "hello", "must end with one of"),
        ("a.parquet", "no parquet", "cannot read path"),
    ],
)
def test_invalid_file_error_names_the_row(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_rows(tmp_path / name, None, check_row)


def test_missing_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has the splits train, got split = 'test'"):
        open_rows(write_data_set_with_splits(tmp_path), "test", check_row)
    with pytest.raises(ConfigError, match="was not written by save_to_disk"):
        open_rows(tmp_path, None, check_row)


def test_column_of_bytes_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = [{"prompt": "a", "picture": {"bytes": b"\0"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="column 'picture' has the type"):
        open_rows(tmp_path / "a.parquet", None, check_row)


NESTED_COLUMNS = {
    "bytes in a list in a struct": lambda: pyarrow.array([{"a": [b"x"]}]),
    "decimal in a struct in a struct": lambda: pyarrow.array([{"a": {"b": Decimal("1.5")}}]),
    "bytes in a list of fixed size": lambda: pyarrow.array(
        [[b"x"]], pyarrow.list_(pyarrow.binary(), 1)
    ),
    "bytes in a map": lambda: pyarrow.array(
        [[("k", b"x")]], pyarrow.map_(pyarrow.string(), pyarrow.binary())
    ),
    "duration": lambda: pyarrow.array([timedelta(days=1)]),
}


@pytest.mark.parametrize("name", NESTED_COLUMNS)
def test_type_that_json_does_not_support_is_refused_at_any_depth(tmp_path: Path, name: str) -> None:
    import pyarrow.parquet

    table = pyarrow.table({"prompt": pyarrow.array(["a"]), "column": NESTED_COLUMNS[name]()})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="column 'column' has the type"):
        open_rows(tmp_path / "a.parquet", None, check_row)


ROWS_WITH_NAN = [
    {"prompt": "a", "answer": 1.5, "scores": [1.0, math.nan]},
    {"prompt": "b", "answer": math.nan, "scores": []},
]


def test_nan_is_read_as_a_missing_value(tmp_path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS_WITH_NAN), tmp_path / "a.parquet")
    write_rows(ROWS_WITH_NAN, tmp_path / "a.jsonl")
    arrays = {"prompt": ["a", "b"], "answer": np.array([1.5, math.nan], dtype=np.float32)}
    write_rows(arrays, tmp_path / "b.jsonl")
    for name in ("a.parquet", "a.jsonl"):
        rows = open_rows(tmp_path / name, None, check_row)
        assert [rows[index]["answer"] for index in range(2)] == [1.5, None]
        assert rows[0]["scores"] == [1.0, None]
    rows = open_rows(tmp_path / "b.jsonl", None, check_row)
    assert [rows[index]["answer"] for index in range(2)] == [1.5, None]


def test_prompt_with_nan_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS_WITH_NAN), tmp_path / "a.parquet")

    def check_template(row: dict[str, Any]) -> None:
        PromptFormat(template="{prompt} {answer}").make_messages(row)

    with pytest.raises(ConfigError, match="row 2: 'answer' must have a value"):
        open_rows(tmp_path / "a.parquet", None, check_template)


def test_infinite_number_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = [{"prompt": "a", "limits": [1.0]}, {"prompt": "b", "limits": [math.inf]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="row 2: column 'limits' contains an infinite number"):
        open_rows(tmp_path / "a.parquet", None, check_row)
    with pytest.raises(ConfigError, match=r"row 2 .* column 'limits' contains an infinite number"):
        write_rows(rows, tmp_path / "a.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.slow
def test_long_rows_stay_on_disk(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index} " + "x" * 20_000} for index in range(500)]
    path = write_rows(rows, tmp_path / "long.jsonl")
    tracemalloc.start()
    try:
        data_set = open_rows(path, None, check_row)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data_set) == 500 and data_set[499] == rows[499]
    assert num_bytes < 1_000_000, f"a file of 10 MB takes {num_bytes} bytes of memory"


def test_open_rows_ignore_a_replaced_file_and_detect_a_modified_file(
    tmp_path: Path,
) -> None:
    path = write_json_lines(tmp_path)
    data_set = open_rows(path, None, check_row)
    write_rows([{"prompt": "new"}], path)
    assert data_set[0] == ROWS[0]
    data_set = open_rows(path, None, check_row)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(ExecutionError, match="row 1 has changed"):
        _ = data_set[0]


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        ([{"prompt": "a"}], "rows.json", r"end with \.jsonl"),
        ([], "rows.jsonl", "at least one row"),
        ([{"prompt": "a"}, "b"], "rows.jsonl", "row 2 must be an object, got str"),
        ([{"prompt": object()}], "rows.jsonl", "row 1 cannot be written as JSON"),
        ({"prompt": ["a"], "answer": []}, "rows.jsonl", "columns must have the same length"),
    ],
)
def test_writing_invalid_rows_creates_no_file(
    rows: Any, name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_rows(rows, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}, "tool_calls"),
        ({"role": "tool", "tool_call_id": "a"}, "tool_call_id"),
        ({"reasoning_content": "hm"}, "reasoning_content"),
        ({"name": "Ann"}, "name"),
    ],
)
def test_message_field_that_a_prompt_cannot_show_is_refused(
    fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    empty_fields = {"tool_calls": None, "images": [], "thinking": ""}
    shown = {"role": "user", "content": "2 + 2", **empty_fields}
    hidden = {"role": "assistant", "content": "", **fields}
    path = write_rows([{"prompt": [shown]}, {"prompt": [shown, hidden]}], tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=f"row 2: .*message 1 has the field '{name}', which a"):
        open_rows(path, None, check_row)
    read = PromptFormat().make_messages({"prompt": [shown]})
    assert read == [{"role": "user", "content": "2 + 2"}]


def test_functions_beside_a_prompt_are_refused() -> None:
    functions = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(ValueError, match="'tools' lists functions"):
        PromptFormat().make_messages({"prompt": "2 + 2", "tools": functions})
    assert PromptFormat().make_messages({"prompt": "2 + 2", "tools": ["hammer"]})
