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
from pydantic import BaseModel, ConfigDict, ValidationError

from ludus.proto.errors import CheckpointError
from ludus.proto.runs import PolicyResult
from ludus.trainer.core.streams import VERSION as STREAMS_VERSION
from ludus.trainer.run.checkpoint import learner_folder

_AGENT_FILE = "agent.pt"
_STATE_FILE = "state.json"


class NetworkState(BaseModel):
    """Where a run stands between two steps."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    """Updates done."""
    num_episodes: int = 0
    """Those that have ended."""
    num_env_steps: int = 0
    returns: list[float] = []
    """Of each episode, where the run counts episodes."""
    has_reached_target: bool = False
    """Whether an evaluation reached ppo.target_return, which ends training."""
    streams: int = STREAMS_VERSION
    """Of the random numbers that all of it came from."""
    start: dict[str, PolicyResult] = {}
    """The policy before training, by environment, once it was judged."""


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


def read_network_state(checkpoint: Path) -> NetworkState:
    """Where the run stood.

    Raises:
        CheckpointError: it cannot be read, or drew other random numbers.
    """
    try:
        text = (checkpoint / _STATE_FILE).read_text(encoding="utf-8")
        state = NetworkState.model_validate_json(text)
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"checkpoint '{checkpoint}' cannot be read: {_STATE_FILE}: "
            f"{str(error).splitlines()[0]}; expected one of a run with model.kind = 'network'"
        ) from error
    if state.streams != STREAMS_VERSION:
        raise CheckpointError(
            f"checkpoint '{checkpoint}' expected streams of version {STREAMS_VERSION}, got "
            f"{state.streams}; continue with the version of Ludus that wrote it, or begin again"
        )
    return state
