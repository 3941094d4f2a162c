"""The folder of a run with checkpoints of a small model, made without training."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from ludus.proto.config import LanguageModelRun, PretrainedModel
from ludus.proto.runs import Summary
from ludus.trainer.core.types import SavedFile
from ludus.trainer.run.checkpoint import MODEL_FOLDER, CheckpointFolder, SavedState
from tests.learner.tiny_policy import make_policy_folder
from tests.report.synthetic_run import build_summary

STEPS = (2, 4)
"""Steps of the checkpoints."""


def make_original_model(folder: Path) -> Path:
    """Write a random model in bfloat16 and return its folder."""
    make_policy_folder(folder / "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "float32")
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "float32")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def make_trained_run(original: Path, folder: Path) -> Path:
    """Write a run with checkpoints in float32, trained from `original`; return its folder."""
    folder.mkdir(parents=True)
    run = make_run(PretrainedModel(path=str(original)))
    (folder / "config.json").write_text(run.model_dump_json())
    (folder / "summary.json").write_text(make_summary().model_dump_json())
    for step in STEPS:
        asyncio.run(save_checkpoint(folder / "checkpoints", original, step))
    return folder


def make_run(model: PretrainedModel) -> LanguageModelRun:
    return LanguageModelRun.model_validate(
        {"name": "demo", "model": model.model_dump(), "training": {"num_steps": STEPS[-1]}}
    )


def make_summary() -> Summary:
    return build_summary().model_copy(update={"num_steps": STEPS[-1]})


async def save_checkpoint(checkpoints: Path, original: Path, step: int) -> None:
    """Save `original` in float32 with all weights multiplied by `step`."""
    folder = CheckpointFolder(checkpoints, num_kept=9)
    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(step * (1 + 2**-12))  # not representable in bfloat16
    with folder.prepare(step) as new_folder:
        model.save_pretrained(new_folder / MODEL_FOLDER)
        tokenizer = transformers.AutoTokenizer.from_pretrained(original)
        tokenizer.save_pretrained(new_folder / MODEL_FOLDER)
        # A file of the learner alone.
        save_file({"bias": torch.zeros(1)}, new_folder / MODEL_FOLDER / "value_head.safetensors")
        paths = [path for path in new_folder.rglob("*") if path.is_file()]
        await folder.commit(new_folder, SavedState(step=step), map(SavedFile.from_path, paths))
