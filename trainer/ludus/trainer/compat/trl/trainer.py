"""TRL's GRPOTrainer, implemented with a Ludus run.

    model, processing_class  --> [model]                       objects are saved to a folder
    train_dataset            --> [environment] prompts_env     rows in a folder next to the run's
    rollout_func             --> environment.rollout           called in a rollout worker
    reward_funcs             --> environment.rewards
    args                     --> all other settings            run_settings.py

The run folder has the usual files, so `ludus report` and `ludus watch` work.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.paths import parse_path
from ludus.proto.runs import CHECKPOINTS_FOLDER, Resume, Summary
from ludus.trainer.compat.checks import run_coroutine
from ludus.trainer.compat.trl.callbacks import Callbacks
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.compat.trl.history import TrainerState, TrainOutput
from ludus.trainer.compat.trl.inputs import (
    ModelInput,
    ModelSection,
    PromptRows,
    make_model_section,
    make_reward_terms,
)
from ludus.trainer.compat.trl.rollout.arguments import sample_completions
from ludus.trainer.compat.trl.rollout.runner import ScriptRollout
from ludus.trainer.compat.trl.run_settings import (
    DEFAULT_OUTPUT_DIR,
    find_run_folder,
    make_batches,
    make_run_settings,
)
from ludus.trainer.compat.trl.tools import (
    TOOL_COLUMNS,
    EnvironmentFactories,
    ToolRollout,
    choose_rollout,
)
from ludus.trainer.core.functions import get_or_register_path
from ludus.trainer.core.option_names import use_option_names
from ludus.trainer.core.output import warn_user
from ludus.trainer.core.stopping import RunStopped
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.run.checkpoint import MODEL_FOLDER, find_newest_checkpoint

_MIN_SESSIONS = 4096
"""Minimum value of max_sessions; a batch of more episodes gets a session for each episode."""
_INPUT_SUFFIX = "-input"
"""Suffix of the folder with the objects that the script passed."""
_REMEDIES = {
    "reward_processing_classes": "a reward model brings its own tokenizer",
    "optimizers": "AdamW is the only optimizer; its settings are in GRPOConfig",
    "quantization_config": "pass a model that is not quantized",
}
"""Remedy for each argument that is not supported."""


class GRPOTrainer:
    """A trainer with TRL's interface; `train` runs the whole training."""

    def __init__(
        self,
        model: ModelInput | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[None, None] = (None, None),
        quantization_config: None = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: EnvironmentFactories | None = None,
        *,
        overrides: Sequence[str] = (),
    ) -> None:
        """Check the arguments; nothing is started yet.

        Args:
            model: a Hugging Face id or folder, a model, or the [model] section of a run.
            reward_funcs: a function, the id or folder of a reward model, or a list of these.
            train_dataset: rows with a `prompt` (text or messages) and the columns that rewards use.
            processing_class: the model's tokenizer. Default: the tokenizer in the model's folder.
            callbacks: instances or classes of `transformers.TrainerCallback`.
            peft_config: LoRA settings; r, lora_alpha and target_modules of `peft.LoraConfig`.
            tools: functions that completions may call.
            rollout_func: function that plays the episodes (docs/from-trl.md).
            environment_factory: function that returns an environment whose methods completions
                may call, or such functions by name, which column `environment` selects from.
            overrides: settings of the run in the form "section.field=value".
        """
        _refuse_arguments((reward_processing_classes, optimizers, quantization_config))
        self.args = _check_args(args) or GRPOConfig(f"{_make_default_name(model)}-GRPO")
        self._rows = PromptRows.read(train_dataset, "train_dataset")
        has_eval = eval_dataset is not None
        self._eval_rows = PromptRows.read(eval_dataset, "eval_dataset") if has_eval else None
        self._batches = make_batches(self.args, len(self._rows))
        folder = find_run_folder(self.args)
        self._input_folder = folder.with_name(folder.name + _INPUT_SUFFIX)
        model_section = make_model_section(
            model, processing_class, peft_config, self.args, self._input_folder / "model"
        )
        rollout = choose_rollout(rollout_func, tools, environment_factory, self.args)
        rewards = make_reward_terms(
            reward_funcs,
            self.args.reward_weights,
            self._find_columns(rollout),
            rollout.reward_name if isinstance(rollout, ToolRollout) else None,
        )
        self._config = self._make_run_config(model_section, rollout, rewards)
        self._overrides = tuple(overrides)
        self.run: LanguageModelRun = Trainer(self._config, overrides=self._overrides).run
        """The configuration of the run that `train` starts."""
        self.state = TrainerState.start(self.args, self._batches)
        self._callbacks = Callbacks(callbacks, self.args, self.state)
        self.summary: Summary | None = None
        """Final results of the run; None until it has ended."""

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train and return the results; the folder args.output_dir contains the run.

        As in TRL, an existing run is replaced unless it is resumed.

        Args:
            resume_from_checkpoint: True resumes from the latest checkpoint.

        Raises:
            UserError: the run cannot start as configured.
            LudusError: the run failed.
        """
        resume = resume_from_checkpoint or self.args.resume_from_checkpoint
        if resume is not None and not isinstance(resume, bool):
            raise ConfigError(
                f"resume_from_checkpoint = '{resume}' must be True: a run resumes from the newest "
                "checkpoint in its folder"
            )
        self.write_rows()
        names = use_option_names(
            resume="resume_from_checkpoint=True", overwrite="resume_from_checkpoint=False"
        )
        with names:
            return run_coroutine(self._train(Resume.ALWAYS if resume else Resume.NEVER))

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Copy the trained model and its tokenizer to a folder, and return the folder.

        The run folder has a config.json itself. A model for this folder goes to its subfolder
        `model`.

        Raises:
            CheckpointError: the run has no checkpoint yet.
        """
        folder = self.run.folder
        source_folder = find_newest_checkpoint(folder / CHECKPOINTS_FOLDER) / MODEL_FOLDER
        target_folder = parse_path(output_dir or folder)
        if target_folder.resolve() == folder.resolve():
            target_folder = folder / "model"
            if output_dir is not None:
                warn_user(f"the model is saved to '{target_folder}', not to the folder of the run")
        shutil.copytree(source_folder, target_folder, dirs_exist_ok=True)
        return target_folder

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"GRPOTrainer has no '{name}' here, because the model is trained in other processes; "
            "docs/from-trl.md lists the available attributes"
        )

    def _find_columns(self, rollout: Callable[..., Any]) -> dict[str, Set[str]]:
        """Return the columns of each data set, or nothing if a rollout function may add columns."""
        datasets = {"train_dataset": self._rows}
        if self._eval_rows is not None:
            datasets["eval_dataset"] = self._eval_rows
        if isinstance(rollout, ToolRollout):
            for name, rows in datasets.items():
                rollout.check_rows(rows.rows, name)
            return {name: rows.columns | TOOL_COLUMNS for name, rows in datasets.items()}
        if rollout is not sample_completions:
            return {}
        return {name: rows.columns for name, rows in datasets.items()}

    async def _train(self, resume: Resume) -> TrainOutput:
        trainer = Trainer(self._config, overrides=self._overrides, resume=resume, overwrite=True)
        callbacks, start_s = self._callbacks, time.monotonic()
        async with trainer:
            callbacks.call("on_train_begin")
            callbacks.call("on_step_begin")
            async for step in trainer.steps():
                self.state.add(step, self.args, self._batches)
                callbacks.call("on_step_end")
                callbacks.report_entries()
                if callbacks.has_stopped:
                    trainer.stop()
                    break
                callbacks.call("on_step_begin")
            with suppress(*([RunStopped] if callbacks.has_stopped else [])):
                self.summary = await trainer.train()
        output = self.state.finish(time.monotonic() - start_s)
        callbacks.report_entries()
        callbacks.call("on_train_end")
        return output

    def _make_run_config(
        self, model: ModelSection, rollout: Callable[..., Any], rewards: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the configuration of the run."""
        uses_tools, num_generations = isinstance(rollout, ToolRollout), self.args.num_generations
        max_tokens = model.find_max_tokens(self._rows.prompts, self.args, uses_tools=uses_tools)
        return {
            **make_run_settings(self.args, self._batches, max_tokens),
            "model": model.settings,
            "environment": {
                "package": "prompts_env",
                "options": self._make_environment_options(),
                "max_sessions": max(_MIN_SESSIONS, self._batches.num_groups * num_generations),
                "max_turns": 1,
                "rollout": f"trl:{get_or_register_path(ScriptRollout(rollout, self.args))}",
                "rewards": rewards,
            },
            "eval": self._make_eval_settings(),
        }

    def write_rows(self) -> None:
        """Write the data sets to the files from which the environment reads them."""
        self._rows.write(self._input_folder / "train.jsonl")
        if self._eval_rows is not None:
            self._eval_rows.write(self._input_folder / "eval.jsonl")

    def _make_environment_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "path": str((self._input_folder / "train.jsonl").absolute()),
            "seed": self.args.seed if self.args.data_seed is None else self.args.data_seed,
        }
        if self._eval_rows is not None:
            options["test_path"] = str((self._input_folder / "eval.jsonl").absolute())
        return options

    def _make_eval_settings(self) -> dict[str, Any]:
        args, rows = self.args, self._eval_rows
        strategy, batches = args.eval_strategy, self._batches
        if strategy != "no" and rows is None:
            raise ConfigError(
                f"GRPOConfig.eval_strategy = {strategy!r} needs an eval_dataset; pass one, or set "
                "it to 'no'"
            )
        num_games = len(rows) * (args.num_generations_eval or 1) if rows is not None else 1
        interval = batches.count_batches(args.eval_steps or args.logging_steps)
        if strategy == "epoch":
            interval = round(batches.num_batches_per_epoch) or interval
        return {
            "num_games": num_games,
            "max_games_per_task": None,
            "num_games_during": 0 if strategy == "no" else num_games,
            "every_steps": interval,
            "temperature": args.temperature,
        }


def _check_args(args: GRPOConfig | None) -> GRPOConfig | None:
    """Return `args`. TRL's own GRPOConfig is refused, because its fields are not checked."""
    if args is None or isinstance(args, GRPOConfig):
        return args
    args_type = type(args)
    raise ConfigError(
        f"args must be a ludus.trainer.compat.trl.GRPOConfig, but it is a "
        f"{args_type.__module__}.{args_type.__qualname__}; change the import of GRPOConfig too"
    )


def _make_default_name(model: Any) -> str:
    """Return TRL's default name of a run."""
    return model.rstrip("/").rpartition("/")[2] if isinstance(model, str) else DEFAULT_OUTPUT_DIR


def _refuse_arguments(arguments: tuple[Any, ...]) -> None:
    """Refuse the arguments in `_REMEDIES`, unless they are empty."""
    for (name, remedy), argument in zip(_REMEDIES.items(), arguments, strict=True):
        is_empty = isinstance(argument, (list, tuple)) and not any(argument)
        if argument is not None and not is_empty:
            raise ConfigError(f"GRPOTrainer({name}=...) is not supported; {remedy}")
