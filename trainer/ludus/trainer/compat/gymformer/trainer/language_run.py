"""The run that a call of `train_agent` on a language model asks for.

update_interval episodes   -> a batch: groups of the smallest size that divides it
max_episodes               -> as many whole batches, at least one
minibatch_size             -> episodes, of whole groups, under one gradient
max_timesteps              -> tokens of an answer
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
"""In the folder of the model that a run begins with, and in that of a checkpoint's."""
_LEAST_EPISODES = 2
"""Of a batch: advantages are compared with each other."""
_MOST_TOKENS_AT_ONCE = 64
"""Sampled before the environment hears of them: it may end the episode at any of them."""
_MOST_POSITIONS = 32768
"""Of a model that names no limit."""
_GPU_SHARE = 0.5
"""Of one GPU, for the learner and for the sampler each."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a batch."""

    group_size: int
    num_groups: int

    @classmethod
    def of(cls, request: AgentRequest) -> _Sizes:
        wanted = max(_LEAST_EPISODES, min(request.update_interval, request.max_episodes))
        size = next(size for size in range(_LEAST_EPISODES, wanted + 1) if wanted % size == 0)
        return cls(size, wanted // size)

    @property
    def num_episodes(self) -> int:
        return self.group_size * self.num_groups

    def num_minibatches(self, minibatch_size: int) -> int:
        """Into how many parts it is cut; -1 leaves it whole."""
        wanted = 1 if minibatch_size < 0 else max(1, self.num_episodes // minibatch_size)
        return max(parts for parts in range(1, wanted + 1) if self.num_groups % parts == 0)


def make_run(
    request: AgentRequest, task: TokenTask, start: Path, model: PreTrainedModel
) -> LanguageModelRun:
    """The run that `request` asks for, from the actor in folder `start` and the critic within.

    Raises:
        ConfigError: the environment's prompts leave no room for an answer.
    """
    sizes, ppo = _Sizes.of(request), request.ppo_config
    on_gpu = _GPU_SHARE if _takes_gpu(request.device) else 0.0
    per_step = sizes.num_episodes
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
            "model": {"kind": "pretrained", "path": str(start)},
            "rollout": {
                **_lengths(request, task, model),
                "group_size": sizes.group_size,
                # An environment may draw its prompts without asking for a seed; PPO compares with
                # a critic, and needs no other episode of the same prompt.
                "group_seed": "independent",
                "num_groups_in_flight": max(sizes.num_groups, request.num_envs // sizes.group_size),
                "num_gpus_per_worker": on_gpu,
            },
            "algorithm": _algorithm(ppo, start, task.kl_coef),
            "learner": {
                "learning_rate": ppo.lr_actor,
                "max_grad_norm": ppo.max_grad_norm,
                "update_epochs": ppo.update_epochs,
                "num_minibatches": sizes.num_minibatches(ppo.minibatch_size),
                "num_gpus_per_rank": on_gpu,
            },
            "training": {
                "num_steps": max(1, request.max_episodes // per_step),
                "groups_per_step": sizes.num_groups,
                "max_staleness": 0,
                "checkpoint_every_steps": max(1, request.save_interval // per_step),
            },
            "eval": {"num_games": max(per_step, request.num_envs), "num_games_during": 0},
            "metrics": {**request.metrics, "transcripts_per_step": per_step},
        }
    )
    return require_language_model(run, "train_agent")


def _lengths(request: AgentRequest, task: TokenTask, model: PreTrainedModel) -> dict[str, int]:
    """Of answers and episodes, in tokens."""
    positions = getattr(model.config, "max_position_embeddings", None) or _MOST_POSITIONS
    limits = [request.max_timesteps, _MOST_TOKENS_AT_ONCE, positions - task.longest_prompt]
    completion = min(limits + ([task.max_generation] if task.max_generation else []))
    if completion < 1:
        raise ConfigError(
            f"expected prompts that leave room for an answer in the model's {positions} "
            f"positions, got one of {task.longest_prompt} tokens"
        )
    return {
        "max_completion_tokens": completion,
        "max_turns": request.max_timesteps,
        "max_tokens": positions,
    }


def _algorithm(ppo: PPOConfig, start: Path, kl_coef: float) -> dict[str, Any]:
    divergence = {"kl_coef": kl_coef, "kl_placement": "reward", "kl_estimator": "k1"}
    return {
        "kind": "ppo",
        "gamma": ppo.gamma,
        "lam": ppo.gae_lambda,
        "value_coef": ppo.value_coef,
        "critic": {
            "kind": "model",
            "path": str(start / CRITIC_FOLDER),
            "learning_rate": ppo.lr_critic,
        },
        "entropy_coef": ppo.entropy_coef,
        "loss": {"clip_low": ppo.eps_clip, "clip_high": ppo.eps_clip, "dual_clip": None},
        **(divergence if kl_coef else {}),
    }


def _takes_gpu(device: str | None) -> bool:
    """Whether learner and sampler share a GPU.

    Raises:
        ConfigError: there is no such device.
    """
    has_gpu = torch.cuda.is_available()
    if device is None or device == "cpu":
        return has_gpu and device is None
    if not has_gpu or not device.startswith("cuda"):
        known = "None, 'cpu' or 'cuda'" if has_gpu else "None or 'cpu', since no GPU is here"
        raise ConfigError(f"device = '{device}' expected {known}")
    return True
