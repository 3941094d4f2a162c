"""`ludus export`: writes the trained model of a run to a folder, or uploads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home
from ludus.services.cli.console import get_stderr, get_stdout, print_line
from ludus.services.cli.new_folder import make_temporary_folder, write_new_folder
from ludus.services.cli.run_names import split_run_step
from ludus.services.cli.train_command import exit_on_failure, run_quietly


class Dtype(StrEnum):
    """Type of the weights of an exported model."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


RunCheckpoint = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]",
        help="Folder of a run, or its name in runs/, and a step, `latest` or `best`. Without a "
        "step, the latest checkpoint, or the model that a fine-tuning run kept.",
    ),
]
TargetFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FOLDER]",
        help="Folder to write; it must be empty or not exist. Required without --push-to-hub.",
        callback=expand_home,
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="Type of the weights.", show_default="type of the original model"),
]
Repository = Annotated[
    str | None,
    typer.Option(
        "--push-to-hub",
        metavar="ID",
        help="Upload the model to the Hugging Face Hub under this id, OWNER/NAME or NAME. "
        "Needs HF_TOKEN or a login with `hf auth login`.",
    ),
]
PrivateFlag = Annotated[
    bool, typer.Option("--private", help="Create a private repository on the Hub.")
]


def export(
    run: RunCheckpoint,
    folder: TargetFolder = None,
    dtype: DtypeOption = None,
    repository: Repository = None,
    is_private: PrivateFlag = False,
) -> None:
    """Write the trained model of a run to a folder that transformers and vLLM load.

    The folder contains the weights, the tokenizer, the chat template, the generation settings, and
    a model card with the run's results. LoRA adapters are merged into the weights. With
    --push-to-hub, these files are uploaded; without FOLDER, they are not kept here.

    Example: `ludus export demo demo-model`

    Example: `ludus export demo@best demo-model --dtype float32`

    Example: `ludus export demo@best --push-to-hub me/demo-model --private`
    """
    if folder is None and repository is None:
        raise ConfigError("the model needs a place; name a FOLDER, or add --push-to-hub ID")
    if is_private and repository is None:
        raise ConfigError("--private is for an upload; add --push-to-hub ID, or remove it")
    run_folder, checkpoint = split_run_step(run)
    arguments = ["export", "--run", str(run_folder)]
    arguments += [] if checkpoint is None else ["--checkpoint", str(checkpoint.absolute())]
    arguments += [] if dtype is None else ["--dtype", dtype]
    repository_id = ""
    with _open_folder(folder, run_folder) as new_folder:
        if repository is not None:
            options = ["--id", repository, *(["--private"] if is_private else [])]
            repository_id = _push("checking the Hugging Face Hub", options, run_folder)
        arguments += ["--folder", str(new_folder.absolute())]
        end = run_quietly("exporting the model", arguments)
        exit_on_failure(end, run_folder, "nothing was written")
        if folder is None:
            _upload(new_folder, repository_id, run_folder)
    if folder is not None:
        print_line(get_stdout(), str(folder))
        if repository_id:
            _upload(folder, repository_id, run_folder, is_kept=True)
    path = str(folder) if folder is not None and folder.is_absolute() else f"./{folder}"
    _print_uses(repository_id or path)


@contextmanager
def _open_folder(folder: Path | None, run_folder: Path) -> Iterator[Path]:
    """Yield the folder for the model's files: a temporary one on the disk of the runs for None.

    Raises:
        ConfigError: the folder contains files, or cannot be written.
    """
    if folder is not None:
        with write_new_folder(folder) as (new_folder, _):
            yield new_folder
        return
    try:
        with make_temporary_folder(run_folder) as temporary_folder:
            yield temporary_folder
    except OSError as error:
        raise ConfigError(
            f"the model cannot be written to '{run_folder.parent}': {error.strerror or error}; "
            "name a FOLDER on another disk"
        ) from error


def _push(activity: str, options: list[str], run_folder: Path) -> str:
    """Let the trainer check a repository or upload a model; return the line that it prints."""
    end = run_quietly(activity, ["push", *options])
    exit_on_failure(end, run_folder, "nothing was uploaded")
    return end.output.last_lines[-1]


def _upload(folder: Path, repository_id: str, run_folder: Path, *, is_kept: bool = False) -> None:
    """Upload a model and print the address of its page."""
    options = ["--id", repository_id, "--folder", str(folder.absolute())]
    try:
        address = _push("uploading the model", options, run_folder)
    except typer.Exit:
        if is_kept:
            advice = f"the model is in {folder}; upload it: hf upload {repository_id} {folder}"
            print_line(get_stderr(), advice)
        raise
    print_line(get_stdout(), address)


def _print_uses(path: str) -> None:
    """Print the next commands with an exported model.

    Args:
        path: path of its folder, or its Hugging Face id.
    """
    console = get_stdout()
    print_line(console, f"serve it    vllm serve {path}", "dim")
    print_line(console, f'train more  model = {{kind = "pretrained", path = "{path}"}}', "dim")
