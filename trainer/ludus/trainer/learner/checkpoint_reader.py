"""Reading of the learner's part of a checkpoint without running code from its files.

`torch.distributed.checkpoint` unpickles the metadata and all values other than tensors, and a
pickle can call any function. Here the metadata may contain only the classes of checkpoints, and
values may contain only tensors and plain Python values. The size of a file bounds the memory and
the time that reading it takes.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, ReadItem
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ludus.trainer.core.pickle_limits import check_pickle
from ludus.trainer.core.tensor_files import (
    check_archive,
    load_plain_values,
    require_regular_file,
)

_METADATA_FILE = ".metadata"
_ALLOWED_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}
"""Names that metadata may contain in addition to the data types of torch, by module."""


class UnsafeFileError(BaseException):
    """A defect of a file of the checkpoint.

    This is no Exception, because torch logs a traceback for an Exception and reads another file.
    """


class CheckpointReader(FileSystemReader):
    """A reader of checkpoint files that unpickles only the classes of checkpoints."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata_path = folder / _METADATA_FILE

    def read_metadata(self, *_: Any) -> Metadata:
        """Return the metadata of the checkpoint.

        Raises:
            UnsafeFileError: the metadata cannot be read, or contains anything else.
        """
        try:
            require_regular_file(self._metadata_path)
            content = self._metadata_path.read_bytes()
            check_pickle(content)
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
            _check_metadata(metadata, self._metadata_path.parent)
        except Exception as error:  # unpickling raises many types of errors
            raise UnsafeFileError(f"'{_METADATA_FILE}': {error}") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> torch.futures.Future[None]:
        """Read the tensors and values of a plan.

        Raises:
            UnsafeFileError: a file contains an object other than tensors and plain values, or is
                compressed.
        """
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            raise UnsafeFileError(
                "a file of this rank contains an object other than tensors and plain values"
            ) from error

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        try:
            # A copy, because torch's view of a part of a file cannot seek from its end.
            content = io.BytesIO(super()._slice_file(file, sinfo).read(-1))
            check_archive(content)
        except (ValueError, OSError) as error:
            raise UnsafeFileError(f"'{sinfo.relative_path}': {error}") from error
        return content


class PlainValuePlanner(DefaultLoadPlanner):
    """A planner that loads only plain Python values in addition to tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set a value of the state."""
        plain_value = load_plain_values(value)
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, plain_value)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, name: str) -> Any:
        is_allowed = name in _ALLOWED_NAMES.get(module_name, ())
        is_data_type = module_name == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_allowed and not is_data_type:
            raise pickle.UnpicklingError(
                f"the name {module_name}.{name} is not allowed in a checkpoint"
            )
        return super().find_class(module_name, name)


def _check_metadata(metadata: object, folder: Path) -> None:
    """Check that the metadata names only files of its folder."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise TypeError("the file does not contain the metadata of a checkpoint")
    for index, entry in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(entry, _StorageInfo):
            raise TypeError("an entry is not that of a checkpoint")
        file_name = entry.relative_path
        if PurePath(file_name).name != file_name:
            raise ValueError(f"the file '{file_name}' is not in the folder of the checkpoint")
        require_regular_file(folder / file_name)
