"""What a checkpoint of classic PPO holds: where the run stands, and the agent.

step-00000050/
    learner/agent.pt   policy, optimizer, statistics, and the episodes under way
    state.json         NetworkState
    files.json         the sizes of both
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from ludus.proto.errors import CheckpointError
from ludus.trainer.run.checkpoint import SavedState, learner_folder

_AGENT_FILE = "agent.pt"


class NetworkState(SavedState):
    """The state of a network's run between two steps."""

    num_episodes: int = 0
    """Number of finished episodes."""
    num_env_steps: int = 0
    returns: list[float] = Field(default_factory=list)
    """Return of each episode, if the run counts episodes."""
    has_reached_target: bool = False
    """True after an evaluation reached ppo.target_return, which ends training."""


def write_agent(checkpoint: Path, state: dict[str, Any]) -> Path:
    """The file that now holds an agent's state."""
    folder = learner_folder(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _AGENT_FILE
    torch.save(state, file)
    return file


def read_agent(checkpoint: Path) -> dict[str, Any]:
    """An agent's state; nothing but tensors and plain values is read.

    Raises:
        CheckpointError: it cannot be read.
    """
    file = learner_folder(checkpoint) / _AGENT_FILE
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint '{checkpoint}' cannot be read: {file.name}: {error}; remove its folder to "
            "continue from the one before, or start again with --overwrite"
        ) from error
    return state
