"""`train_reward`: a reward model of preferences, in one call."""

from __future__ import annotations

import sys
from pathlib import Path

from ludus.proto.config import RewardModelConfig, load_reward_model_config
from ludus.proto.reward_models import RewardModelEpoch, RewardModelProgress
from ludus.trainer.compat.gymformer.arguments import check_flag, device_in, path_in, told_as
from ludus.trainer.reward_model import RewardModel, train_reward_model
from ludus.trainer.reward_model.training import check_training

_NAMES = {"model": "model_name", "data": "datasets_path", "output": "reward_model_path"}
"""Of the configuration's settings, as the call names them."""


def train_reward(
    model_name: str,
    datasets_path: str | Path,
    reward_model_path: str | Path,
    test_size: float = 0.2,
    batch_size: int = 32,
    epochs: int = 100,
    warmup_steps: int = 500,
    weight_decay: float = 0.01,
    learning_rate: float = 1e-5,
    device: str | None = None,
    seed: int = 42,
    dry_run: bool = False,
    resume_checkpoint: str | Path | None = None,
    freeze_backbone: bool = False,
) -> RewardModel | None:
    """The reward model, trained on what people prefer; its folder is written, with metrics.json.

    All of the model learns, unless `freeze_backbone` is set. A reward model that is in the folder
    already is replaced.

    Args:
        model_name: Hugging Face id or folder of a causal language model of any family.
        datasets_path: comparisons (docs/reward-models.md).
        reward_model_path: folder to write.
        test_size: share of the comparisons that is held out; a step takes `batch_size` of them.
        learning_rate: its peak, after `warmup_steps`; from there it falls to 0.
        device: None takes a GPU where there is one.
        seed: fixes all that is random.
        dry_run: only looks at model and data, and returns None.
        resume_checkpoint: a checkpoint to continue from, or the folder that holds it.
        freeze_backbone: trains the head alone.

    Raises:
        UserError: model or data are not as expected; the row is named.
    """
    config = load_reward_model_config(
        {
            "model": path_in("model_name", model_name),
            "data": path_in("datasets_path", datasets_path),
            "output": path_in("reward_model_path", reward_model_path),
            "test_size": test_size,
            "batch_size": batch_size,
            "epochs": epochs,
            "warmup_steps": warmup_steps,
            "weight_decay": weight_decay,
            "learning_rate": learning_rate,
            "device": device_in("device", device),
            "seed": seed,
            "freeze_backbone": freeze_backbone,
        }
    )
    check_flag("dry_run", dry_run)
    with told_as(_NAMES):
        if not dry_run:
            return _trained(config, resume_checkpoint)
        _look_at(config)
        return None


def _trained(config: RewardModelConfig, resume_checkpoint: str | Path | None) -> RewardModel:
    resume = None
    if resume_checkpoint is not None:
        resume = Path(path_in("resume_checkpoint", resume_checkpoint))
    model, _ = train_reward_model(config, resume=resume, overwrite=True, on_progress=_tell)
    return model


def _look_at(config: RewardModelConfig) -> None:
    num_train, num_test = check_training(config, overwrite=True)
    _say(f"{num_train} training comparisons, {num_test} held out; nothing was written")


def _tell(progress: RewardModelProgress) -> None:
    if progress.finished is not None:
        _say(_in_words(progress.finished, progress.num_epochs))


def _in_words(epoch: RewardModelEpoch, num_epochs: int) -> str:
    words = f"epoch {epoch.epoch}/{num_epochs}: loss {epoch.train_loss:.4f}"
    if epoch.test is None:
        return words
    test = epoch.test
    return (
        f"{words}; held out: loss {test.loss:.4f}, accuracy {test.accuracy:.4f}, MRR {test.mrr:.4f}"
    )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
