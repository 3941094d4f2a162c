"""Settings of other projects, to start from or to compare with.

    preset   <--- merged under ---   the user's file   <--- overrides

What a run says itself always wins. A preset holds what its project decides about training:
episodes per group and batch, the algorithm, the optimizer. Which model plays which environment,
and how long an answer may get, belongs to the task, and is the run's own to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GRPO: Mapping[str, Any] = {
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
    # https://github.com/meta-pytorch/torchforge and OpenEnv's examples/grpo_blackjack: its ratio
    # is exp(lp - sg[lp]) = 1, so nothing is ever clipped, and nothing corrects for samples that
    # are a version old. Optimizer and decay are torchtitan's. There, a batch is 8 samples.
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
            **_GRPO,
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
    # 8 completions of one prompt in a batch, strictly on-policy. An answer has half of its 512
    # tokens, since a whole row has 512 unless rollout.max_tokens says more.
    "trl": {
        "rollout": {
            "group_size": 8,
            "group_seed": "shared",
            "temperature": 1.0,
            "top_p": 1.0,
            "max_completion_tokens": 256,
        },
        "algorithm": {
            **_GRPO,
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
    # prompts of 16 answers, 16 updates of 512 answers each. Its penalty for overlong answers is
    # a reward function, and not part of this.
    "dapo": {
        "rollout": {
            "group_size": 16,
            "group_seed": "shared",
            "temperature": 1.0,
            "top_p": 1.0,
        },
        "algorithm": {
            **_GRPO,
            "zero_variance_groups": "replace",
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


def with_preset(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The run's own `tree`, its preset underneath.

    Without a preset, or with one that is not known, it is the tree as it was.
    """
    preset = tree.get("preset")
    settings = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return merge_sections(settings, tree)


def merge_sections(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over`, and what `under` says beside it; section by section.

    A section of another kind replaces the one underneath: its fields do not fit.
    """
    if "kind" in over and over["kind"] != under.get("kind"):
        return dict(over)
    merged = dict(under)
    for key, value in over.items():
        below = under.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = merge_sections(below, value)
        merged[key] = value
    return merged
