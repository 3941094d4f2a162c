"""What a GRPOConfig says of sampling, held against what a run can sample and compare."""

from __future__ import annotations

from typing import Any

import torch

from ludus.proto.config import RolloutConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.trl.config import GRPOConfig
from ludus.trainer.rollout.engines import has_vllm

_VLLM_MAX_TEMPERATURE = 2.0


def check_sampling(args: GRPOConfig, max_tokens: int) -> None:
    """Check what the run would refuse by the names of its own settings.

    Raises:
        ConfigError: fields that no run can have together.
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
    size, found = args.vllm_tensor_parallel_size, torch.cuda.device_count()
    if size > 1 and (not has_gpu(args) or found <= size):
        raise ConfigError(
            f"GRPOConfig.vllm_tensor_parallel_size = {size} expected {size + 1} GPUs or more, one "
            f"of them for the learner, got {0 if args.use_cpu else found}; leave it out"
        )


def _check_distribution(args: GRPOConfig) -> None:
    """Refuse to weigh by log-probs of a distribution that the learner does not compute."""
    asked = RolloutConfig(
        top_p=args.top_p,
        top_k=max(args.top_k or 0, 0),
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
    )
    changed = asked.changed_distribution
    if changed is None or correction(args)["kind"] == "off":
        return
    name, value, what = changed
    raise ConfigError(
        f"GRPOConfig.{name} = {value} samples from a {what} distribution, whose log-probs cannot "
        "be compared with the learner's, but vllm_importance_sampling_correction does; set "
        f"vllm_importance_sampling_correction = False, or leave {name} out"
    )


def correction(args: GRPOConfig) -> dict[str, Any]:
    """The weights for sampler and learner that differ, as a run's `algorithm.correction`.

    Raises:
        ConfigError: a mode and limits that no run has.
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
            f"vllm_importance_sampling_clip_min = {low} and clip_max = {cap} is not honoured here, "
            "expected 'token_mask' with both, of which the second is above 1, or one of "
            f"{sorted(kinds)} with clip_max alone"
        )
    return {"kind": kinds[mode], "cap": cap}


def has_gpu(args: GRPOConfig) -> bool:
    """Whether the run computes on GPUs."""
    return not args.use_cpu and torch.cuda.is_available()


def num_gpus(args: GRPOConfig) -> float:
    """For the learner, and as much for the rollout worker."""
    if not has_gpu(args):
        return 0.0
    return 1.0 if torch.cuda.device_count() > 1 else 0.5
