"""The learner's part of a checkpoint: weights, optimizer and random state, one part per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ludus.proto.errors import CheckpointError
from ludus.trainer.core.types import SavedFile
from ludus.trainer.learner.checkpoint_reader import (
    CheckpointReader,
    PlainValuePlanner,
    UnsafeFileError,
)
from ludus.trainer.learner.write_errors import convert_write_errors, find_first_failure


class LearnerState:
    """The state of a module, its optimizer and torch's random numbers. Methods are collectives."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, *, has_adapters: bool
    ) -> None:
        """`has_adapters` leaves out frozen weights, which come from the model's folder."""
        self._module, self._optimizer = module, optimizer
        self._options = StateDictOptions(ignore_frozen_params=has_adapters, strict=not has_adapters)

    def save(self, folder: Path) -> list[SavedFile]:
        """Write the state, and return the files of this rank.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        state = self._collect()
        with convert_write_errors(folder):
            dcp.save(state, checkpoint_id=folder)
        rank = dist.get_rank()
        paths = sorted(folder.glob(f"__{rank}_*"))
        if rank == 0:
            paths.append(folder / ".metadata")
        return [SavedFile.from_path(path) for path in paths]

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, possibly with a different number of ranks.

        Raises:
            CheckpointError: the folder cannot be read, contains an object that could run code, or
                belongs to a different model.
        """
        state = self._collect()
        try:
            dcp.load(state, storage_reader=CheckpointReader(folder), planner=PlainValuePlanner())
        except (CheckpointException, RuntimeError, OSError) as error:
            failure = find_first_failure(error)
            is_described = failure is error or isinstance(failure, UnsafeFileError)
            reason = str(failure) if is_described else repr(failure)
            raise CheckpointError(
                f"checkpoint '{folder}' cannot be read: {reason}; it must be complete, and come "
                "from a run with the same model"
            ) from error
        set_state_dict(
            self._module,
            self._optimizer,
            model_state_dict=state["policy"],
            optim_state_dict=state["optimizer"],
            options=self._options,
        )
        torch.set_rng_state(state["torch_random"])

    def _collect(self) -> dict[str, Any]:
        if not self._optimizer.state:
            # torch creates the state by a step without a learning rate, which must not count.
            get_state_dict(self._module, self._optimizer, options=self._options)
            for parameter_state in self._optimizer.state.values():
                parameter_state["step"].zero_()
        policy, optimizer = get_state_dict(self._module, self._optimizer, options=self._options)
        return {"policy": policy, "optimizer": optimizer, "torch_random": torch.get_rng_state()}
