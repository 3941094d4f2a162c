"""Weights of a sharded model as Hugging Face files, written by all ranks without a whole copy.

    plan     groups of tensors, the files of the exported tensors, and a rank for each file
    round k  each rank gathers the k-th group of its files, converts it, and writes its tensors

A group contains the tensors that must be converted together: a weight with its adapters, or a whole
layer if the loader fused weights of the files, such as experts. The conversion of each group is
tried on tensors without data, so names, sizes and places in the files are known before anything is
gathered. A rank holds one group at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ludus.proto.config import LoraConfig
from ludus.proto.errors import CheckpointError
from ludus.trainer.learner import lora
from ludus.trainer.learner.write_errors import convert_write_errors
from ludus.trainer.weights.payload import encode_file_start, view_bytes

MAX_FILE_BYTES = 5 * 10**9
"""Maximum size of a file of weights that has more than one tensor."""

_LAYER_PATTERN = re.compile(r"(.*?\.\d+)\.")
"""Pattern of the name of a tensor in one of a model's layers."""

_Group = dict[str, Tensor]
_Convert = Callable[[_Group], _Group]


@dataclass(frozen=True)
class _File:
    """A planned file of weights."""

    rank: int
    """Rank that writes the file."""
    tensors: _Group = field(default_factory=dict)
    """Tensors of the file, without data."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class _Plan:
    groups_by_rank: list[list[_Group]]
    """Tensors of the learner's model by rank and group."""
    files: list[_File]

    def name_files(self) -> dict[str, _File]:
        """Return the files by the names that transformers expects."""
        if len(self.files) == 1:
            return {SAFE_WEIGHTS_NAME: self.files[0]}
        stem, suffix = SAFE_WEIGHTS_NAME.split(".")
        return {
            f"{stem}-{number:05d}-of-{len(self.files):05d}.{suffix}": file
            for number, file in enumerate(self.files, start=1)
        }


@torch.no_grad()
def export_weights(
    model: PreTrainedModel,
    folder: Path,
    lora_config: LoraConfig | None = None,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write the weights under the names of the model's original files; return this rank's files.

    A collective. Adapters are merged into the weights.

    Args:
        max_file_bytes: maximum size of a file that has more than one tensor.

    Raises:
        CheckpointError: a rank cannot write its files; all ranks raise the error.
    """

    def convert(group: _Group) -> _Group:
        if lora_config is not None:
            group = lora.merge_adapters(group, lora_config)
        exported_tensors: _Group = revert_weight_conversion(model, group)
        return exported_tensors

    plan = _make_plan(_list_groups(model), convert, max_file_bytes)
    writer = _Writer(plan.name_files(), folder)
    for round_index in range(max(map(len, plan.groups_by_rank))):
        gathered_group: _Group = {}
        for rank, groups in enumerate(plan.groups_by_rank):
            if round_index < len(groups):
                gathered_group |= _gather_group(groups[round_index], rank)
        if gathered_group:
            writer.write(convert(gathered_group))
    writer.finish()
    return writer.paths


class _Writer:
    """A writer of the files of this rank.

    After an error, the writer writes nothing more, but the rank still takes part in collectives.
    """

    def __init__(self, files: Mapping[str, _File], folder: Path) -> None:
        self._folder = folder
        self._error: CheckpointError | None = None
        self.paths: list[Path] = []
        """Files of this rank."""
        self._tensor_locations: dict[str, tuple[Path, int]] = {}
        """File and offset in bytes of each tensor that this rank writes."""
        rank = dist.get_rank()
        self._try(lambda: folder.mkdir(parents=True, exist_ok=True))
        for name, file in files.items():
            if file.rank == rank:
                self._try(self._start_file, folder / name, file)
        if rank == 0 and len(files) > 1:
            self._try(self._write_index, files)

    def write(self, tensors: _Group) -> None:
        """Write whole tensors to their places."""
        if self._error is None:
            for name, tensor in tensors.items():
                self._try(self._write_tensor, *self._tensor_locations[name], tensor)

    def finish(self) -> None:
        """Wait for all ranks.

        Raises:
            CheckpointError: a rank could not write.
        """
        messages: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, None if self._error is None else str(self._error))
        failures = [message for message in messages if message is not None]
        if failures:
            raise CheckpointError(failures[0]) from self._error

    def _try(self, write: Callable[..., object], *args: object) -> None:
        if self._error is not None:
            return
        try:
            with convert_write_errors(self._folder):
                write(*args)
        except CheckpointError as error:
            self._error = error

    def _start_file(self, path: Path, file: _File) -> None:
        # Large elements first, so that each tensor starts at a multiple of its element size.
        names = sorted(file.tensors, key=lambda name: -file.tensors[name].itemsize)
        tensors = {name: file.tensors[name] for name in names}
        file_start = encode_file_start(tensors, {"format": "pt"})
        path.write_bytes(file_start)
        self.paths.append(path)
        offset = len(file_start)
        for name, tensor in tensors.items():
            self._tensor_locations[name] = (path, offset)
            offset += tensor.nbytes

    def _write_tensor(self, path: Path, offset: int, tensor: Tensor) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(view_bytes(tensor).data)

    def _write_index(self, files: Mapping[str, _File]) -> None:
        weight_map = {name: file_name for file_name, file in files.items() for name in file.tensors}
        num_bytes = sum(file.num_bytes for file in files.values())
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        self.paths.append(self._folder / SAFE_WEIGHTS_INDEX_NAME)
        self.paths[-1].write_text(json.dumps(index, indent=2), encoding="utf-8")


def _list_groups(model: PreTrainedModel) -> list[_Group]:
    """Return the parameters and persistent buffers of a model in groups, each tied tensor once."""
    conversions = getattr(model, "_weight_conversions", ())
    has_conversions = any(isinstance(conversion, WeightConverter) for conversion in conversions)
    groups: dict[str, _Group] = {}
    known_ids: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in known_ids:
            continue
        known_ids.add(id(tensor))
        layer = _LAYER_PATTERN.match(name) if has_conversions else None
        group_name = lora.get_layer_name(name) if layer is None else layer[1]
        groups.setdefault(group_name, {})[name] = tensor
    return list(groups.values())


def _make_plan(groups: list[_Group], convert: _Convert, max_file_bytes: int) -> _Plan:
    """Assign groups and files to ranks.

    All files with tensors of one group have the same rank. Otherwise the ranks take turns.
    """
    num_ranks = dist.get_world_size()
    plan = _Plan([[] for _ in range(num_ranks)], [])
    rank, num_file_bytes = -1, 0
    for group in groups:
        is_same_group = False
        tensors = {name: _remove_data(tensor) for name, tensor in group.items()}
        for name, tensor in convert(tensors).items():
            num_file_bytes += tensor.nbytes
            if not plan.files or num_file_bytes > max_file_bytes:
                rank = rank if is_same_group else (rank + 1) % num_ranks
                plan.files.append(_File(rank))
                num_file_bytes = tensor.nbytes
            plan.files[-1].tensors[name] = tensor
            is_same_group = True
        plan.groups_by_rank[rank].append(group)
    return plan


def _remove_data(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _gather_group(group: _Group, rank: int) -> _Group:
    """Return the whole tensors of a group on a rank, on the CPU; empty on the other ranks."""
    gathered_group = {name: _gather(tensor.detach(), rank) for name, tensor in group.items()}
    return gathered_group if rank == dist.get_rank() else {}


def _gather(tensor: Tensor, rank: int) -> Tensor:
    """Return a whole tensor on a rank, on the CPU, and an empty tensor on the other ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.cpu()
    local_rows, num_ranks = tensor.to_local(), tensor.device_mesh.size()
    if num_ranks == 1:
        return local_rows.cpu()
    # FSDP2 gives each rank the same number of rows, except the last ranks.
    num_rows = math.ceil(tensor.shape[0] / num_ranks)
    rows = local_rows
    if len(local_rows) < num_rows:
        rows = local_rows.new_empty(num_rows, *local_rows.shape[1:])
        rows[: len(local_rows)] = local_rows
    gathered_rows, parts = rows[:0], None
    if rank == dist.get_rank():
        gathered_rows = rows.new_empty(num_ranks * num_rows, *rows.shape[1:])
        parts = list(gathered_rows.split(num_rows))
    dist.gather(rows, parts, group=tensor.device_mesh.get_group(), group_dst=rank)
    return gathered_rows[: tensor.shape[0]].cpu()
