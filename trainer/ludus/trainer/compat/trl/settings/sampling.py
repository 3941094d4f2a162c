"""Checks of the sampling settings of a GRPOConfig."""

from __future__ import annotations

from typing import Any

import torch

from ludus.proto.config import RolloutConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.settings.config import GRPOConfig
from ludus.trainer.rollout.engines.vllm_process import has_vllm

_VLLM_MAX_TEMPERATURE = 2.0


def check_sampling(args: GRPOConfig, max_tokens: int) -> None:
    """Check the settings that the run would refuse with other names.

    Raises:
        ConfigError: the settings cannot be combined.
    """
    if args.max_completion_length is not None and args.max_completion_length >= max_tokens:
        raise ConfigError(
            f"GRPOConfig.max_completion_length = {args.max_completion_length} leaves no room for a "
            f"prompt in the {max_tokens} tokens of prompt and completion together; lower it"
            + (", or raise vllm_max_model_length" if args.vllm_max_model_length else "")
        )
    _check_engine(args)
    _check_distribution(args)


def _check_engine(args: GRPOConfig) -> None:
    if not args.use_vllm or not has_vllm():
        return
    if args.temperature > _VLLM_MAX_TEMPERATURE:
        raise ConfigError(
            f"GRPOConfig.temperature = {args.temperature:g}, but vLLM samples at "
            f"{_VLLM_MAX_TEMPERATURE:g} at most; lower it, or set use_vllm = False"
        )
    size, num_devices = args.vllm_tensor_parallel_size, torch.cuda.device_count()
    if size > 1 and (not has_gpu(args) or num_devices <= size):
        raise ConfigError(
            f"GRPOConfig.vllm_tensor_parallel_size = {size} needs at least {size + 1} GPUs, one of "
            f"them for the learner, but there are {0 if args.use_cpu else num_devices}; remove it"
        )


def _check_distribution(args: GRPOConfig) -> None:
    """Refuse a correction with log-probs of a distribution that the learner does not compute."""
    rollout = RolloutConfig(
        top_p=args.top_p,
        top_k=max(args.top_k or 0, 0),
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
    )
    changed_fields = rollout.changed_distribution
    if changed_fields is None or correction(args)["kind"] == "off":
        return
    name, value, effect = changed_fields
    raise ConfigError(
        f"GRPOConfig.{name} = {value} samples from a {effect} distribution, whose log-probs cannot "
        "be compared with the learner's, but vllm_importance_sampling_correction does; set "
        f"vllm_importance_sampling_correction = False, or remove {name}"
    )


def correction(args: GRPOConfig) -> dict[str, Any]:
    """Return `algorithm.correction`, the correction of differences between sampler and learner.

    Raises:
        ConfigError: the mode and its limits are not supported.
    """
    if not args.use_vllm or not args.vllm_importance_sampling_correction:
        return {"kind": "off"}
    low, cap = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    cap = args.vllm_importance_sampling_cap or cap
    mode = args.vllm_importance_sampling_mode
    kinds = {
        "token_truncate": "token_tis",
        "sequence_truncate": "sequence_tis",
        "sequence_mask": "sequence_mask",
    }
    if mode == "token_mask" and low is not None and cap is not None and cap > 1:
        return {"kind": "icepop", "low": low, "high": cap}
    if mode not in kinds or low is not None or cap is None:
        raise ConfigError(
            f"GRPOConfig.vllm_importance_sampling_mode = {mode!r} with "
            f"vllm_importance_sampling_clip_min = {low} and clip_max = {cap} is not supported; set "
            "'token_mask' with both and clip_max above 1, or one of "
            f"{sorted(kinds)} with clip_max only"
        )
    return {"kind": kinds[mode], "cap": cap}


def has_gpu(args: GRPOConfig) -> bool:
    """Return whether the run uses GPUs."""
    return not args.use_cpu and torch.cuda.is_available()


def num_gpus(args: GRPOConfig) -> float:
    """Return the number of GPUs for the learner, which is also that for a rollout worker."""
    if not has_gpu(args):
        return 0.0
    return 1.0 if torch.cuda.device_count() > 1 else 0.5
