"""W&B offline, in a separate process, because it starts a service and hooks the exit."""

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

PROGRAM = "tests.sinks.wandb_program"
_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_RECORD_HEADER = struct.Struct("<IHB")
_WHOLE_OR_LAST = (1, 4)


def play(folder: Path, first: int, last: int) -> None:
    # There is neither a key nor a network.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"HOME": str(folder), "https_proxy": "http://127.0.0.1:9"}
    environment["WANDB_X_SERVICE_WAIT"] = "240"  # its service starts in 30 s, or not at all
    command = [sys.executable, "-m", PROGRAM, str(folder), str(first), str(last)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=290, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Yield the records of a .wandb file: a header and blocks as in LevelDB's log."""
    data, offset, parts = path.read_bytes(), _FILE_HEADER_BYTES, b""
    while offset + _RECORD_HEADER.size <= len(data):
        remaining = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if remaining < _RECORD_HEADER.size:
            offset += remaining
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(data, offset)
        offset += _RECORD_HEADER.size
        parts += data[offset : offset + length]
        offset += length
        if kind in _WHOLE_OR_LAST:
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def history(path: Path) -> Iterator[dict[str, float]]:
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {i.key or i.nested_key[0]: json.loads(i.value_json) for i in items}


def test_offline_run_is_stored_and_keeps_its_id(
    tmp_path: Path,
) -> None:
    play(tmp_path, 1, 3)
    (first,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    losses = [(row["step"], row["train/loss"]) for row in history(first) if "train/loss" in row]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    wins = [row.get("train/tic_tac_toe/num_wins") for row in history(first)]
    assert [count for count in wins if count is not None] == [60, 60, 60]
    assert any(record.WhichOneof("record_type") == "run" for record in records(first))
    play(tmp_path, 4, 4)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.stem for file in files}) == 1
