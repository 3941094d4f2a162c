"""The trainer's command for reward models."""

from __future__ import annotations

import logging
import sys

from ludus.proto.config import RewardModelConfig
from ludus.trainer.core.stopping import StopRequest, stop_on_signals
from ludus.trainer.reward_model.training import check_training, train_reward_model


def train(config: RewardModelConfig, *, resume: bool, overwrite: bool, dry_run: bool) -> str:
    """Train a reward model, and return a line about the result.

    Args:
        dry_run: check model and data, and write nothing.

    Raises:
        UserError: the training cannot start as configured.
        RunStopped: SIGINT or SIGTERM stopped the training.
    """
    _print_warnings()
    if dry_run:
        num_train, num_test = check_training(config, overwrite=overwrite)
        return f"{num_train} training comparisons, {num_test} held out; nothing was written"
    request = StopRequest()
    with stop_on_signals(request):
        train_reward_model(
            config,
            resume=config.output if resume else None,
            overwrite=overwrite,
            should_stop=lambda: request.is_set,
        )
    return f"written to {config.output}"


def _print_warnings() -> None:
    """Print warnings in the format that `ludus` recognizes."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger("ludus").addHandler(handler)
