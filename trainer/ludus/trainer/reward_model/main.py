"""What the command line does with a reward model: trains it as a process of its own."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ludus.proto.config import RewardModelConfig
from ludus.trainer.reward_model.training import check_training, train_reward_model


def train(config: RewardModelConfig, *, resume: bool, overwrite: bool, dry_run: bool) -> str:
    """What came of it, in a line.

    Raises:
        UserError: it cannot begin as configured.
        Stopped: SIGINT or SIGTERM ended it; a second one would have ended it at once.
    """
    _warn_on_stderr()
    if dry_run:
        num_train, num_test = check_training(config, overwrite=overwrite)
        return f"{num_train} comparisons to train on, {num_test} held out; nothing was written"
    with _stop_on_signal() as should_stop:
        train_reward_model(
            config,
            resume=config.output if resume else None,
            overwrite=overwrite,
            should_stop=should_stop,
        )
    return f"written to {config.output}"


def _warn_on_stderr() -> None:
    """Warnings as lines that the command line knows."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger("ludus").addHandler(handler)


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Says whether somebody wants it to end; whoever wants it twice gets it at once."""
    asked: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
