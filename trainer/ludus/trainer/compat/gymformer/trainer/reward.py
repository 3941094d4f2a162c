"""`train_reward`, Gymformer's function that trains a reward model on preferences."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from ludus.proto.config import RewardModelRun, load_reward_model_config
from ludus.proto.errors import ConfigError
from ludus.proto.reward_models import RewardModelProgress
from ludus.proto.runs import Resume
from ludus.trainer.compat.checks import PathText, check_value, rename_in_errors, require_device
from ludus.trainer.core.option_names import use_option_names
from ludus.trainer.reward_model import RewardModel, train_reward_model
from ludus.trainer.reward_model.training import check_training

_ARGUMENT_BY_SETTING = dict(model="model_name", data="datasets_path", output="reward_model_path")
"""Arguments of `train_reward` by the name of their setting."""


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
    """Train a reward model on comparisons, write it with metrics.json, and return it.

    A reward model that already exists in the folder is replaced.

    Args:
        model_name: Hugging Face id or folder of a causal language model of any family.
        datasets_path: file or folder of comparisons (docs/reward-models.md).
        reward_model_path: folder to write.
        test_size: share of the comparisons that is held out for testing.
        batch_size: number of comparisons per step.
        learning_rate: highest learning rate, reached after `warmup_steps`; then it falls to 0.
        device: name of a torch device; None uses a GPU if there is one.
        dry_run: whether to check the model and the data only, and return None.
        resume_checkpoint: the latest checkpoint of a stopped training with the same
            `reward_model_path`, or a folder that contains it; None starts a new training.
        freeze_backbone: whether to train only the head.
    """
    config = load_reward_model_config(
        {
            "model": check_value("model_name", PathText, model_name),
            "data": check_value("datasets_path", PathText, datasets_path),
            "output": check_value("reward_model_path", PathText, reward_model_path),
            "test_size": test_size,
            "batch_size": batch_size,
            "epochs": epochs,
            "warmup_steps": warmup_steps,
            "weight_decay": weight_decay,
            "learning_rate": learning_rate,
            "device": require_device(device),
            "seed": seed,
            "freeze_backbone": freeze_backbone,
        }
    )
    check_value("dry_run", bool, dry_run)
    checkpoint = check_value("resume_checkpoint", PathText | None, resume_checkpoint)
    with rename_in_errors(_ARGUMENT_BY_SETTING), _use_option_names(config):
        if not dry_run:
            resume = _check_checkpoint(config, checkpoint)
            return train_reward_model(config, resume=resume, overwrite=True, on_progress=_report)[0]
        num_train, num_test = check_training(config, overwrite=True)
    sys.stderr.write(
        f"{num_train} training comparisons, {num_test} held out; nothing was written\n"
    )
    return None


def _use_option_names(config: RewardModelRun) -> AbstractContextManager[None]:
    """Return a context in which advice names the arguments of `train_reward`."""
    return use_option_names(
        resume=f"resume_checkpoint='{config.folder}'", overwrite="resume_checkpoint=None"
    )


def _check_checkpoint(config: RewardModelRun, checkpoint: str | None) -> Resume:
    if checkpoint is None:
        return Resume.NEVER
    path = Path(checkpoint).absolute()
    if path != config.output.absolute() and not path.is_relative_to(config.folder):
        raise ConfigError(
            f"resume_checkpoint = '{path}' is not a checkpoint of reward_model_path = "
            f"'{config.output}'; set it to '{config.folder}', or change reward_model_path"
        )
    return Resume.ALWAYS


def _report(progress: RewardModelProgress) -> None:
    epoch = progress.finished
    if epoch is None:
        return
    line = f"epoch {epoch.epoch}/{progress.num_epochs}: loss {epoch.train_loss:.4f}"
    if epoch.test is not None:
        line += (
            f"; held out: loss {epoch.test.loss:.4f}, accuracy {epoch.test.accuracy:.4f}, "
            f"MRR {epoch.test.mrr:.4f}"
        )
    sys.stderr.write(f"{line}\n")
