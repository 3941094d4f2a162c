"""Command line of the trainer (`python -m ludus.trainer`). `ludus` and RayJobs start it."""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType

from ludus.env.runtime import pause_collection
from ludus.env.text.terminal import clean_json_for_terminal, format_notice
from ludus.proto.config import (
    AnyRunConfig,
    LanguageModelRun,
    load_any_run_config,
    load_run_config,
)
from ludus.proto.errors import LudusError, UserError
from ludus.proto.paths import parse_path
from ludus.proto.runs import CHECKPOINTS_FOLDER, Evaluation, Resume
from ludus.trainer.core.option_names import use_option_names
from ludus.trainer.core.output import describe_write_error, write_atomically
from ludus.trainer.core.stopping import RunStopped

_INTERRUPTED_EXIT_CODE = 130
_GPU_DEVICE = Path("/dev/nvidiactl")
"""Device file that exists on machines with an NVIDIA GPU. torch must not be imported to find out,
because vLLM's variables must be set before."""
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_MODULES = {
    "language_model": "driver.commands",
    "network": "classic.run",
    "reward_model": "reward_model.training",
    "sft": "sft.commands",
}
"""Module that implements the commands, by kind of run. Networks and reward models need no Ray."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 2 for bad input, 130 for a signal, 1 otherwise."""
    args = _make_parser().parse_args(argv)
    return run_command(args.function, args)


def run_command(command: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Run a command with its arguments, report its error, and return the exit code of `main`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with use_option_names(resume="--resume", overwrite="--overwrite"):
            command(args)
        return 0
    except RunStopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        # A RayJob that fails would be restarted, so an intended stop is a success.
        return 0 if stopped.is_from_control_file else _INTERRUPTED_EXIT_CODE
    except UserError as error:
        return _report_error(error, UserError.exit_code)
    except (LudusError, OSError) as error:
        # An OSError, such as a full disk, needs no traceback.
        return _report_error(error, 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _INTERRUPTED_EXIT_CODE


def _train_or_check(args: argparse.Namespace) -> None:
    run, resume = load_any_run_config(args.config, args.set), Resume(args.resume)
    _check_quickly(run, resume, makes_environments=args.command == "check")
    command = getattr(_import_commands(run), args.command)
    command(run, resume=resume, overwrite=args.overwrite)


def _check_quickly(run: AnyRunConfig, resume: Resume, *, makes_environments: bool) -> None:
    """Check what needs no torch, before its import takes seconds."""
    with pause_collection(), _exit_on_interrupt():
        from ludus.trainer.setup.quick_checks import check_environments, check_names

        check_names(run, resume)
    if makes_environments:
        check_environments(run)


def _evaluate(args: argparse.Namespace) -> None:
    from ludus.trainer.setup.quick_checks import check_functions

    options = {"num_games": args.games, "temperature": args.temperature}
    changes = [f"eval.{name}={value}" for name, value in options.items() if value is not None]
    run = load_run_config(args.config, [*args.set, *changes])
    if args.games is not None and isinstance(run, LanguageModelRun):
        # The user asks for this number of episodes, whatever the number of tasks.
        unlimited_eval = run.eval.model_copy(update={"max_games_per_task": None})
        run = run.model_copy(update={"eval": unlimited_eval})
    if isinstance(run, LanguageModelRun):
        check_functions(run)
    from ludus.trainer.run.checkpoint import find_checkpoint  # imports torch, which takes seconds

    if args.run_dir is not None:
        run_location = {"name": args.run_dir.name, "output_dir": str(args.run_dir.parent)}
        run = run.model_copy(update=run_location)
    checkpoint = find_checkpoint(args.checkpoint, run.folder / CHECKPOINTS_FOLDER)
    evaluation: Evaluation = _import_commands(run).evaluate(run, checkpoint)
    evaluation_json = evaluation.model_dump_json(indent=2)
    if args.output is None:
        sys.stdout.write(clean_json_for_terminal(evaluation_json) + "\n")
    else:
        write_atomically(args.output, evaluation_json)


def _evaluate_models(args: argparse.Namespace) -> None:
    from ludus.trainer.rollout.engines.vllm_process import prepare_process

    run = load_run_config(args.config, args.set)
    assert isinstance(run, LanguageModelRun)
    if run.generator.kind == "vllm":
        prepare_process(run.rollout.known_num_threads, uses_gpu=_GPU_DEVICE.exists())
    with pause_collection():
        from ludus.trainer.driver.model_evaluation import ModelEvaluationRequest, evaluate_models
    evaluate_models(
        run,
        ModelEvaluationRequest(
            models=args.model,
            baselines=args.baseline,
            endpoint=args.endpoint,
            token_env=args.token_env,
            folder=args.folder,
            lowers_completion_tokens=not args.exact_completion_tokens,
        ),
    )


def _convert(args: argparse.Namespace) -> None:
    with pause_collection(), _exit_on_interrupt():
        from ludus.trainer.setup.gguf import convert_gguf
    convert_gguf(args.file, args.folder)


def _export(args: argparse.Namespace) -> None:
    with pause_collection(), _exit_on_interrupt():
        from ludus.trainer.setup.export import export_model
    export_model(args.run, args.checkpoint, args.dtype, args.folder)


def _push(args: argparse.Namespace) -> None:
    """Prepare the repository of a model and print its id; with a folder, upload the model."""
    with pause_collection(), _exit_on_interrupt():
        from ludus.trainer.setup.hub import prepare_repository, upload_model
    with _exit_on_interrupt():
        if args.folder is None:
            result = prepare_repository(args.id, is_private=args.private)
        else:
            result = upload_model(args.folder, args.id)
    sys.stdout.write(f"{result}\n")


def _chat(args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pause_collection(), _exit_on_interrupt():
        from ludus.trainer.driver.chat import ChatSettings, chat
        from ludus.trainer.driver.chat_tools import ToolSettings
    settings = ChatSettings(args.system, args.temperature, args.max_completion_tokens, args.seed)
    tool_settings = None
    if args.env is not None:
        options = json.loads(args.env_options)
        tool_settings = ToolSettings(args.env, options, args.token_env, args.max_calls)
    chat(args.model, settings, enable_thinking=args.thinking, tool_settings=tool_settings)


def _import_commands(run: AnyRunConfig) -> ModuleType:
    """Import the module with the functions `train`, `check` and `evaluate` of the run's kind.

    The modules of other kinds are not imported, because Ray and transformers take seconds.
    """
    with pause_collection(), _exit_on_interrupt():
        return importlib.import_module(f"ludus.trainer.{_MODULES[run.kind]}")


@contextmanager
def _exit_on_interrupt() -> Iterator[None]:
    """End the process on SIGINT or SIGTERM within the block.

    A KeyboardInterrupt could end in a handler of all errors in an imported library, and be lost.
    """

    def end_process(signal_number: int, frame: FrameType | None) -> None:
        os._exit(_INTERRUPTED_EXIT_CODE)

    signal_numbers = (signal.SIGINT, signal.SIGTERM)
    previous_handlers = [signal.signal(number, end_process) for number in signal_numbers]
    try:
        yield
    finally:
        for number, handler in zip(signal_numbers, previous_handlers, strict=True):
            signal.signal(number, handler)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ludus.trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train", help="train a policy, a reward model or a fine-tuned model"
    )
    check = commands.add_parser("check", help="check everything that could stop a run")
    add_start_options(train)
    add_start_options(check)
    evaluate = commands.add_parser("eval", help="evaluate a checkpoint")
    evaluate.add_argument("--run-dir", type=parse_path, help="folder of the run")
    evaluate.add_argument("--checkpoint", type=parse_path, help="checkpoint; default: the newest")
    evaluate.add_argument("--games", type=int, help="number of episodes; default: eval.num_games")
    evaluate.add_argument(
        "--temperature", type=float, help="sampling temperature; default: eval.temperature"
    )
    evaluate.add_argument("--output", type=parse_path, help="output file; default: standard output")
    evaluate_models = commands.add_parser("eval-models", help="evaluate models without a run")
    _add_model_options(evaluate_models)
    functions = {evaluate: _evaluate, evaluate_models: _evaluate_models}
    for command in (train, check, evaluate, evaluate_models):
        command.set_defaults(function=functions.get(command, _train_or_check))
        command.add_argument(
            "--config",
            type=parse_path,
            required=True,
            help="configuration file: TOML, YAML or JSON",
        )
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="A.B=VALUE",
            help="override of a field; repeatable",
        )
    convert = commands.add_parser("convert", help="convert a GGUF file to a folder")
    convert.add_argument("--file", type=parse_path, required=True, help="GGUF file")
    convert.add_argument("--folder", type=parse_path, required=True, help="output folder")
    convert.set_defaults(function=_convert)
    export = commands.add_parser("export", help="write the model of a run to a folder")
    export.add_argument("--run", type=parse_path, required=True, help="run folder")
    export.add_argument("--checkpoint", type=parse_path, help="default: the latest")
    export.add_argument("--dtype", help="default: that of the original model")
    export.add_argument("--folder", type=parse_path, required=True, help="output folder")
    export.set_defaults(function=_export)
    push = commands.add_parser("push", help="upload a model to the Hugging Face Hub")
    push.add_argument("--id", required=True, help="repository: OWNER/NAME or NAME")
    push.add_argument("--private", action="store_true", help="hide the repository from others")
    push.add_argument("--folder", type=parse_path, help="model to upload; default: only check")
    push.set_defaults(function=_push)
    _add_chat_options(commands.add_parser("chat", help="talk to a model on the terminal"))
    return parser


def _add_chat_options(chat: argparse.ArgumentParser) -> None:
    chat.add_argument("--model", required=True, help="folder or Hugging Face id")
    chat.add_argument("--system", help="system message")
    chat.add_argument("--temperature", type=float, default=1.0, help="sampling temperature")
    chat.add_argument("--max-completion-tokens", type=int, default=512)
    chat.add_argument("--seed", type=int, help="default: random")
    chat.add_argument("--thinking", action="store_true", help="let the model think")
    chat.add_argument("--env", help="target or address of an environment with tools")
    chat.add_argument("--env-options", default="{}", help="options for its constructor, as JSON")
    chat.add_argument("--token-env", default="", help="variable with the server's token")
    chat.add_argument("--max-calls", type=int, default=8, help="calls for each message")
    chat.set_defaults(function=_chat)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", required=True, help="model to evaluate")
    parser.add_argument("--baseline", action="append", default=[], help="fixed policy to play")
    parser.add_argument("--endpoint", help="OpenAI-compatible endpoint with the models")
    parser.add_argument("--token-env", default="", help="variable with the endpoint's token")
    parser.add_argument("--folder", type=parse_path, required=True, help="output folder")
    parser.add_argument(
        "--exact-completion-tokens",
        action="store_true",
        help="refuse a model whose context is too short for rollout.max_completion_tokens",
    )


def add_start_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide what happens to an existing run of the same name."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const=Resume.ALWAYS,
        default=Resume.NEVER,
        choices=[Resume.ALWAYS, Resume.AUTO],
        help="resume from the latest checkpoint; with =auto, start a new run if there is none",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run of the same name")


def _describe_error(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRORS and error.filename:
        return f"{describe_write_error(Path(error.filename), error)}; make room"
    return str(error)


def _report_error(error: Exception, exit_code: int) -> int:
    # Ray adds the traceback to the message of an error from an actor, but not to its cause.
    cause = getattr(error, "cause", None) or error
    message = "; ".join([_describe_error(cause), *getattr(error, "__notes__", [])])
    sys.stderr.write(f"{format_notice('error', message)}\n")
    return exit_code


if __name__ == "__main__":
    # A stop before the run has its own handlers must end what the run has started.
    # A shell ignores SIGINT for commands in the background, and they inherit that.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.default_int_handler)
    sys.exit(main())
