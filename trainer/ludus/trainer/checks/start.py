"""All checks before a start, for `ludus train --dry-run`; nothing is written."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import torch

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.run_lock import is_in_use
from ludus.proto.runs import Resume
from ludus.trainer.actors.cluster import is_local
from ludus.trainer.actors.placement import place_on_one_machine
from ludus.trainer.actors.weight_store import check_reachable, resolve_location
from ludus.trainer.checks.environments import check_local_environments, check_remote_addresses
from ludus.trainer.checks.models import check_models
from ludus.trainer.checks.names import check_names
from ludus.trainer.run.checkpoint import RunState
from ludus.trainer.run.folder import make_run_id, run_path
from ludus.trainer.run.lifecycle import find_start


def check_start(run: LanguageModelRun, resume: Resume) -> None:
    """Check everything that could stop a run from starting.

    Raises:
        UserError: the run cannot start as configured.
    """
    check_names(run)
    check_local_environments(run)
    asyncio.run(check_remote_addresses(run))
    check_models(run)
    if is_local():
        _check_gpus(run)
    folder = run_path(run)
    check_reachable(resolve_location(run.weights, folder, make_run_id()))
    _check_folder(folder)
    find_start(run, resume, RunState)


def _check_gpus(run: LanguageModelRun) -> None:
    demand, num_gpus = place_on_one_machine(run).demand, torch.cuda.device_count()
    if not demand.fits([{"GPU": float(num_gpus)}]):
        raise ConfigError(
            f"this machine has {num_gpus} GPUs, but the run needs {demand}; lower "
            "learner.num_gpus_per_rank and rollout.num_gpus_per_worker, or join a cluster that has "
            "them with RAY_ADDRESS"
        )


def _check_folder(folder: Path) -> None:
    if is_in_use(folder):
        raise ConfigError(f"'{folder}' is in use: another process trains there; use another name")
    existing_path = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing_path.is_dir() and os.access(existing_path, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"the run's folder '{folder}' cannot be written, because '{existing_path}' is not a "
            "writable folder; set output_dir to a writable folder"
        )
