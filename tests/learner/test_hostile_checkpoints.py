"""Resuming runs no code from a checkpoint's files, whatever they contain."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ludus.proto.errors import CheckpointError
from ludus.trainer.learner.learner import Learner
from tests.learner.tiny_policy import make_learner

pytestmark = pytest.mark.slow


class Command:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def learner(model_path: str) -> Learner:
    return make_learner(model_path)


@pytest.fixture
def checkpoint(learner: Learner, tmp_path: Path) -> Path:
    """Folder that the learner wrote."""
    learner.save(tmp_path / "learner")
    return tmp_path / "learner"


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Command that creates the file `ran`."""
    return Command(f"touch {tmp_path / 'ran'}")


def check_refused(learner: Learner, checkpoint: Path, pattern: str) -> None:
    with pytest.raises(CheckpointError, match=pattern) as raised:
        learner.load(checkpoint)
    assert "\n" not in str(raised.value)
    assert not (checkpoint.parent / "ran").exists(), "code from the checkpoint ran"


def read_metadata(checkpoint: Path) -> Metadata:
    with (checkpoint / ".metadata").open("rb") as file:
        metadata: Metadata = pickle.load(file)
    return metadata


def write_metadata(checkpoint: Path, metadata: object) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def replace_value(checkpoint: Path, name_part: str, content: bytes) -> None:
    """Let the first value with `name_part` in its name refer to a new file with `content`."""
    (checkpoint / "__0_1.distcp").write_bytes(content)
    metadata = read_metadata(checkpoint)
    index = next(index for index in metadata.storage_data if name_part in index.fqn)
    assert isinstance(index, MetadataIndex)
    metadata.storage_data[index] = _StorageInfo("__0_1.distcp", 0, len(content))
    write_metadata(checkpoint, metadata)


def test_intact_checkpoint_is_loaded(learner: Learner, checkpoint: Path) -> None:
    learner.load(checkpoint)


def test_command_instead_of_metadata_does_not_run(
    learner: Learner, checkpoint: Path, command: Command
) -> None:
    write_metadata(checkpoint, command)
    check_refused(learner, checkpoint, r"the name posix\.system is not allowed")


def test_command_inside_metadata_does_not_run(
    learner: Learner, checkpoint: Path, command: Command
) -> None:
    metadata = read_metadata(checkpoint)
    metadata.planner_data = {"policy": command}
    write_metadata(checkpoint, metadata)
    check_refused(learner, checkpoint, r"the name posix\.system is not allowed")


def test_command_in_the_metadata_of_a_rank_does_not_run(
    learner: Learner, checkpoint: Path, command: Command
) -> None:
    (checkpoint / "__0.metadata").write_bytes(pickle.dumps(command))
    (checkpoint / ".metadata").unlink()
    check_refused(learner, checkpoint, r"\.metadata.*No such file")


@pytest.mark.parametrize("name", ["torch load", "torch.hub load", "builtins eval", "os system"])
def test_functions_of_any_module_are_refused(learner: Learner, checkpoint: Path, name: str) -> None:
    module_name, function_name = name.split()
    (checkpoint / ".metadata").write_bytes(f"c{module_name}\n{function_name}\n.".encode())
    check_refused(learner, checkpoint, rf"{module_name}\.{function_name} is not allowed")


@pytest.mark.parametrize("metadata", [5, {}, Metadata({}), Metadata({}, storage_data={1: 2})])
def test_other_objects_are_refused(learner: Learner, checkpoint: Path, metadata: Any) -> None:
    write_metadata(checkpoint, metadata)
    check_refused(learner, checkpoint, r"'\.metadata'")


@pytest.mark.parametrize("content", [b"", b"\x80", b"(" * 1_000_000, b"text"])
def test_files_that_are_no_pickle_are_refused(
    learner: Learner, checkpoint: Path, content: bytes
) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    check_refused(learner, checkpoint, r"'\.metadata'")


def test_files_outside_the_checkpoint_are_not_read(learner: Learner, checkpoint: Path) -> None:
    metadata = read_metadata(checkpoint)
    for entry in metadata.storage_data.values():
        entry.relative_path = f"../learner/{entry.relative_path}"
    write_metadata(checkpoint, metadata)
    check_refused(learner, checkpoint, r"'\.\./learner/__0_0\.distcp' is not in the folder")


@pytest.mark.parametrize("name_part", ["betas", "policy."])
def test_command_instead_of_a_value_or_a_tensor_does_not_run(
    learner: Learner, checkpoint: Path, command: Command, name_part: str
) -> None:
    buffer = io.BytesIO()
    torch.save(command, buffer)
    replace_value(checkpoint, name_part, buffer.getvalue())
    check_refused(learner, checkpoint, "an object other than tensors and plain values")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x02]r" + struct.pack("<I", 1 << 27) + b".", id="large index"),
        pytest.param(b"]p999999999\n.", id="large index as text"),
        pytest.param(b"]p-1\n.", id="negative index"),
    ],
)
def test_indexes_that_would_reserve_memory_are_refused(
    learner: Learner, checkpoint: Path, content: bytes
) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    check_refused(learner, checkpoint, r"the index -?\d+ is not that of an object")


class NestedKey(dict[object, int]):
    """Pickled as a dictionary with a key of a few bytes that has 2**64 items."""

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        key: tuple[object, ...] = (0,)
        for _ in range(64):
            key = (key, key)
        return dict, (), None, None, iter([(key, 1)])


def test_metadata_that_would_take_forever_is_refused(learner: Learner, checkpoint: Path) -> None:
    write_metadata(checkpoint, NestedKey())
    check_refused(learner, checkpoint, r"'\.metadata': its objects refer to each other")


@pytest.mark.parametrize("name_part", ["betas", "policy."])
def test_values_that_would_take_forever_are_refused(
    learner: Learner, checkpoint: Path, name_part: str
) -> None:
    buffer = io.BytesIO()
    torch.save(NestedKey(), buffer)
    replace_value(checkpoint, name_part, buffer.getvalue())
    check_refused(learner, checkpoint, r"'__0_1\.distcp': its objects refer to each other")


@pytest.mark.parametrize("name_part", ["betas", "policy."])
@pytest.mark.parametrize("is_compressed", [True, False])
def test_values_larger_than_their_file_are_refused(
    learner: Learner, checkpoint: Path, name_part: str, is_compressed: bool
) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(1000), "b": torch.zeros(1000)}, buffer)
    content = compress(buffer) if is_compressed else overlap(buffer)
    replace_value(checkpoint, name_part, content)
    check_refused(learner, checkpoint, r"'__0_1\.distcp': its values are compressed")


def compress(archive: io.BytesIO) -> bytes:
    """Return an archive with compressed entries."""
    compressed_archive = io.BytesIO()
    with (
        zipfile.ZipFile(archive) as source,
        zipfile.ZipFile(compressed_archive, "w", zipfile.ZIP_DEFLATED) as copy,
    ):
        for entry in source.infolist():
            copy.writestr(entry.filename, source.read(entry))
    return compressed_archive.getvalue()


def overlap(archive: io.BytesIO) -> bytes:
    """Return an archive with many entries of the same bytes."""
    overlapping_archive = io.BytesIO(archive.getvalue())
    with zipfile.ZipFile(overlapping_archive, "a") as copy:
        copy.filelist += copy.filelist * 10
        copy.comment = b"changed"
    return overlapping_archive.getvalue()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_paths_that_are_no_files_are_refused(
    learner: Learner, checkpoint: Path, name: str, kind: str
) -> None:
    path = checkpoint / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    check_refused(learner, checkpoint, rf"'{re.escape(name)}' is not a file")
