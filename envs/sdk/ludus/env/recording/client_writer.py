"""Writing down what a client plays, in the form of a server's recording."""

from __future__ import annotations

import secrets
from pathlib import Path

from ludus.env.recording.file import RecordingFile
from ludus.env.recording.format import (
    RecordedEnvironment,
    RecordedEpisode,
    RecordedResult,
    RecordedStep,
    hash_observation,
    timestamp,
)
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult


class EpisodeWriter:
    """Appends one player's episodes to a file, one after the other.

    Args:
        target: what makes the environment again; empty where that is not known.
    """

    def __init__(
        self, path: Path, description: EnvironmentDescription, target: str, options: JsonObject
    ) -> None:
        self._file = RecordingFile(path)
        self._environment = RecordedEnvironment(
            name=description.name,
            version=description.version,
            target=target,
            options=options if target else description.options,
        )
        self._episode: RecordedEpisode | None = None

    def begin(self, seed: int, first: StepResult) -> None:
        """Start an episode."""
        self._episode = RecordedEpisode(
            environment=self._environment,
            episode_id=secrets.token_hex(8),
            seed=seed,
            first=_recorded(first),
            started_at=timestamp(),
        )

    def note(self, action: JsonObject | str, result: StepResult) -> None:
        """Add a step."""
        assert self._episode is not None, "an episode has begun"
        step = RecordedStep(text=action) if isinstance(action, str) else RecordedStep(action=action)
        step.result = _recorded(result)
        self._episode.steps.append(step)

    def end(self, reason: str) -> None:
        """Write the episode, if one has begun."""
        if self._episode is None:
            return
        self._episode.ended_at = timestamp()
        self._episode.end_reason = reason
        self._file.append(self._episode.model_dump_json(exclude_none=True).encode())
        self._file.close()
        self._episode = None


def _recorded(result: StepResult) -> RecordedResult:
    return RecordedResult(
        observation_hash=hash_observation(result.observation, result.tensors),
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        success=result.success,
        observation=result.observation,
    )
