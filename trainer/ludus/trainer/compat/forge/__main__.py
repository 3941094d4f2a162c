"""Command that trains from Forge's YAML.

    python -m ludus.trainer.compat.forge --config X.yaml [key=value ...]

It replaces `python -m apps.grpo.main` and `apps.grpo.blackjack_main_fixed`, with the same
syntax of overrides. Ctrl-C stops the run after its current step, with a checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from ludus.proto.paths import parse_path
from ludus.proto.runs import Resume
from ludus.trainer.__main__ import add_start_options, run_command
from ludus.trainer.compat.forge.training import load_forge_run
from ludus.trainer.driver.commands import train


def main(argv: Sequence[str] | None = None) -> int:
    """Train a run and return an exit code of the trainer's command line."""
    parser = argparse.ArgumentParser(prog="python -m ludus.trainer.compat.forge")
    parser.add_argument(
        "--config", type=parse_path, required=True, help="Forge configuration, YAML"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="override of a key, such as group_size=8"
    )
    add_start_options(parser)
    return run_command(_train, parser.parse_args(argv))


def _train(args: argparse.Namespace) -> None:
    resume, overwrite = Resume(args.resume), args.overwrite
    run = asyncio.run(
        load_forge_run(args.config, args.overrides, resume=resume, overwrite=overwrite)
    )
    folder = train(run, resume=resume, overwrite=overwrite)
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    sys.exit(main())
