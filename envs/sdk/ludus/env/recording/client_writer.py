"""A writer of the episodes that a client plays, in the format of a server's recording."""

from __future__ import annotations

import secrets
from pathlib import Path

from ludus.env.recording.file import RecordingFile
from ludus.env.recording.format import (
    RecordedEnvironment,
    RecordedEpisode,
    RecordedStep,
    record_result,
    timestamp,
)
from ludus.env.types import EnvironmentDescription, JsonObject, StepResult


class EpisodeWriter:
    """Appends the episodes of one player to a file.

    Args:
        target: target of the environment, for replays; "" if unknown.
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
            first=record_result(first, first.observation, keep_observation=True),
            started_at=timestamp(),
        )

    def add_step(self, action: JsonObject | str, result: StepResult) -> None:
        """Add a step to the episode."""
        assert self._episode is not None, "an episode has begun"
        step = RecordedStep(text=action) if isinstance(action, str) else RecordedStep(action=action)
        step.result = record_result(result, result.observation, keep_observation=True)
        self._episode.steps.append(step)

    def end(self, reason: str) -> None:
        """Write the episode, if there is one."""
        if self._episode is None:
            return
        self._episode.ended_at = timestamp()
        self._episode.end_reason = reason
        self._file.append(self._episode.model_dump_json(exclude_none=True).encode())
        self._file.close()
        self._episode = None
