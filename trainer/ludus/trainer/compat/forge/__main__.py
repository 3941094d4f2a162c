"""Command that trains from Forge's YAML.

    python -m ludus.trainer.compat.forge --config X.yaml [key=value ...]

It replaces `python -m apps.grpo.main` and `apps.grpo.blackjack_main_fixed`, with the same
syntax of overrides. Ctrl-C stops the run after its current step, with a checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ludus.proto.errors import LudusError, UserError
from ludus.proto.runs import Resume


def main(argv: Sequence[str] | None = None) -> int:
    """Train a run and return the exit code.

    0 is success, 2 is invalid input, 130 is a stop by a signal, and 1 is any other error.
    """
    options = _make_parser().parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from ludus.trainer.core.stopping import RunStopped

    try:
        _train(options)
    except RunStopped as run_stopped:
        sys.stderr.write(f"{run_stopped}\n")
        return 0 if run_stopped.is_from_control_file else 130
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except LudusError as error:
        sys.stderr.write(f"error: {getattr(error, 'cause', None) or error}\n")
        return UserError.exit_code if isinstance(error, UserError) else 1
    return 0


def _train(options: argparse.Namespace) -> None:
    from ludus.trainer.compat.forge.training import load_forge_run
    from ludus.trainer.driver.commands import train

    resume = Resume(options.resume)
    run = asyncio.run(
        load_forge_run(
            options.config, options.overrides, resume=resume, overwrite=options.overwrite
        )
    )
    folder = train(run, resume=resume, overwrite=options.overwrite)
    sys.stdout.write(f"{folder}\n")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ludus.trainer.compat.forge")
    parser.add_argument("--config", type=Path, required=True, help="Forge configuration, YAML.")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="Override of a key, for example group_size=8.",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace an existing run of the same name."
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=Resume.ALWAYS,
        default=Resume.NEVER,
        choices=[Resume.ALWAYS, Resume.AUTO],
        help="Resume from the latest checkpoint. With =auto, start a new run if there is none.",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
