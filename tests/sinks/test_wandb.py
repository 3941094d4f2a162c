"""Tests of the W&B sink in offline mode.

W&B starts a service and registers exit handlers, so each test runs it in a separate process.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2

pytestmark = pytest.mark.slow

PROGRAM_MODULE = "tests.sinks.wandb_program"
_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_FRAGMENT_HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a fragment."""
_COMPLETE_FRAGMENT_KINDS = (1, 4)
"""Kinds of LevelDB fragments that complete a record: FULL and LAST."""


def run_program(folder: Path, first_step: int, last_step: int) -> None:
    # Without an API key and with an unreachable proxy, W&B cannot go online.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("WANDB")
    }
    environment |= {"HOME": str(folder), "https_proxy": "http://127.0.0.1:9"}
    environment["WANDB_X_SERVICE_WAIT"] = "240"  # in seconds; the default is 30
    command = [sys.executable, "-m", PROGRAM_MODULE, str(folder), str(first_step), str(last_step)]
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=290, check=False
    )
    assert (process.returncode, process.stdout) == (0, "1\n"), process.stderr


def read_records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Yield the records of a .wandb file, which is a header followed by a LevelDB log."""
    content, offset, record_bytes = path.read_bytes(), _FILE_HEADER_BYTES, b""
    while offset + _FRAGMENT_HEADER.size <= len(content):
        num_bytes_left = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if num_bytes_left < _FRAGMENT_HEADER.size:
            offset += num_bytes_left
            continue
        _, length, kind = _FRAGMENT_HEADER.unpack_from(content, offset)
        offset += _FRAGMENT_HEADER.size
        record_bytes += content[offset : offset + length]
        offset += length
        if kind in _COMPLETE_FRAGMENT_KINDS:
            yield wandb_internal_pb2.Record.FromString(record_bytes)
            record_bytes = b""


def read_history(path: Path) -> Iterator[dict[str, float]]:
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            entries = record.history.item
            yield {
                entry.key or entry.nested_key[0]: json.loads(entry.value_json) for entry in entries
            }


def test_offline_run_is_stored_and_keeps_the_same_id_after_resume(
    tmp_path: Path,
) -> None:
    run_program(tmp_path, 1, 3)
    (first_file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    losses = [
        (row["step"], row["train/loss"]) for row in read_history(first_file) if "train/loss" in row
    ]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    win_counts = [row.get("train/tic_tac_toe/num_wins") for row in read_history(first_file)]
    assert [num_wins for num_wins in win_counts if num_wins is not None] == [60, 60, 60]
    assert any(record.WhichOneof("record_type") == "run" for record in read_records(first_file))
    run_program(tmp_path, 4, 4)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.stem for file in files}) == 1
