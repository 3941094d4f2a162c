"""The number of CPU threads of each learner rank and rollout worker of a run on one machine.

    small model, GPU, or a Ray cluster       one thread
    one waits for the other                  ranks share all cores, and workers share all cores
    sampling and training overlap            ranks and workers share all cores together

The matrices of a small model are too small to divide. There is at most one thread for each core,
because all threads of an operation wait for the slowest. bench/threads.py compares the seconds of a
step with one thread and with one for each core.
"""

from __future__ import annotations

import os

from ludus.env.sessions.options import count_available_cpus
from ludus.proto.config import LanguageModelRun, TinyModel
from ludus.trainer.actors.placement import Roles
from ludus.trainer.actors.ray_address import is_local
from ludus.trainer.core.devices import MIN_WIDTH_FOR_THREADS
from ludus.trainer.models.load import load_config

_CORES_VARIABLE = "OMP_NUM_THREADS"


def resolve_num_threads(run: LanguageModelRun, roles: Roles = Roles.ALL) -> LanguageModelRun:
    """Return the run with a number of CPU threads for each rank and each worker.

    Numbers that the configuration sets are kept.

    Args:
        roles: kinds of actors that the run starts.

    Raises:
        NotFoundError: there is no model.
    """
    learner, rollout = run.learner, run.rollout
    num_ranks = learner.num_ranks if Roles.RANKS in roles else 0
    num_workers = rollout.num_workers if Roles.WORKERS in roles else 0
    has_overlap = run.training.max_staleness > 0
    num_shares = (num_ranks + num_workers) if has_overlap else max(num_ranks, num_workers)
    share = 1
    if is_local() and get_width(run) >= MIN_WIDTH_FOR_THREADS:
        share = max(1, _count_cores() // num_shares)
    num_rank_threads = 1 if learner.num_gpus_per_rank else share
    num_worker_threads = 1 if rollout.num_gpus_per_worker else share
    return run.model_copy(
        update={
            "learner": learner.model_copy(
                update={"num_threads": learner.num_threads or num_rank_threads}
            ),
            "rollout": rollout.model_copy(
                update={"num_threads": rollout.num_threads or num_worker_threads}
            ),
        }
    )


def get_width(run: LanguageModelRun) -> int:
    """Return the width of the policy's hidden states; 0 if its configuration has none."""
    if isinstance(run.model, TinyModel):
        return run.model.width
    text_config = load_config(run.model.path).get_text_config()
    return int(getattr(text_config, "hidden_size", 0) or 0)


def _count_cores() -> int:
    setting = os.environ.get(_CORES_VARIABLE, "")
    return int(setting) if setting.isdecimal() and int(setting) > 0 else count_available_cpus()
