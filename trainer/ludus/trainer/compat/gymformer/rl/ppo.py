"""Settings and agents of PPO, with Gymformer's names."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.classic.policy import GaussianActor, NetworkPolicy
from ludus.trainer.compat.checks import Network, PathText, check_value, require_device
from ludus.trainer.core.tensor_files import load_plain_values


@dataclass(slots=True)
class PPOConfig:
    """Settings of PPO."""

    lr_actor: float = 3e-4
    lr_critic: float = 1e-3
    gamma: float = 0.99
    """Discount factor per step."""
    update_epochs: int = 10
    """Number of passes over the steps since the last update."""
    eps_clip: float = 0.2
    """Clip range: the ratio of the new policy to the old policy is clipped to 1 +- eps_clip."""
    minibatch_size: int = 8
    """Number of steps per minibatch; -1 uses all steps at once."""
    pad_obs: bool = False
    """Ignored: the observation space shows whether states differ in length."""
    int_obs: bool = False
    """Ignored: the observation space shows whether states are integers."""
    _: KW_ONLY
    gae_lambda: float = 0.95
    """Decay of generalized advantage estimation per step."""
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5


class PPOAgent:
    """A trained agent, which selects actions."""

    def __init__(
        self, actor: nn.Module, critic: nn.Module, log_std: Tensor | None, device: str
    ) -> None:
        self.actor = actor
        self.critic = critic
        self._log_std = log_std
        self._device = device

    @torch.no_grad()
    def select_action(self, state: Any) -> Any:
        """Sample an action for an observation: an int for discrete actions, otherwise an array."""
        observation = torch.as_tensor(state, device=self._device)
        output = self.actor(observation.float() if observation.is_floating_point() else observation)
        mean, log_std = output if isinstance(output, tuple) else (output, self._log_std)
        if log_std is None:
            return int(torch.distributions.Categorical(logits=mean).sample())
        return (mean + log_std.exp() * torch.randn_like(mean)).cpu().numpy()


def make_agent_state(policy: NetworkPolicy) -> dict[str, Any]:
    """Return the content of an agent's file: Gymformer's keys, and log_std if the actor has one."""
    actor = policy.actor
    state: dict[str, Any] = {"critic": policy.critic.state_dict()}
    if isinstance(actor, GaussianActor):
        state["log_std"] = actor.log_std.detach().clone()
        assert isinstance(actor.mean, nn.Module)
        actor = actor.mean
    return state | {"actor": actor.state_dict()}


def load_ppo_agent(
    path: str | Path, actor: nn.Module, critic: nn.Module, device: str | None = None
) -> PPOAgent:
    """Load the weights of a saved agent into the modules and return the agent.

    Args:
        path: a file that this package's or Gymformer's `train_agent` saved.

    Raises:
        ConfigError: the file is not an agent, or the modules are not compatible with it.
    """
    file_path = check_value("path", PathText, path)
    check_value("actor", Network, actor)
    check_value("critic", Network, critic)
    device = require_device(device) or "cpu"
    try:
        saved_state = load_plain_values(Path(file_path), device)
        actor.load_state_dict(saved_state["actor"])
        critic.load_state_dict(saved_state["critic"])
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(
            f"there is no agent at '{path}'; train_agent saves agents in save_path"
        ) from error
    except (RuntimeError, KeyError, TypeError, ValueError, UnpicklingError, EOFError) as error:
        raise ConfigError(
            f"'{path}' is not a saved agent with this actor and critic: {_describe_error(error)}"
        ) from error
    return PPOAgent(actor.to(device), critic.to(device), saved_state.get("log_std"), device)


def _describe_error(error: Exception) -> str:
    """Describe an error, whose own message may be only a key or a byte."""
    if isinstance(error, KeyError) and error.args[0] in ("actor", "critic"):
        return f"the file lacks {error}"
    if isinstance(error, (KeyError, UnpicklingError)):
        return "torch.save did not write the file"
    return str(error) or "the file is empty"
