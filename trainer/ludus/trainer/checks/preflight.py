"""What a start would trip over, looked at before anything heavy begins and anything is written."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import torch

from ludus.env.targets.targets import environment_factory
from ludus.proto.config import LanguageModelRun, LocalEnvironment
from ludus.proto.errors import ConfigError
from ludus.proto.run_lock import is_in_use
from ludus.proto.runs import Resume
from ludus.trainer.actors.cluster import is_local
from ludus.trainer.actors.placement import on_one_machine
from ludus.trainer.actors.weight_store import check_reachable, located
from ludus.trainer.run.changes import changes_since
from ludus.trainer.run.checkpoint import check_streams, read_state, starting_point
from ludus.trainer.run.folder import new_run_id, path_of
from ludus.trainer.setup.environments import (
    check_names,
    check_remote,
    check_rewards_of,
    fixed_policies,
)
from ludus.trainer.setup.prepare import check_models


def preflight(run: LanguageModelRun, resume: Resume) -> None:
    """Check environments, functions, fixed policies, model, GPUs, weight store and folder.

    Raises:
        UserError: one of them is not as the configuration says.
    """
    check_names(run)
    _check_environments(run)
    asyncio.run(check_remote(run))
    check_models(run)
    if is_local():
        _check_gpus(run)
    folder = path_of(run)
    check_reachable(located(run.weights, folder, new_run_id()))
    _check_folder(folder)
    checkpoint = starting_point(run, resume)
    if checkpoint is not None:
        check_streams(checkpoint, read_state(checkpoint))
        changes_since(folder, run)


def _check_environments(run: LanguageModelRun) -> None:
    """Build those of this machine once, and look for the policies that are named."""
    for name, environment in run.environments.items():
        if not isinstance(environment, LocalEnvironment):
            continue
        built = environment_factory(environment.package, environment.options)()
        built.close()
        check_rewards_of(run, name, built.tasks)
        fixed_policies(run, name, environment.options)


def _check_gpus(run: LanguageModelRun) -> None:
    demand, num_there = on_one_machine(run).demand, torch.cuda.device_count()
    if not demand.fits([{"GPU": float(num_there)}]):
        raise ConfigError(
            f"this machine has {num_there} GPUs, and the run asks for {demand}; lower "
            "learner.num_gpus_per_rank and rollout.num_gpus_per_worker, or join a cluster that has "
            "them with RAY_ADDRESS"
        )


def _check_folder(folder: Path) -> None:
    if is_in_use(folder):
        raise ConfigError(f"'{folder}' is in use: another process trains there; take another name")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"the run's folder '{folder}' cannot be written: '{there}' is no folder that may be "
            "written to; set output_dir to one"
        )
