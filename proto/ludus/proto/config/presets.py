"""Settings of other projects, as a start or for comparison.

    preset   <--- replaced by ---   the user's file   <--- replaced by ---   overrides

A preset contains the project's settings for training: episodes per group and batch, the algorithm
and the optimizer. Models, environments and the length of completions depend on the task, so the
run sets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PRESET_KIND = "language_model"
"""Kind of the runs that have presets, and of runs that do not set `kind`."""
_GRPO_SETTINGS: Mapping[str, Any] = {
    "kind": "grpo",
    "baseline": "mean",
    "scale": "group",
    "credit": "episode",
    "gamma": 1.0,
    "old_logprobs": "recompute",
    "entropy_coef": 0.0,
    "entropy_coef_final": None,
    "kl_coef_final": None,
    "kl_estimator": "k3",
    "kl_placement": "loss",
    "geometric_mask": None,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # https://github.com/meta-pytorch/torchforge and OpenEnv's examples/grpo_blackjack. The ratio
    # there is exp(logprob - stop_gradient(logprob)) = 1, so it is never clipped, and stale samples
    # are not corrected. Optimizer and weight decay are torchtitan's. A batch has 8 samples.
    "torchforge": {
        "rollout": {
            "group_size": 4,
            "group_seed": "independent",
            "temperature": 1.0,
            "top_p": 1.0,
            "max_completion_tokens": 32,
            "max_turns": 10,
        },
        "algorithm": {
            **_GRPO_SETTINGS,
            "zero_variance_groups": "keep",
            "loss": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
            "correction": {"kind": "off"},
            "aggregation": "sequence_mean",
            "kl_coef": 0.1,
        },
        "learner": {
            "learning_rate": 1e-5,
            "schedule": "linear",
            "learning_rate_final": 0.0,
            "warmup_steps": 1,
            "weight_decay": 0.1,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "max_grad_norm": 1.0,
            "num_minibatches": 1,
            "dtype": "bfloat16",
            "activation_checkpointing": True,
            "compile": False,
        },
        "training": {
            "num_steps": 1000,
            "groups_per_step": 2,
            "max_staleness": 1,
            "checkpoint_every_steps": 500,
        },
    },
    # https://github.com/huggingface/trl, the defaults of GRPOConfig 1.16 on one device with vLLM:
    # 8 completions of one prompt in a batch, strictly on-policy. TRL's completions have 512 tokens.
    # Here they have half, because rollout.max_tokens limits a whole sequence to 512 by default.
    "trl": {
        "rollout": {
            "group_size": 8,
            "group_seed": "shared",
            "temperature": 1.0,
            "top_p": 1.0,
            "max_completion_tokens": 256,
        },
        "algorithm": {
            **_GRPO_SETTINGS,
            "zero_variance_groups": "keep",
            "loss": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
            "correction": {"kind": "sequence_mask", "cap": 3.0},
            "aggregation": "token_mean",
            "kl_coef": 0.0,
        },
        "learner": {
            "learning_rate": 1e-6,
            "schedule": "linear",
            "learning_rate_final": 0.0,
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "max_grad_norm": 1.0,
            "num_minibatches": 1,
            "dtype": "bfloat16",
            "activation_checkpointing": True,
            "compile": False,
        },
        "training": {"groups_per_step": 1, "max_staleness": 0},
    },
    # arXiv 2503.14476, section 4.1, and its recipe in https://github.com/volcengine/verl: 512
    # prompts of 16 completions, and 16 updates with 512 completions each. The penalty for
    # overlong completions falls over the last fifth of their length, as there.
    "dapo": {
        "rollout": {
            "group_size": 16,
            "group_seed": "shared",
            "temperature": 1.0,
            "top_p": 1.0,
            "overlong": "penalise",
        },
        "algorithm": {
            **_GRPO_SETTINGS,
            "zero_variance_groups": "replace",
            "max_group_batches": 10,
            "loss": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
            "correction": {"kind": "off"},
            "aggregation": "token_mean",
            "kl_coef": 0.0,
        },
        "learner": {
            "learning_rate": 1e-6,
            "schedule": "constant",
            "warmup_steps": 20,
            "weight_decay": 0.1,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "max_grad_norm": 1.0,
            "num_minibatches": 16,
            "dtype": "bfloat16",
            "activation_checkpointing": True,
        },
        "training": {"groups_per_step": 512, "max_staleness": 0},
    },
}


def apply_preset(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tree` with the settings of its preset in all fields that `tree` does not set."""
    preset = tree.get("preset")
    settings = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    # Presets are settings of language-model runs; a run of another kind rejects `preset`.
    kind = tree.get("kind", _PRESET_KIND)
    return merge_sections({"kind": _PRESET_KIND, **settings}, {**tree, "kind": kind})


def merge_sections(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values`, with missing fields filled in from `defaults`, section by section.

    A section of another kind replaces the default section, because their fields differ.
    """
    if "kind" in values and values["kind"] != defaults.get("kind"):
        return dict(values)
    merged_section = dict(defaults)
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = merge_sections(default, value)
        merged_section[key] = value
    return merged_section
