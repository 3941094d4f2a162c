"""`train_agent` for language models in token-level environments, as a run of Ludus.

    AgentRequest --TokenTask--> LanguageModelRun --Trainer--> returns of the episodes
    both models  --folder-----> initial weights        |
         ^---------- latest weights -------------------+

Each completion is sampled as a whole, with a KV cache, and then stepped into the environment token
by token. PPO computes a generalized advantage for each token. The environment's `kl_coef` is the
coefficient of the KL penalty against the starting policy, applied to the reward of each token.

update_interval   -> episodes of a batch, in groups of the smallest size that divides the batch
max_episodes      -> number of whole batches, at least one
minibatch_size    -> episodes of a minibatch, which has whole groups
max_timesteps     -> maximum number of tokens per completion
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ludus.env.adapters.gymnasium.token_level import TokenLevelEnvironment
from ludus.proto.config import LanguageModelRun, make_run_config, require_language_model
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Transcript
from ludus.trainer.compat.checks import run_coroutine
from ludus.trainer.compat.gymformer.rl.ppo import PPOConfig
from ludus.trainer.compat.gymformer.rl.transformers_nn import LMActorNetwork, LMCriticNetwork
from ludus.trainer.compat.gymformer.token_level import TokenLevelRunner
from ludus.trainer.compat.gymformer.trainer.request import AgentRequest, EpisodeReturns
from ludus.trainer.compat.gymformer.trainer.token_task import TokenTask
from ludus.trainer.core.output import replace_folder
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.run.checkpoint import MODEL_FOLDER

CRITIC_FOLDER = "critic"
"""Subfolder with the critic, in the initial model's folder and in a checkpoint's model folder."""
_MIN_EPISODES = 2
"""Minimum number of episodes per batch, because advantages are normalized over the batch."""
_MAX_SAMPLED_TOKENS = 64
"""Maximum number of tokens per sampling call. The environment may end the episode at any token,
and the later tokens are dropped."""
_DEFAULT_POSITIONS = 32768
"""Context length, in tokens, of a model whose configuration has no limit."""
_GPU_SHARE = 0.5
"""Share of one GPU for the learner, and for the rollout worker."""
# Used only to render canary prompts; episodes are already tokens.
_PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def train_language_model(request: AgentRequest) -> EpisodeReturns:
    """Train the actor and critic of a request in place and return the returns of the episodes."""
    actor, critic = request.actor, request.critic
    assert isinstance(actor, LMActorNetwork)
    if request.resume:
        raise ConfigError(
            "train_agent cannot resume a language model (resume=True); to continue this run: "
            f"ludus.trainer.Trainer('{request.save_path / request.run_name}/config.json', "
            "resume='always')"
        )
    if not isinstance(critic, LMCriticNetwork):
        raise ConfigError(
            "the critic of a language model must be an LMCriticNetwork, got "
            f"{type(critic).__name__}"
        )
    task = TokenTask.inspect(
        request.env_name, actor.model_name, request.max_timesteps, request.seed
    )
    model_path = _write_models(actor, critic, task, request.save_path / f"{request.run_name}.start")
    run = make_run(request, task, model_path, actor.model)
    returns, latest_folder = run_coroutine(_train(Trainer(run, overwrite=True), request))
    _copy_weights(actor.model, latest_folder)
    _copy_weights(critic.model, latest_folder / CRITIC_FOLDER)
    return returns


async def _train(trainer: Trainer, request: AgentRequest) -> tuple[EpisodeReturns, Path]:
    """Train, and return the episodes' returns and the folder of the latest weights."""
    returns = EpisodeReturns()
    async with trainer:
        async for step in trainer.steps():
            record_returns(request, returns, step.transcripts)
        await trainer.train()
        checkpoint = await trainer.save()
    return returns, checkpoint / MODEL_FOLDER


def record_returns(
    request: AgentRequest, returns: EpisodeReturns, episodes: Sequence[Transcript]
) -> None:
    """Append the returns of the episodes, and call the callback when due."""
    for episode in episodes:
        if episode.episode_return is None:
            continue
        returns.append(episode.episode_return)
        if request.callback is None or len(returns) % request.log_interval:
            continue
        first_turn, *later_turns = episode.turns
        later_texts = [
            text
            for turn in later_turns
            for text in (*(message.text for message in turn.shown), turn.answer)
        ]
        request.callback(
            "".join(message.text for message in first_turn.shown),
            "".join([first_turn.answer, *later_texts]),
            episode.turns[-1].reward,
            episode.status == "terminated",
            episode.status == "truncated",
            len(returns),
            returns.running[-1],
        )


def _write_models(
    actor: LMActorNetwork, critic: LMCriticNetwork, task: TokenTask, folder: Path
) -> Path:
    """Save both models, with a chat template that ends each completion with the EOS token."""
    tokenizer = load_tokenizer(actor.model_name)
    num_embeddings = actor.model.get_input_embeddings().weight.shape[0]
    if task.num_tokens > num_embeddings or tokenizer.eos_token is None:
        raise ConfigError(
            "the actor's model must have an EOS token and an embedding for each of the "
            f"environment's {task.num_tokens} tokens, got EOS token {tokenizer.eos_token!r} and "
            f"{num_embeddings} embeddings; use the same model for the environment and the actor"
        )
    tokenizer.chat_template = _PLAIN_TEMPLATE
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replace_folder(folder) as temporary_folder:
        actor.model.save_pretrained(temporary_folder)
        tokenizer.save_pretrained(temporary_folder)
        critic.model.save_pretrained(temporary_folder / CRITIC_FOLDER)
        tokenizer.save_pretrained(temporary_folder / CRITIC_FOLDER)
    return folder.absolute()


def _copy_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights of a checkpoint into the model."""
    # The files contain tied weights only once.
    parameters = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for path in folder.glob("model*.safetensors"):
            for name, tensor in load_file(path).items():
                parameters[name].copy_(tensor)


def make_run(
    request: AgentRequest, task: TokenTask, model_path: Path, model: PreTrainedModel
) -> LanguageModelRun:
    """Return the run for a request.

    Args:
        model_path: folder of the actor, with the critic in `CRITIC_FOLDER`.
        model: the actor's model.
    """
    ppo = request.ppo_config
    gpu_share = _GPU_SHARE if _uses_gpu(request.device) else 0.0
    episodes_per_step = max(_MIN_EPISODES, min(request.update_interval, request.max_episodes))
    sizes = range(_MIN_EPISODES, episodes_per_step + 1)
    group_size = next(size for size in sizes if episodes_per_step % size == 0)
    num_groups = episodes_per_step // group_size
    max_minibatches = max(1, episodes_per_step // ppo.minibatch_size)  # -1 is the whole batch
    num_minibatches = max(
        divisor for divisor in range(1, max_minibatches + 1) if num_groups % divisor == 0
    )
    run = make_run_config(
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
                **_make_length_limits(request, task, model),
                "group_size": group_size,
                # PPO compares with a critic, not with other episodes of the same prompt.
                "group_seed": "independent",
                "num_groups_in_flight": num_groups,
                "num_gpus_per_worker": gpu_share,
            },
            "algorithm": _make_algorithm(ppo, model_path, task.kl_coef),
            "learner": {
                "learning_rate": ppo.lr_actor,
                "max_grad_norm": ppo.max_grad_norm,
                "update_epochs": ppo.update_epochs,
                "num_minibatches": num_minibatches,
                "num_gpus_per_rank": gpu_share,
            },
            "training": {
                "num_steps": max(1, request.max_episodes // episodes_per_step),
                "groups_per_step": num_groups,
                "max_staleness": 0,
                "checkpoint_every_steps": max(1, request.save_interval // episodes_per_step),
                "checkpoint_every_s": None,
            },
            "eval": {"num_games": max(episodes_per_step, request.num_envs), "num_games_during": 0},
            "metrics": {**request.metrics, "transcripts_per_step": episodes_per_step},
        }
    )
    return require_language_model(run, "train_agent")


def _make_length_limits(
    request: AgentRequest, task: TokenTask, model: PreTrainedModel
) -> dict[str, int]:
    """Return the length limits of section `rollout`."""
    num_positions = getattr(model.config, "max_position_embeddings", None) or _DEFAULT_POSITIONS
    limits = [request.max_timesteps, _MAX_SAMPLED_TOKENS, num_positions - task.max_prompt_tokens]
    max_completion = min(limits + ([task.max_generation] if task.max_generation else []))
    if max_completion < 1:
        raise ConfigError(
            f"a prompt of {task.max_prompt_tokens} tokens leaves no room for a completion in the "
            f"model's {num_positions} positions; use shorter prompts or a longer context"
        )
    return {
        "max_completion_tokens": max_completion,
        "max_turns": request.max_timesteps,
        "max_tokens": num_positions,
    }


def _make_algorithm(ppo: PPOConfig, model_path: Path, kl_coef: float) -> dict[str, Any]:
    kl_penalty = {"kl_coef": kl_coef, "kl_placement": "reward", "kl_estimator": "k1"}
    critic_path = str(model_path / CRITIC_FOLDER)
    return {
        "kind": "ppo",
        "gamma": ppo.gamma,
        "lam": ppo.gae_lambda,
        "value_coef": ppo.value_coef,
        "critic": {"kind": "model", "path": critic_path, "learning_rate": ppo.lr_critic},
        "entropy_coef": ppo.entropy_coef,
        "loss": {"clip_low": ppo.eps_clip, "clip_high": ppo.eps_clip, "dual_clip": None},
        **(kl_penalty if kl_coef else {}),
    }


def _uses_gpu(device: str | None) -> bool:
    """Return whether the learner and the rollout worker share a GPU."""
    has_gpu = torch.cuda.is_available()
    if device is None or device == "cpu":
        return has_gpu and device is None
    if not has_gpu or not device.startswith("cuda"):
        devices = "None, 'cpu' or 'cuda'" if has_gpu else "None or 'cpu' (there is no GPU)"
        raise ConfigError(f"device must be {devices}, got '{device}'")
    return True
