"""The model of a run as a separate folder, for other programs and for sharing.

    RUN/checkpoints/step-N/model or RUN/model
        --copy--> tokenizer, chat template, generation settings
        --convert--> config.json and weights, in the dtype of the original model
        + README.md, the model card

Weights are read and written one file of at most 5 GB at a time, so a large model needs little
memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ludus.proto.config import (
    LanguageModelRun,
    PretrainedModel,
    SftRun,
    validate_recorded_run_json,
)
from ludus.proto.errors import CheckpointError, ConfigError, NotFoundError, UserError
from ludus.proto.runs import CHECKPOINTS_FOLDER, CONFIG_FILE
from ludus.trainer.core.model_paths import MODEL_CONFIG_FILE
from ludus.trainer.core.output import describe_write_error, warn_user
from ludus.trainer.models import load
from ludus.trainer.run.checkpoint import MODEL_FOLDER, find_checkpoint, parse_checkpoint_step
from ludus.trainer.setup.model_card import CARD_FILE, write_card

_WEIGHT_PATTERN = "model*.safetensors"
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class _Source:
    """The model to export."""

    folder: Path
    step: int | None
    """Step of the weights; None for the model of a fine-tuning run, which chooses the step."""


def export_model(
    run_folder: Path, checkpoint: Path | None, dtype: str | None, folder: Path
) -> None:
    """Write the model of a run to an empty folder, with a model card.

    Args:
        checkpoint: checkpoint of the run. None takes the fine-tuned model of a run of `ludus sft`,
            and otherwise the latest checkpoint.
        dtype: "bfloat16", "float16" or "float32"; None takes that of the original model.

    Raises:
        UserError: the run has no model, or its checkpoint is damaged.
    """
    run = _read_run(run_folder)
    source = _find_source(run_folder, run, checkpoint)
    new_dtype = _find_original_dtype(run) if dtype is None else _DTYPES[dtype]
    try:
        paths = list(source.folder.iterdir())
        _copy_files(paths, folder, includes_weights=new_dtype is None)
        if new_dtype is not None:
            config = load.load_config(source.folder)
            config.dtype = new_dtype
            config.save_pretrained(folder)
            weight_paths = sorted(path for path in paths if path.match(_WEIGHT_PATTERN))
            _convert_weights(weight_paths, new_dtype, folder)
        card = write_card(run, run_folder, source.step)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model in '{source.folder}' cannot be exported; "
            f"{describe_write_error(folder, error)}"
        ) from error
    if not all(path.exists() for path in paths):
        raise CheckpointError(
            f"the model in '{source.folder}' was replaced or removed while it was exported; try "
            "again, or choose another step with RUN@STEP"
        )


def _copy_files(paths: Sequence[Path], folder: Path, *, includes_weights: bool) -> None:
    """Copy the files of a model, without networks of the learner such as a value head."""
    for path in paths:
        is_weights = path.match(_WEIGHT_PATTERN) or path.name == SAFE_WEIGHTS_INDEX_NAME
        is_copied = includes_weights if is_weights else path.suffix != ".safetensors"
        if is_copied and not path.is_dir():
            shutil.copyfile(path, folder / path.name)


def _read_run(run_folder: Path) -> LanguageModelRun | SftRun:
    try:
        run = validate_recorded_run_json((run_folder / CONFIG_FILE).read_bytes())
    except FileNotFoundError:
        raise NotFoundError(
            f"'{run_folder}' is not a run folder, because it has no {CONFIG_FILE}; `ludus runs` "
            "lists the runs"
        ) from None
    except ValueError as error:
        raise ConfigError(f"'{run_folder / CONFIG_FILE}' cannot be read: {error}") from error
    if not isinstance(run, (LanguageModelRun, SftRun)):
        raise ConfigError(
            f"'{run_folder}' trains a network, which other programs cannot load as a language "
            "model; its checkpoints contain the agent"
        )
    return run


def _find_source(
    run_folder: Path, run: LanguageModelRun | SftRun, checkpoint: Path | None
) -> _Source:
    if isinstance(run, SftRun) and checkpoint is None:
        folder = run_folder / MODEL_FOLDER
        if folder.is_dir():
            return _Source(folder, None)
    found_checkpoint = find_checkpoint(checkpoint, run_folder / CHECKPOINTS_FOLDER)
    folder = found_checkpoint / MODEL_FOLDER
    if not (folder / MODEL_CONFIG_FILE).is_file():
        raise NotFoundError(f"'{found_checkpoint}' contains no model")
    return _Source(folder, parse_checkpoint_step(found_checkpoint))


def _find_original_dtype(run: LanguageModelRun | SftRun) -> torch.dtype | None:
    """Return the dtype of the original model's weights; None keeps that of the checkpoint."""
    if not isinstance(run.model, PretrainedModel):
        return None
    try:
        dtype = load.load_config(run.model.path).dtype
    except UserError:
        warn_user(
            f"the original model '{run.model.path}' cannot be read, so the weights keep the dtype "
            "of the checkpoint; choose another one with --dtype"
        )
        return None
    return dtype if isinstance(dtype, torch.dtype) else None


def _convert_weights(paths: Sequence[Path], dtype: torch.dtype, folder: Path) -> None:
    """Write the weights of the files to `folder`, with floating-point numbers as `dtype`."""
    with ExitStack() as stack:
        # The files stay open, so that all weights are of the same model.
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        file_of_name = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        plan = split_torch_state_dict_into_shards(
            {
                name: torch.empty(file.get_slice(name).get_shape(), dtype=dtype, device="meta")
                for name, file in file_of_name.items()
            }
        )
        for file_name, names in plan.filename_to_tensors.items():
            tensors = {name: file_of_name[name].get_tensor(name) for name in names}
            tensors = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
            }
            save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
