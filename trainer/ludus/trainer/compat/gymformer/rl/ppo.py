"""PPO's settings and its agents, under Gymformer's names."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.classic.networks import GaussianActor
from ludus.trainer.classic.policy import NetworkPolicy
from ludus.trainer.compat.gymformer.arguments import device_in, path_in


@dataclass(slots=True)
class PPOConfig:
    """How an agent is trained."""

    lr_actor: float = 3e-4
    lr_critic: float = 1e-3
    gamma: float = 0.99
    """Discount of the reward of one step."""
    update_epochs: int = 10
    """Passes over what was played since the last update."""
    eps_clip: float = 0.2
    """The ratio of the new policy to the old one is clipped at 1 -+ eps_clip."""
    minibatch_size: int = 8
    """Steps under one gradient; -1 takes all at once."""
    pad_obs: bool = False
    """Taken and not needed: that states differ in length is seen from the space."""
    int_obs: bool = False
    """The same: that states are whole numbers is seen from the space."""
    _: KW_ONLY
    gae_lambda: float = 0.95
    """Decay of generalised advantage estimation per step."""
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5


class PPOAgent:
    """A trained agent, for acting."""

    def __init__(
        self, actor: nn.Module, critic: nn.Module, log_std: Tensor | None, device: str
    ) -> None:
        self.actor = actor
        self.critic = critic
        self._log_std = log_std
        self._device = device

    @torch.no_grad()
    def select_action(self, state: Any) -> Any:
        """An action drawn from the policy: a number where they are discrete, else an array.

        Args:
            state: one observation, as the environment gives it.
        """
        seen = torch.as_tensor(state, device=self._device)
        output = self.actor(seen if not seen.is_floating_point() else seen.float())
        mean, log_std = output if isinstance(output, tuple) else (output, self._log_std)
        if log_std is None:
            return int(torch.distributions.Categorical(logits=mean).sample())
        return (mean + log_std.exp() * torch.randn_like(mean)).cpu().numpy()


def saved_agent(policy: NetworkPolicy) -> dict[str, Any]:
    """What a file of an agent holds: Gymformer's keys, and the deviation beside means."""
    actor = policy.actor
    saved: dict[str, Any] = {"critic": policy.critic.state_dict()}
    if isinstance(actor, GaussianActor):
        saved["log_std"] = actor.log_std.detach().clone()
        assert isinstance(actor.mean, nn.Module)
        actor = actor.mean
    return saved | {"actor": actor.state_dict()}


def load_ppo_agent(
    path: str | Path, actor: nn.Module, critic: nn.Module, device: str | None = None
) -> PPOAgent:
    """The agent of a file that `train_agent`, or Gymformer's, saved; the modules get its weights.

    Raises:
        ConfigError: it is no such file, or of other modules.
    """
    file = path_in("path", path)
    for name, module in (("actor", actor), ("critic", critic)):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"{name} expected a torch module, got {module!r:.80}")
    place = device_in("device", device) or "cpu"
    try:
        saved = torch.load(file, map_location=place, weights_only=True)
        actor.load_state_dict(saved["actor"])
        critic.load_state_dict(saved["critic"])
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(f"no agent at '{path}'; train_agent saves into save_path") from error
    except (RuntimeError, KeyError, TypeError, UnpicklingError, EOFError) as error:
        raise ConfigError(
            f"'{path}' expected an agent of such an actor and critic, got another file: "
            f"{_said_of(error)}"
        ) from error
    return PPOAgent(actor.to(place), critic.to(place), saved.get("log_std"), place)


def _said_of(error: Exception) -> str:
    """What a file lacks, in words: some errors are but a key or a byte."""
    if isinstance(error, KeyError) and error.args[0] in ("actor", "critic"):
        return f"it lacks {error}"
    if isinstance(error, (KeyError, UnpicklingError)):
        return "torch.save did not write it"
    return str(error) or "it is empty"
