"""The checkpoint of a network run: its state, and the state of the agent.

step-00000050/
    learner/agent.pt   policy, optimizer, statistics, and the unfinished episodes
    state.json         NetworkState
    files.json         the sizes of both files
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
    """State of a network run between two training steps."""

    num_episodes: int = 0
    """Number of finished episodes."""
    num_env_steps: int = 0
    returns: list[float] = Field(default_factory=list)
    """Return of each episode, if the run has an episode budget."""
    has_reached_target: bool = False
    """True after an evaluation reached ppo.target_return, which stops training."""


def write_agent(checkpoint: Path, state: dict[str, Any]) -> Path:
    """Write an agent's state, and return the file."""
    folder = learner_folder(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _AGENT_FILE
    torch.save(state, file)
    return file


def read_agent(checkpoint: Path) -> dict[str, Any]:
    """Return an agent's state.

    Raises:
        CheckpointError: the file cannot be read.
    """
    file = learner_folder(checkpoint) / _AGENT_FILE
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint '{checkpoint}' cannot be read: {file.name}: {error}; remove its folder to "
            "continue from the previous checkpoint, or start again with --overwrite"
        ) from error
    return state
