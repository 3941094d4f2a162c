"""The trainer's command line, which `ludus` and a RayJob start: `python -m ludus.trainer`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ludus.env.runtime import pause_collection
from ludus.proto.config import NetworkRun, RunConfig, load_reward_model_config, load_run_config
from ludus.proto.errors import LudusError, UserError
from ludus.proto.runs import Evaluation, Resume
from ludus.trainer.core.output import describe_write_error, write_atomically
from ludus.trainer.core.stopping import RunStopped

_INTERRUPTED_EXIT_CODE = 130
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 2 for bad input, 130 for a signal, 1 otherwise."""
    args = _make_parser().parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        return _COMMANDS[args.command](args)
    except RunStopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        # A RayJob that fails would be restarted, so an intended stop is a success.
        return 0 if stopped.is_intended else _INTERRUPTED_EXIT_CODE
    except UserError as error:
        return _fail(error, UserError.exit_code)
    except (LudusError, OSError) as error:
        # An OSError, such as a full disk, needs no traceback.
        return _fail(error, 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _INTERRUPTED_EXIT_CODE


def _train(args: argparse.Namespace) -> int:
    run = _load_run(args)
    if isinstance(run, NetworkRun):
        # Networks need neither Ray nor transformers, which are slow to import.
        with pause_collection():
            from ludus.trainer.classic.run import train as train_network

        train_network(run, resume=Resume(args.resume), overwrite=args.overwrite)
    else:
        with pause_collection():
            from ludus.trainer.driver.commands import train

        asyncio.run(train(run, resume=Resume(args.resume), overwrite=args.overwrite))
    return 0


def _check(args: argparse.Namespace) -> int:
    run = _load_run(args)
    if isinstance(run, NetworkRun):
        with pause_collection():
            from ludus.trainer.classic.run import check

        check(run, Resume(args.resume))
        return 0
    with pause_collection():
        from ludus.trainer.checks.start import check_start
        from ludus.trainer.setup.resolve import resolve_config

    check_start(resolve_config(run), Resume(args.resume))
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    run = _load_run(args)
    if args.run_dir is not None:
        location = {"name": args.run_dir.name, "output_dir": str(args.run_dir.parent)}
        run = run.model_copy(update=location)
    text = _evaluate_run(run, args).model_dump_json(indent=2)
    if args.output is None:
        sys.stdout.write(text + "\n")
    else:
        write_atomically(args.output, text)
    return 0


def _evaluate_run(run: RunConfig, args: argparse.Namespace) -> Evaluation:
    num_games = args.games or run.eval.num_games
    if isinstance(run, NetworkRun):
        with pause_collection():
            from ludus.trainer.classic import run as classic

        return classic.evaluate(
            run, args.checkpoint, num_games=num_games, temperature=args.temperature
        )
    with pause_collection():
        from ludus.trainer.driver.commands import evaluate

    return asyncio.run(
        evaluate(run, args.checkpoint, num_games=num_games, temperature=args.temperature)
    )


def _train_reward_model(args: argparse.Namespace) -> int:
    with pause_collection():
        from ludus.trainer.reward_model.main import train

    config = load_reward_model_config(args.config, args.set)
    result = train(config, resume=args.resume, overwrite=args.overwrite, dry_run=args.dry_run)
    sys.stdout.write(f"{result}\n")
    return 0


_COMMANDS = {
    "train": _train,
    "check": _check,
    "eval": _evaluate,
    "reward": _train_reward_model,
}


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ludus.trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a policy")
    check = commands.add_parser("check", help="check everything that could stop a run")
    for command in (train, check):
        command.add_argument(
            "--resume",
            nargs="?",
            const=Resume.ALWAYS,
            default=Resume.NEVER,
            choices=[Resume.ALWAYS, Resume.AUTO],
            help="resume from the newest checkpoint; with =auto, start a new run if there is none",
        )
        command.add_argument(
            "--overwrite", action="store_true", help="replace a run of the same name"
        )
    evaluate = commands.add_parser("eval", help="evaluate a checkpoint")
    evaluate.add_argument("--run-dir", type=Path, help="folder of the run")
    evaluate.add_argument("--checkpoint", type=Path, help="checkpoint; default: the newest")
    evaluate.add_argument("--games", type=int, help="number of episodes; default: eval.num_games")
    evaluate.add_argument(
        "--temperature", type=float, help="sampling temperature; default: eval.temperature"
    )
    evaluate.add_argument("--output", type=Path, help="output file; default: standard output")
    reward = commands.add_parser("reward", help="train a reward model")
    reward.add_argument("--resume", action="store_true", help="resume a stopped training")
    reward.add_argument("--overwrite", action="store_true", help="replace a reward model")
    reward.add_argument("--dry-run", action="store_true", help="check the model and the data only")
    for command in (train, check, evaluate, reward):
        command.add_argument(
            "--config", type=Path, required=True, help="configuration file: TOML, YAML or JSON"
        )
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="A.B=VALUE",
            help="override of a field; repeatable",
        )
    return parser


def _load_run(args: argparse.Namespace) -> RunConfig:
    return load_run_config(args.config, args.set)


def _describe_error(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRORS and error.filename:
        return f"{describe_write_error(Path(error.filename), error)}; make room"
    return str(error)


def _fail(error: Exception, exit_code: int) -> int:
    # The text of an error that crossed a Ray actor contains its traceback; its cause does not.
    cause = getattr(error, "cause", None) or error
    text = "; ".join([_describe_error(cause), *getattr(error, "__notes__", [])])
    sys.stderr.write(f"error: {text}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
