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
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ludus.proto.config import (
    LanguageModelRun,
    PretrainedModel,
    SftRun,
    validate_recorded_run_json,
)
from ludus.proto.errors import ConfigError, NotFoundError, UserError
from ludus.proto.runs import CHECKPOINTS_FOLDER, CONFIG_FILE
from ludus.trainer.core.output import warn_user
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
        checkpoint: checkpoint in the run, by name or path. None takes the fine-tuned model of a run
            of `ludus sft`, and otherwise the latest checkpoint.
        dtype: "bfloat16", "float16" or "float32"; None takes that of the original model.

    Raises:
        UserError: the run has no model, or its checkpoint is damaged.
    """
    run = _read_run(run_folder)
    source = _find_source(run_folder, run, checkpoint)
    new_dtype = _find_original_dtype(run) if dtype is None else _DTYPES[dtype]
    for path in source.folder.iterdir():
        is_weights = path.match(_WEIGHT_PATTERN) or path.name == SAFE_WEIGHTS_INDEX_NAME
        is_other_network = path.suffix == ".safetensors" and not is_weights  # such as a value head
        if path.is_file() and not is_other_network and not (is_weights and new_dtype):
            shutil.copyfile(path, folder / path.name)
    if new_dtype is not None:
        config = load.load_config(source.folder)
        config.dtype = new_dtype
        config.save_pretrained(folder)
        _convert_weights(source.folder, new_dtype, folder)
    (folder / CARD_FILE).write_text(write_card(run, run_folder, source.step), encoding="utf-8")


def _read_run(run_folder: Path) -> LanguageModelRun | SftRun:
    try:
        run = validate_recorded_run_json((run_folder / CONFIG_FILE).read_bytes())
    except FileNotFoundError:
        raise NotFoundError(
            f"'{run_folder}' is no run folder, because it has no {CONFIG_FILE}; `ludus runs` lists "
            "the runs"
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
    if not (folder / load.MODEL_CONFIG_FILE).is_file():
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


def _convert_weights(source: Path, dtype: torch.dtype, folder: Path) -> None:
    """Write the weights of `source` to `folder`, with floating-point numbers as `dtype`."""
    files = {}
    shapes = {}
    for path in sorted(source.glob(_WEIGHT_PATTERN)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                files[name] = path
                shape = file.get_slice(name).get_shape()
                shapes[name] = torch.empty(shape, dtype=dtype, device="meta")
    plan = split_torch_state_dict_into_shards(shapes)
    for file_name, names in plan.filename_to_tensors.items():
        tensors = {name: _read_tensor(files[name], name, dtype) for name in names}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _read_tensor(path: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
