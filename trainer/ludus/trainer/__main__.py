"""`python -m ludus.trainer`: what the command line starts, and what a RayJob starts."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ludus.proto.config import (
    LanguageModelRun,
    NetworkRun,
    RunConfig,
    load_reward_model_config,
    load_run_config,
)
from ludus.proto.errors import LudusError, UserError
from ludus.proto.runs import Evaluation, Resume
from ludus.trainer.core.disk import describe_write_error, write_atomically

_INTERRUPTED_EXIT_CODE = 130
_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 bad input, 130 stopped by a signal, 1 anything else."""
    args = _parser().parse_args(argv)
    # A tiny model is on disk; a hub would be asked for nothing but its absence.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        return _VERBS[args.command](args)
    except UserError as error:
        return _fail(error, UserError.exit_code)
    except LudusError as error:
        return _fail(error, 1)
    except OSError as error:
        # A disk that is full, a folder that went away: nobody needs a traceback for that.
        return _fail(error, 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _INTERRUPTED_EXIT_CODE


def _run_of(args: argparse.Namespace) -> RunConfig:
    return load_run_config(args.config, args.set)


def _train(args: argparse.Namespace) -> int:
    run = _run_of(args)
    if isinstance(run, NetworkRun):
        return _train_network(run, args)
    return _train_language_model(run, args)


def _train_network(run: NetworkRun, args: argparse.Namespace) -> int:
    # It needs neither Ray nor transformers, which take longer to import than some runs take.
    from ludus.trainer.classic.run import NetworkRunStopped, train

    try:
        train(run, resume=Resume(args.resume), overwrite=args.overwrite)
    except NetworkRunStopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        return _INTERRUPTED_EXIT_CODE
    return 0


def _train_language_model(run: LanguageModelRun, args: argparse.Namespace) -> int:
    from ludus.trainer.driver.main import train
    from ludus.trainer.driver.trainer import Stopped

    try:
        asyncio.run(train(run, resume=Resume(args.resume), overwrite=args.overwrite))
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        # Whoever wanted it through the control file gets what they wanted: a RayJob that
        # failed would be tried again.
        return 0 if stopped.is_wanted else _INTERRUPTED_EXIT_CODE
    return 0


def _check(args: argparse.Namespace) -> int:
    run = _run_of(args)
    if isinstance(run, NetworkRun):
        from ludus.trainer.classic.run import check

        check(run, Resume(args.resume))
        return 0
    from ludus.trainer.checks.preflight import preflight
    from ludus.trainer.driver.build import resolved

    preflight(resolved(run), Resume(args.resume))
    return 0


def _eval(args: argparse.Namespace) -> int:
    run = _run_of(args)
    if args.run_dir is not None:
        place = {"name": args.run_dir.name, "output_dir": str(args.run_dir.parent)}
        run = run.model_copy(update=place)
    text = _evaluation(run, args).model_dump_json(indent=2)
    if args.output is None:
        sys.stdout.write(text + "\n")
    else:
        write_atomically(args.output, text)
    return 0


def _evaluation(run: RunConfig, args: argparse.Namespace) -> Evaluation:
    num_games = args.games or run.eval.num_games
    if isinstance(run, NetworkRun):
        from ludus.trainer.classic import run as classic

        return classic.evaluate(
            run, args.checkpoint, num_games=num_games, temperature=args.temperature
        )
    from ludus.trainer.driver.main import evaluate

    return asyncio.run(
        evaluate(run, args.checkpoint, num_games=num_games, temperature=args.temperature)
    )


def _reward(args: argparse.Namespace) -> int:
    from ludus.trainer.reward_model.main import train
    from ludus.trainer.reward_model.training import Stopped

    config = load_reward_model_config(args.config, args.set)
    try:
        said = train(config, resume=args.resume, overwrite=args.overwrite, dry_run=args.dry_run)
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        return _INTERRUPTED_EXIT_CODE
    sys.stdout.write(f"{said}\n")
    return 0


_VERBS = {"train": _train, "check": _check, "eval": _eval, "reward": _reward}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ludus.trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a policy")
    check = commands.add_parser("check", help="look at what a start would trip over")
    for command in (train, check):
        command.add_argument(
            "--resume",
            nargs="?",
            const=Resume.ALWAYS,
            default=Resume.NEVER,
            choices=[Resume.ALWAYS, Resume.AUTO],
            help="continue from the newest checkpoint; with =auto begin anew where there is none",
        )
        command.add_argument("--overwrite", action="store_true", help="replace a run of this name")
    evaluate = commands.add_parser("eval", help="judge a checkpoint")
    evaluate.add_argument("--run-dir", type=Path, help="folder of the run")
    evaluate.add_argument("--checkpoint", type=Path, help="default: the newest")
    evaluate.add_argument("--games", type=int, help="default: eval.num_games")
    evaluate.add_argument("--temperature", type=float, help="default: eval.temperature")
    evaluate.add_argument("--output", type=Path, help="default: standard output")
    reward = commands.add_parser("reward", help="train a reward model")
    reward.add_argument("--resume", action="store_true", help="continue where it was stopped")
    reward.add_argument("--overwrite", action="store_true", help="replace a reward model")
    reward.add_argument("--dry-run", action="store_true", help="look at model and data only")
    for command in (train, check, evaluate, reward):
        command.add_argument("--config", type=Path, required=True, help="TOML, YAML or JSON")
        command.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    return parser


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _FULL and error.filename is not None:
        return f"{describe_write_error(Path(error.filename), error)}; make room"
    return str(error)


def _fail(error: Exception, code: int) -> int:
    # An error that crossed a Ray actor carries its traceback in the text; people want the cause.
    cause = getattr(error, "cause", None) or error
    text = "; ".join([_in_words(cause), *getattr(error, "__notes__", [])])
    sys.stderr.write(f"error: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
