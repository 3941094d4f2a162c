"""`ludus chat`: a conversation with a model on the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import parse_path
from ludus.proto.runs import CONFIG_FILE
from ludus.services.cli.checkpoint_names import MODEL_FOLDER, find_kept_model
from ludus.services.cli.env_targets import require_options_only_for_targets
from ludus.services.cli.options import Options, TokenEnv, parse_options
from ludus.services.cli.run_names import split_run_step
from ludus.services.cli.trainer_process import build_trainer_command

_MAX_TEMPERATURE = 1000.0
_ToolLocation = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="TARGET|ADDRESS",
        help="Environment whose tools the model can call.",
        show_default="no tools",
    ),
]


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a model, a Hugging Face id, or RUN[@STEP]: a run's folder or its name "
            "in runs/, and a step, `latest` or `best`. Without a step, the latest checkpoint, or "
            "the model that a fine-tuning run kept.",
        ),
    ],
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message. Default: that of the chat template."),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            min=0,
            max=_MAX_TEMPERATURE,
            help="Sampling temperature; 0 selects the most likely token.",
        ),
    ] = 1.0,
    max_completion_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of tokens of an answer.")
    ] = 512,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the sampling.", show_default="random")
    ] = None,
    enables_thinking: Annotated[
        bool, typer.Option("--thinking", help="Let the model think, if its template supports it.")
    ] = False,
    location: _ToolLocation = None,
    options: Options = None,
    max_calls: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of calls for each message.")
    ] = 8,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
) -> None:
    """Talk to a model on the terminal; without a terminal, answer each line of standard input.

    The model is loaded with transformers, on the GPU if there is one.

    With `--env`, the model can call the tools of an environment, in one session for the whole
    conversation. A terminal shows calls and results dimmed; otherwise they go to standard error.

    Example: `ludus chat demo`

    Example: `ludus chat demo --env my_env:MyEnv`

    Example: `echo "What is 7 + 12?" | ludus chat demo@40 --temperature 0`
    """
    arguments = [f"--model={_find_model(model)}", f"--temperature={temperature}"]
    arguments += [f"--max-completion-tokens={max_completion_tokens}"]
    arguments += [] if system is None else [f"--system={system}"]
    arguments += [] if seed is None else [f"--seed={seed}"]
    arguments += ["--thinking"] if enables_thinking else []
    arguments += _make_tool_arguments(location, options or (), max_calls, token_env)
    # The trainer takes the place of this process, and with it the terminal and its signals.
    os.execv(sys.executable, build_trainer_command(["chat", *arguments]))


def _make_tool_arguments(
    location: str | None, options: Sequence[str], max_calls: int, token_env: str
) -> list[str]:
    """Return the trainer's arguments for an environment, which is checked first; [] without one.

    Raises:
        UserError: the target or an option is wrong.
    """
    if location is None:
        if options:
            raise ConfigError("--option is for the environment of --env, which is missing")
        return []
    from ludus.env.targets.targets import environment_factory

    environment_options = parse_options(options)
    require_options_only_for_targets(location, environment_options)
    if "://" not in location:
        environment_factory(location, environment_options)().close()
    arguments = [f"--env={location}", f"--env-options={json.dumps(environment_options)}"]
    return [*arguments, f"--max-calls={max_calls}", f"--token-env={token_env}"]


def _find_model(text: str) -> str:
    """Return the folder of a run's model, or the text if it names no run."""
    path = parse_path(text)
    if (path / CONFIG_FILE).is_file() and not _is_run(path):
        return text
    try:
        folder, checkpoint = split_run_step(text)
    except NotFoundError:
        if "@" in text:
            raise
        return text
    if checkpoint is None:
        return str(find_kept_model(folder) or folder)
    if not (checkpoint / MODEL_FOLDER).is_dir():
        raise ConfigError(f"'{checkpoint}' contains no language model; a network cannot chat")
    return str(checkpoint / MODEL_FOLDER)


def _is_run(path: Path) -> bool:
    from ludus.services.run_list import is_run_folder

    return is_run_folder(path)
