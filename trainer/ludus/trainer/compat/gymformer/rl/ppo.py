"""PPO's settings, under Gymformer's names."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


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
