"""The run for a call of `train_agent` with a language model.

update_interval   -> episodes of a batch, in groups of the smallest size that divides the batch
max_episodes      -> the number of whole batches, at least one
minibatch_size    -> episodes of a minibatch, which has whole groups
max_timesteps     -> maximum number of tokens per completion
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ludus.env.adapters.gymnasium.token_level import TokenLevelEnvironment
from ludus.proto.config import LanguageModelRun, require_language_model, run_config_from
from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig
from ludus.trainer.compat.gymformer.token_level import TokenLevelRunner
from ludus.trainer.compat.gymformer.trainer.request import AgentRequest
from ludus.trainer.compat.gymformer.trainer.token_task import TokenTask

CRITIC_FOLDER = "critic"
"""Subfolder with the critic, in the initial model's folder and in a checkpoint's model folder."""
_MIN_EPISODES = 2
"""Minimum number of episodes per batch, because advantages are normalized over the batch."""
_MAX_SAMPLED_TOKENS = 64
"""Maximum tokens per sampling call. The environment may end the episode at any of them, and
the later tokens are dropped."""
_DEFAULT_POSITIONS = 32768
"""Context length, in tokens, of a model whose configuration has no limit."""
_GPU_SHARE = 0.5
"""Share of one GPU for the learner, and for the rollout worker."""


@dataclass(frozen=True, slots=True)
class _BatchSize:
    """Number of groups in a batch, and of episodes in a group."""

    group_size: int
    num_groups: int

    @classmethod
    def choose(cls, request: AgentRequest) -> _BatchSize:
        num_episodes = max(_MIN_EPISODES, min(request.update_interval, request.max_episodes))
        size = next(
            size for size in range(_MIN_EPISODES, num_episodes + 1) if num_episodes % size == 0
        )
        return cls(size, num_episodes // size)

    @property
    def num_episodes(self) -> int:
        return self.group_size * self.num_groups

    def num_minibatches(self, minibatch_size: int) -> int:
        """Return the number of minibatches; -1 as `minibatch_size` uses the whole batch."""
        max_parts = 1 if minibatch_size < 0 else max(1, self.num_episodes // minibatch_size)
        return max(parts for parts in range(1, max_parts + 1) if self.num_groups % parts == 0)


def make_run(
    request: AgentRequest, task: TokenTask, model_path: Path, model: PreTrainedModel
) -> LanguageModelRun:
    """Return the run for a request.

    Args:
        model_path: folder of the actor, with the critic in `CRITIC_FOLDER`.
        model: the actor's model.

    Raises:
        ConfigError: a prompt leaves no room for a completion.
    """
    batch, ppo = _BatchSize.choose(request), request.ppo_config
    gpu_share = _GPU_SHARE if _uses_gpu(request.device) else 0.0
    episodes_per_step = batch.num_episodes
    run = run_config_from(
        {
            "name": request.run_name,
            "output_dir": str(request.save_path),
            "seed": request.seed,
            "environment": {
                "package": f"{TokenLevelEnvironment.__module__}:{TokenLevelEnvironment.__name__}",
                "options": task.options,
                "rollout": f"{TokenLevelRunner.__module__}:{TokenLevelRunner.__name__}",
            },
            "model": {"kind": "pretrained", "path": str(model_path)},
            "rollout": {
                **_lengths(request, task, model),
                "group_size": batch.group_size,
                # An environment may draw prompts without using the seed. PPO compares with a
                # critic and does not need other episodes of the same prompt.
                "group_seed": "independent",
                "num_groups_in_flight": max(batch.num_groups, request.num_envs // batch.group_size),
                "num_gpus_per_worker": gpu_share,
            },
            "algorithm": _algorithm(ppo, model_path, task.kl_coef),
            "learner": {
                "learning_rate": ppo.lr_actor,
                "max_grad_norm": ppo.max_grad_norm,
                "update_epochs": ppo.update_epochs,
                "num_minibatches": batch.num_minibatches(ppo.minibatch_size),
                "num_gpus_per_rank": gpu_share,
            },
            "training": {
                "num_steps": max(1, request.max_episodes // episodes_per_step),
                "groups_per_step": batch.num_groups,
                "max_staleness": 0,
                "checkpoint_every_steps": max(1, request.save_interval // episodes_per_step),
            },
            "eval": {"num_games": max(episodes_per_step, request.num_envs), "num_games_during": 0},
            "metrics": {**request.metrics, "transcripts_per_step": episodes_per_step},
        }
    )
    return require_language_model(run, "train_agent")


def _lengths(request: AgentRequest, task: TokenTask, model: PreTrainedModel) -> dict[str, int]:
    """Return the length limits of section `rollout`."""
    positions = getattr(model.config, "max_position_embeddings", None) or _DEFAULT_POSITIONS
    limits = [request.max_timesteps, _MAX_SAMPLED_TOKENS, positions - task.longest_prompt]
    max_completion = min(limits + ([task.max_generation] if task.max_generation else []))
    if max_completion < 1:
        raise ConfigError(
            f"a prompt of {task.longest_prompt} tokens leaves no room for a completion in the "
            f"model's {positions} positions; use shorter prompts or a longer context"
        )
    return {
        "max_completion_tokens": max_completion,
        "max_turns": request.max_timesteps,
        "max_tokens": positions,
    }


def _algorithm(ppo: PPOConfig, model_path: Path, kl_coef: float) -> dict[str, Any]:
    kl_penalty = {"kl_coef": kl_coef, "kl_placement": "reward", "kl_estimator": "k1"}
    return {
        "kind": "ppo",
        "gamma": ppo.gamma,
        "lam": ppo.gae_lambda,
        "value_coef": ppo.value_coef,
        "critic": {
            "kind": "model",
            "path": str(model_path / CRITIC_FOLDER),
            "learning_rate": ppo.lr_critic,
        },
        "entropy_coef": ppo.entropy_coef,
        "loss": {"clip_low": ppo.eps_clip, "clip_high": ppo.eps_clip, "dual_clip": None},
        **(kl_penalty if kl_coef else {}),
    }


def _uses_gpu(device: str | None) -> bool:
    """Return whether the learner and the rollout worker share a GPU.

    Raises:
        ConfigError: the device does not exist.
    """
    has_gpu = torch.cuda.is_available()
    if device is None or device == "cpu":
        return has_gpu and device is None
    if not has_gpu or not device.startswith("cuda"):
        devices = "None, 'cpu' or 'cuda'" if has_gpu else "None or 'cpu' (there is no GPU)"
        raise ConfigError(f"device must be {devices}, got '{device}'")
    return True
