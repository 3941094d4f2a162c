"""Files of every kind give the same rows, and faulty ones say which row is wrong, and how."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.proto.errors import ConfigError, ExecutionError
from prompts_env import write_rows
from prompts_env.data.prompt_format import PromptFormat
from prompts_env.data.rows import open_rows

pyarrow = pytest.importorskip("pyarrow")

ROWS = [
    {"prompt": "plain", "answer": "1"},
    {"prompt": 'a "quoted", one', "answer": "2"},
    {"prompt": "two\nlines, é", "answer": "3"},
    {"prompt": "last", "answer": "4"},
]


def check(row: dict[str, Any]) -> None:
    PromptFormat().messages(row)


def json_lines(folder: Path) -> Path:
    return write_rows(ROWS, folder / "rows.jsonl")


def json_list(folder: Path) -> Path:
    (folder / "rows.json").write_text(json.dumps(ROWS))
    return folder / "rows.json"


def json_columns(folder: Path) -> Path:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    (folder / "columns.json").write_text(json.dumps(columns))
    return folder / "columns.json"


def comma_separated(folder: Path) -> Path:
    lines = ["prompt,answer", "plain,1", '"a ""quoted"", one",2', '"two\nlines, é",3', "", "last,4"]
    (folder / "rows.csv").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    (folder / "rows.csv").write_bytes(
        ("\ufeff" + "\r\n".join(lines)).replace("two\r\n", "two\n").encode()
    )
    return folder / "rows.csv"


def parquet(folder: Path) -> Path:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def saved(folder: Path) -> Path:
    """As `Dataset.save_to_disk` writes it, in two pieces."""
    where = folder / "saved"
    where.mkdir()
    table = pyarrow.Table.from_pylist(ROWS)
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    for number, name in enumerate(names):
        piece = table.slice(2 * number, 2)
        with pyarrow.ipc.new_stream(str(where / name), table.schema) as writer:
            writer.write_table(piece)
    files = [{"filename": name} for name in names]
    (where / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    return where


def saved_with_splits(folder: Path) -> Path:
    where = folder / "both"
    where.mkdir()
    saved(where).rename(where / "train")
    (where / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    return where


KINDS = [json_lines, json_list, json_columns, comma_separated, parquet, saved, saved_with_splits]


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_every_kind_of_file_gives_the_same_rows(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    rows = open_rows(write(tmp_path), "train", check)
    assert rows.columns == ("prompt", "answer") and len(rows) == len(ROWS)
    assert [rows[number] for number in (3, 1, 2, 0)] == [ROWS[number] for number in (3, 1, 2, 0)]


def test_a_column_that_a_row_lacks_is_null_there(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "level": 2}]
    opened = open_rows(write_rows(rows, tmp_path / "rows.jsonl"), None, check)
    assert opened[0] == {"prompt": "a", "level": None} and opened.columns == ("prompt", "level")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"prompt": "a"}\n\n{"prompt": 3}\n',
            "row 2: .*'prompt' to be text .*3",
        ),
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"\n', "row 2: line 3: expected an object"),
        ("a.jsonl", '["prompt"]\n', "row 1: line 1: expected an object of JSON, got list"),
        ("a.jsonl", '{"question": "a"}\n', r"row 1: .* got no 'prompt' \(it has question\)"),
        ("a.jsonl", '{"prompt": [{"role": "boss", "content": "a"}]}\n', "a role out of system"),
        ("a.jsonl", "\n\n", "expected at least one row, got none"),
        ("a.csv", "", "expected at least one row"),
        ("a.csv", "prompt,answer\na,1\nb\n", "row 2: line 3: expected 2 values"),
        ("a.csv", "prompt,prompt\na,1\n", "row 1: line 1: .*'prompt' twice"),
        ("a.csv", 'prompt\n"a\n', "row 1: line 2: unexpected end of data"),
        ("a.json", '{"prompt": ["a"], "answer": []}', "columns of one length"),
        ("a.json", '{"prompt": "a"}', "whose 'prompt' is no list"),
        ("a.json", '[{"prompt": "a"}, 3]', "row 2: expected an object, got int"),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}', "one object per line is called .jsonl"),
        ("a.txt", "hello", "expected a name that ends with one of"),
        ("a.parquet", "no parquet", "cannot be read"),
    ],
)
def test_a_faulty_file_is_refused_with_the_row_and_what_is_wrong(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_rows(tmp_path / name, None, check)


def test_a_folder_without_the_split_names_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds the splits train, got split = 'test'"):
        open_rows(saved_with_splits(tmp_path), "test", check)
    with pytest.raises(ConfigError, match=r"with state.json or dataset_dict.json"):
        open_rows(tmp_path, None, check)


def test_bytes_in_a_column_are_refused_by_its_name(tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = [{"prompt": "a", "picture": {"bytes": b"\0"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="column 'picture' is of type"):
        open_rows(tmp_path / "a.parquet", None, check)


ODD = [
    {"prompt": "a", "answer": 1.5, "scores": [1.0, math.nan]},
    {"prompt": "b", "answer": math.nan, "scores": []},
]


def test_nan_is_a_value_that_is_missing_whatever_it_comes_in(tmp_path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ODD), tmp_path / "a.parquet")
    write_rows(ODD, tmp_path / "a.jsonl")
    arrays = {"prompt": ["a", "b"], "answer": np.array([1.5, math.nan], dtype=np.float32)}
    write_rows(arrays, tmp_path / "b.jsonl")
    for name in ("a.parquet", "a.jsonl"):
        rows = open_rows(tmp_path / name, None, check)
        assert [rows[place]["answer"] for place in range(2)] == [1.5, None]
        assert rows[0]["scores"] == [1.0, None]
    rows = open_rows(tmp_path / "b.jsonl", None, check)
    assert [rows[place]["answer"] for place in range(2)] == [1.5, None]


def test_a_prompt_does_not_show_nan(tmp_path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ODD), tmp_path / "a.parquet")

    def shown(row: dict[str, Any]) -> None:
        PromptFormat(template="{prompt} {answer}").messages(row)

    with pytest.raises(ConfigError, match="row 2: expected 'answer' to be filled"):
        open_rows(tmp_path / "a.parquet", None, shown)


def test_an_infinite_number_is_refused_by_row_and_column(tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = [{"prompt": "a", "limits": [1.0]}, {"prompt": "b", "limits": [math.inf]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="row 2: column 'limits' holds an infinite number"):
        open_rows(tmp_path / "a.parquet", None, check)
    with pytest.raises(ConfigError, match=r"row 2: .* column 'limits' holds an infinite number"):
        write_rows(rows, tmp_path / "a.jsonl")
    assert [one.name for one in tmp_path.iterdir()] == ["a.parquet"]


def test_long_rows_stay_on_disk(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} " + "x" * 20_000} for number in range(500)]
    path = write_rows(rows, tmp_path / "long.jsonl")
    tracemalloc.start()
    try:
        opened = open_rows(path, None, check)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(opened) == 500 and opened[499] == rows[499]
    assert held < 1_000_000, "of ten megabytes"


def test_a_file_that_is_replaced_changes_nothing_and_one_that_changes_is_found_out(
    tmp_path: Path,
) -> None:
    path = json_lines(tmp_path)
    opened = open_rows(path, None, check)
    write_rows([{"prompt": "another"}], path)
    assert opened[0] == ROWS[0]
    opened = open_rows(path, None, check)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(ExecutionError, match="row 1: expected what was there"):
        _ = opened[0]


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        ([{"prompt": "a"}], "rows.json", r"ends with \.jsonl"),
        ([], "rows.jsonl", "at least one row"),
        ([{"prompt": "a"}, "b"], "rows.jsonl", "row 2: expected an object, got str"),
        ([{"prompt": object()}], "rows.jsonl", "row 1: expected what JSON can hold"),
        ({"prompt": ["a"], "answer": []}, "rows.jsonl", "columns of one length"),
    ],
)
def test_rows_that_cannot_be_written_leave_no_file(
    rows: Any, name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_rows(rows, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
