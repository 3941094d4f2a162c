"""Conversion of a GRPOConfig into the configuration of a run.

    rows of an optimizer step    R = per_device_train_batch_size * gradient_accumulation_steps
    rows of a generation batch   B = generation_batch_size
    groups of a batch            max(B, R) / num_generations
    optimizer steps of a pass    max(B, R) / R                      learner.num_minibatches
    passes over a batch          num_iterations                     learner.update_epochs

TRL counts optimizer steps, a run counts batches, and `Batches` converts between them. As in TRL,
all episodes are sampled with the newest weights (training.max_staleness = 0).
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from ludus.proto.config import RolloutConfig
from ludus.proto.config.section import MAX_VLLM_TEMPERATURE, RUN_NAME_PATTERN
from ludus.proto.errors import ConfigError
from ludus.proto.paths import parse_path
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.rollout.engines.vllm_process import is_vllm_installed

DEFAULT_OUTPUT_DIR = "trainer_output"
_LOCAL_HOSTS = ("0.0.0.0", "127.0.0.1", "localhost")
_KEEP_ALL_CHECKPOINTS = 1_000_000
_AGGREGATION_BY_LOSS = {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant"}


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a run, derived from TRL's rows, prompts and steps."""

    num_groups: int
    """Number of groups of a batch."""
    num_minibatches: int
    """Number of optimizer steps of one pass over a batch."""
    num_steps: int
    """Number of batches of the run."""
    num_prompts: int
    """Number of prompts of the data set."""
    num_passes: int = 1
    """Number of passes over each batch."""

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps of a batch."""
        return self.num_minibatches * self.num_passes

    @property
    def num_optimizer_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return self.num_steps * self.num_updates

    @property
    def num_batches_per_epoch(self) -> float:
        """Number of batches that contain every prompt once."""
        return self.num_prompts / self.num_groups

    def count_batches(self, steps_or_share: float) -> int:
        """Convert optimizer steps, or a share below 1 of all steps, to at least one batch."""
        num_steps = steps_or_share * (self.num_optimizer_steps if steps_or_share < 1 else 1)
        return max(1, round(num_steps / self.num_updates))


def make_batches(args: GRPOConfig, num_prompts: int) -> Batches:
    """Return the batches of a run that trains on `num_prompts` prompts."""
    group_size = args.num_generations
    num_step_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    num_rows = max(_count_generation_rows(args), num_step_rows)
    if (
        num_rows % num_step_rows
        or num_rows % group_size
        or (num_rows // group_size) % (num_rows // num_step_rows)
    ):
        raise ConfigError(
            f"a generation batch of {num_rows} rows must contain whole optimizer steps of "
            f"per_device_train_batch_size * gradient_accumulation_steps = {num_step_rows} rows, "
            f"each with whole groups of num_generations = {group_size}; set "
            f"gradient_accumulation_steps or generation_batch_size to a multiple of {group_size}"
        )
    num_groups, num_minibatches = num_rows // group_size, num_rows // num_step_rows
    if args.max_steps > 0:
        num_steps = math.ceil(args.max_steps / (num_minibatches * args.num_iterations))
    else:
        # As in TRL, remaining rows that fill no batch are not trained on.
        num_steps = math.floor(args.num_train_epochs * num_prompts / num_groups + 1e-9)
    if num_steps < 1:
        raise ConfigError(
            f"expected at least {num_groups} prompts, a generation batch of {num_rows} rows / "
            f"num_generations = {group_size}, got {num_prompts} for num_train_epochs = "
            f"{args.num_train_epochs:g}; add rows, or lower the batch"
        )
    return Batches(num_groups, num_minibatches, num_steps, num_prompts, args.num_iterations)


def make_run_settings(args: GRPOConfig, batches: Batches, max_tokens: int) -> dict[str, Any]:
    """Return the sections of a run, except its environment and model.

    Args:
        max_tokens: maximum number of tokens of a prompt and its completion together.
    """
    folder = find_run_folder(args)
    _check_intervals(args)
    _check_lengths(args, max_tokens)
    _check_engine(args)
    rollout = _make_rollout(args, batches, max_tokens)
    correction = _choose_correction(args, RolloutConfig(**rollout))
    return {
        "name": folder.name,
        "output_dir": str(folder.parent),
        "seed": args.seed,
        "generator": _make_generator(args),
        "rollout": rollout,
        "algorithm": _make_algorithm(args, correction),
        "learner": _make_learner(args, batches),
        "training": _make_training(args, batches),
        "metrics": _make_metrics(args),
    }


def find_run_folder(args: GRPOConfig) -> Path:
    """Return the run folder that `output_dir` names."""
    folder = parse_path(args.output_dir or DEFAULT_OUTPUT_DIR)
    if not re.fullmatch(RUN_NAME_PATTERN, folder.name):
        raise ConfigError(
            f"GRPOConfig.output_dir = '{args.output_dir}': its last part is the name of the run, "
            "expected up to 47 letters, digits, '.', '_' and '-', of which the first is a letter "
            "or a digit; rename it"
        )
    return folder


def _find_server_port(args: GRPOConfig) -> int | None:
    """Return the port of POST /generate/; None if TRL would not use a server."""
    if not args.use_vllm or args.vllm_mode == "colocate":
        return None
    host, port = args.vllm_server_host, args.vllm_server_port
    url = args.vllm_server_base_url
    if url is not None:
        try:
            host, port = urlsplit(url).hostname, urlsplit(url).port or port
        except ValueError as error:
            raise ConfigError(f"GRPOConfig.vllm_server_base_url = '{url}': {error}") from None
    if host not in _LOCAL_HOSTS:
        raise ConfigError(
            f"GRPOConfig.vllm_server_host = {host!r} is not supported, expected one of "
            f"{list(_LOCAL_HOSTS)}, because each rollout worker serves its own machine; remove it"
        )
    return int(port)


def _count_generation_rows(args: GRPOConfig) -> int:
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        raise ConfigError(
            "GRPOConfig has generation_batch_size and steps_per_generation, which exclude each "
            "other; remove one of them"
        )
    num_device_rows = args.per_device_train_batch_size
    num_rows = args.generation_batch_size
    if num_rows is None:
        return int(
            num_device_rows * (args.steps_per_generation or args.gradient_accumulation_steps)
        )
    if num_rows % num_device_rows:
        raise ConfigError(
            f"GRPOConfig.generation_batch_size = {num_rows} must be a multiple of "
            f"per_device_train_batch_size = {num_device_rows}; change it"
        )
    return int(num_rows)


def _make_generator(args: GRPOConfig) -> dict[str, Any]:
    if args.use_vllm and not is_vllm_installed():
        sys.stderr.write(
            "note: GRPOConfig.use_vllm = True, and vLLM is not installed: rollout workers sample "
            "with transformers\n"
        )
    if not args.use_vllm or not is_vllm_installed():
        return {"kind": "transformers"}
    return {
        "kind": "vllm",
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
    }


def _make_rollout(args: GRPOConfig, batches: Batches, max_tokens: int) -> dict[str, Any]:
    return {
        "group_size": args.num_generations,
        "group_seed": "shared",
        "num_groups_in_flight": batches.num_groups,
        "num_gpus_per_worker": _choose_num_gpus(args) * (args.vllm_tensor_parallel_size or 1),
        "temperature": args.temperature,
        "top_p": 1.0 if args.top_p is None else args.top_p,
        "top_k": max(args.top_k or 0, 0),
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_completion_tokens": args.max_completion_length,
        "overlong": "mask" if args.mask_truncated_completions else "train",
        "max_tokens": max_tokens,
        "generate_port": _find_server_port(args),
    }


def _make_algorithm(args: GRPOConfig, correction: dict[str, Any]) -> dict[str, Any]:
    loss, aggregation = _make_loss(args)
    return {
        "kind": "grpo",
        "baseline": "mean",
        "scale": {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards),
        "credit": "episode",
        "zero_variance_groups": "keep",
        "loss": loss,
        "aggregation": aggregation,
        "correction": correction,
        "geometric_mask": None,
        "old_logprobs": "recompute",
        "entropy_coef": args.entropy_coef,
        "entropy_control": _make_entropy_control(args),
        "kl_coef": args.beta,
        # TRL weights k3 by the ratio by default. Its expected gradient is then the gradient of the
        # divergence, as with k2. Without the weight, it is plain k3.
        "kl_estimator": "k2" if args.use_bias_correction_kl else "k3",
    }


def _make_entropy_control(args: GRPOConfig) -> dict[str, float] | None:
    if not args.use_adaptive_entropy:
        return None
    return {
        "target": args.entropy_target,
        "change": args.entropy_coef_delta,
        "min_coef": args.entropy_coef_min,
        "max_coef": args.entropy_coef_max,
    }


def _make_loss(args: GRPOConfig) -> tuple[dict[str, Any], str]:
    """Return the loss and its aggregation."""
    clip_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    ratio_level = args.importance_sampling_level
    if args.loss_type == "cispo":
        if ratio_level == "sequence" or args.delta is not None:
            raise ConfigError(
                "GRPOConfig.loss_type = 'cispo' needs importance_sampling_level = 'token' and "
                f"delta = None, got {ratio_level!r} and {args.delta}; remove both, or use another "
                "loss_type"
            )
        loss = {"kind": "cispo", "clip_low": 1.0, "clip_high": max(clip_high - 1, 1e-9)}
        return loss, "token_mean"
    aggregation = _AGGREGATION_BY_LOSS[args.loss_type]
    clip_range = {"clip_low": args.epsilon, "clip_high": clip_high}
    if ratio_level == "token":
        return {"kind": "clip", **clip_range, "dual_clip": args.delta}, aggregation
    if aggregation != "sequence_mean" or args.delta is not None:
        raise ConfigError(
            "GRPOConfig.importance_sampling_level = 'sequence' has one ratio per sequence "
            f"and needs loss_type = 'grpo' and delta = None, got {args.loss_type!r} and "
            f"{args.delta}; set both"
        )
    return {"kind": "gspo", **clip_range}, aggregation


def _make_learner(args: GRPOConfig, batches: Batches) -> dict[str, Any]:
    num_warmup_steps = args.warmup_steps if args.lr_scheduler_type != "constant" else 0
    if 0 < num_warmup_steps < 1:
        num_warmup_steps = math.ceil(num_warmup_steps * batches.num_optimizer_steps)
    if args.learning_rate * args.weight_decay >= 1:
        raise ConfigError(
            f"GRPOConfig.weight_decay = {args.weight_decay:g} times learning_rate = "
            f"{args.learning_rate:g} is the share by which each step reduces every weight, and "
            "must be below 1; lower weight_decay, which is usually 0 to 0.1"
        )
    uses_bfloat16 = args.bf16 if args.bf16 is not None else _has_gpu(args)
    return {
        "learning_rate": args.learning_rate,
        "schedule": args.lr_scheduler_type.removesuffix("_with_warmup"),
        "learning_rate_final": 0.0,
        "warmup_steps": math.ceil(num_warmup_steps / batches.num_updates),
        "weight_decay": args.weight_decay,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "max_grad_norm": args.max_grad_norm,
        "num_minibatches": batches.num_minibatches,
        "update_epochs": batches.num_passes,
        "num_gpus_per_rank": _choose_num_gpus(args),
        "dtype": "bfloat16" if uses_bfloat16 else "float32",
        "activation_checkpointing": args.gradient_checkpointing,
        "compile": args.torch_compile,
    }


def _make_training(args: GRPOConfig, batches: Batches) -> dict[str, Any]:
    interval_by_strategy = {
        # Only the checkpoint at the end of training is written.
        "no": batches.num_steps + 1,
        "epoch": max(1, round(batches.num_batches_per_epoch)),
        "steps": batches.count_batches(args.save_steps),
    }
    return {
        "num_steps": batches.num_steps,
        "groups_per_step": batches.num_groups,
        "max_staleness": 0,
        "checkpoint_every_steps": interval_by_strategy[args.save_strategy],
        "checkpoint_every_s": None,
        # As in TRL, a limit of 0 or less means no limit.
        "keep_checkpoints": max(args.save_total_limit or 0, 0) or _KEEP_ALL_CHECKPOINTS,
    }


def _check_intervals(args: GRPOConfig) -> None:
    for name in ("logging", "save", "eval"):
        steps = getattr(args, f"{name}_steps")
        if steps is not None and steps <= 0 and getattr(args, f"{name}_strategy") == "steps":
            raise ConfigError(
                f"GRPOConfig.{name}_steps = {steps:g} must be above 0 if {name}_strategy = "
                f"'steps'; raise it, or set {name}_strategy = 'no'"
            )


def _make_metrics(args: GRPOConfig) -> dict[str, Any]:
    reports = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    settings: dict[str, Any] = {"tensorboard": "tensorboard" in reports}
    if "wandb" in reports:
        settings["wandb"] = {"project": args.project}
    if args.log_completions:
        settings["transcripts_per_step"] = args.num_completions_to_print or args.num_generations
    return settings


def _check_lengths(args: GRPOConfig, max_tokens: int) -> None:
    if args.max_completion_length >= max_tokens:
        raise ConfigError(
            f"GRPOConfig.max_completion_length = {args.max_completion_length} leaves no room for a "
            f"prompt in the {max_tokens} tokens of prompt and completion together; lower it"
            + (", or raise vllm_max_model_length" if args.vllm_max_model_length else "")
        )


def _check_engine(args: GRPOConfig) -> None:
    if not args.use_vllm or not is_vllm_installed():
        return
    if args.temperature > MAX_VLLM_TEMPERATURE:
        raise ConfigError(
            f"GRPOConfig.temperature = {args.temperature:g}, but vLLM samples at "
            f"{MAX_VLLM_TEMPERATURE:g} at most; lower it, or set use_vllm = False"
        )
    tensor_parallel_size, num_devices = args.vllm_tensor_parallel_size, torch.cuda.device_count()
    if tensor_parallel_size > 1 and (not _has_gpu(args) or num_devices <= tensor_parallel_size):
        raise ConfigError(
            f"GRPOConfig.vllm_tensor_parallel_size = {tensor_parallel_size} needs at least "
            f"{tensor_parallel_size + 1} GPUs, one of them for the learner, but there are "
            f"{0 if args.use_cpu else num_devices}; remove it"
        )


def _choose_correction(args: GRPOConfig, rollout: RolloutConfig) -> dict[str, Any]:
    """Return `algorithm.correction`, which is off if the samples' distribution is changed."""
    correction, changed_setting = _make_correction(args), rollout.changed_distribution
    if changed_setting is None or correction["kind"] == "off":
        return correction
    name, value, effect = changed_setting
    sys.stderr.write(
        f"note: GRPOConfig.{name} = {value} samples from a {effect} distribution, whose log-probs "
        "cannot be compared with the learner's: vllm_importance_sampling_correction is off\n"
    )
    return {"kind": "off"}


def _make_correction(args: GRPOConfig) -> dict[str, Any]:
    """Return `algorithm.correction`, the correction of differences between sampler and learner."""
    if not args.use_vllm or not args.vllm_importance_sampling_correction:
        return {"kind": "off"}
    clip_min = args.vllm_importance_sampling_clip_min
    clip_max = args.vllm_importance_sampling_cap or args.vllm_importance_sampling_clip_max
    mode = args.vllm_importance_sampling_mode
    kind_by_mode = {
        "token_truncate": "token_tis",
        "sequence_truncate": "sequence_tis",
        "sequence_mask": "sequence_mask",
    }
    if mode == "token_mask" and clip_min is not None and clip_max is not None and clip_max > 1:
        return {"kind": "icepop", "low": clip_min, "high": clip_max}
    if mode not in kind_by_mode or clip_min is not None or clip_max is None:
        raise ConfigError(
            f"GRPOConfig.vllm_importance_sampling_mode = {mode!r} with "
            f"vllm_importance_sampling_clip_min = {clip_min} and clip_max = {clip_max} is not "
            "supported; set 'token_mask' with both and clip_max above 1, or one of "
            f"{sorted(kind_by_mode)} with clip_max only"
        )
    return {"kind": kind_by_mode[mode], "cap": clip_max}


def _has_gpu(args: GRPOConfig) -> bool:
    """Return whether the run uses GPUs."""
    return not args.use_cpu and torch.cuda.is_available()


def _choose_num_gpus(args: GRPOConfig) -> float:
    """Return the number of GPUs for the learner, which each rollout worker gets, too."""
    if not _has_gpu(args):
        return 0.0
    return 1.0 if torch.cuda.device_count() > 1 else 0.5
