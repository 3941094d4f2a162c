"""`ludus export`: writes the trained model of a run to a separate folder."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ludus.services.cli.console import get_stdout, print_line
from ludus.services.cli.new_folder import Folder, write_new_folder
from ludus.services.cli.run_names import split_run_step
from ludus.services.cli.train_command import exit_on_failure, run_quietly


class Dtype(StrEnum):
    """Type of the weights of an exported model."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="Folder of a run, or its name in runs/, and a step, `latest` or `best`. Without a "
            "step, the latest checkpoint, or the model that a fine-tuning run kept.",
        ),
    ],
    folder: Folder,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Type of the weights.", show_default="type of the original model"),
    ] = None,
) -> None:
    """Write the trained model of a run to a folder that transformers and vLLM load.

    The folder contains the weights, the tokenizer, the chat template, the generation settings, and
    a model card with the run's results. LoRA adapters are merged into the weights.

    Example: `ludus export demo demo-model`

    Example: `ludus export demo@best demo-model --dtype float32`
    """
    run_folder, checkpoint = split_run_step(run)
    with write_new_folder(folder) as (new_folder, _):
        arguments = ["export", "--run", str(run_folder), "--folder", str(new_folder.absolute())]
        arguments += [] if checkpoint is None else ["--checkpoint", str(checkpoint.absolute())]
        arguments += [] if dtype is None else ["--dtype", dtype]
        end = run_quietly("exporting the model", arguments)
        exit_on_failure(end, run_folder, "nothing was written")
    console, path = get_stdout(), folder if folder.is_absolute() else f"./{folder}"
    print_line(console, str(folder))
    print_line(console, f"serve it    vllm serve {path}", "dim")
    print_line(console, f'train more  model = {{kind = "pretrained", path = "{path}"}}', "dim")
