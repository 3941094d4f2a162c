"""Verification of recordings: play the episodes again and compare.

RecordedEpisode --replay_episode--> Replay: same, or the first difference
                      |
                      +-- a client of a server at an address, or of a local server
"""

from __future__ import annotations

from dataclasses import dataclass

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.recording.format import (
    RecordedEpisode,
    RecordedResult,
    RecordedStep,
    hash_observation,
)
from ludus.env.targets.targets import TargetFactory, environment_factory
from ludus.env.types import JsonObject, StepResult
from ludus.proto.errors import ConfigError, EnvError, InfrastructureError


@dataclass(frozen=True, slots=True)
class Replay:
    """The comparison of an episode with its replay."""

    episode: RecordedEpisode
    num_steps: int
    """Number of replayed steps."""
    difference: str = ""
    """First difference; "" if there is none."""

    @property
    def is_same(self) -> bool:
        """True if the replay is the same."""
        return not self.difference


def recorded_factory(episode: RecordedEpisode) -> TargetFactory:
    """Return a factory of the recording's environment.

    Raises:
        ConfigError: the recording does not name its environment.
        NotFoundError: the environment is not installed.
    """
    environment = episode.environment
    target = environment.target or environment.name
    if not target:
        raise ConfigError("the recording does not name its environment; name a target or URL")
    return environment_factory(target, environment.options)


async def replay_episode(client: AsyncEnvClient, episode: RecordedEpisode) -> Replay:
    """Play the episode again on the client's server and compare each step.

    Raises:
        InfrastructureError: the connection to the server was lost.
    """
    try:
        session, first_result = await client.open(
            seed=episode.seed, options=episode.reset_options, episode_id=episode.episode_id
        )
    except InfrastructureError:
        raise
    except EnvError as error:
        return Replay(episode, 0, f"reset: expected a result, got {error.code}: {error}")
    try:
        difference = _difference(episode.first, first_result)
        if difference:
            return Replay(episode, 0, f"reset: {difference}")
        for number, step in enumerate(episode.steps, 1):
            difference = await _repeat(session, step)
            if difference:
                return Replay(episode, number, f"step {number}: {difference}")
        return Replay(episode, len(episode.steps))
    finally:
        await session.close()


async def _repeat(session: AsyncSession, step: RecordedStep) -> str:
    """Repeat a step and return the difference, or "" if there is none."""
    try:
        if step.tool is not None:
            returned = await session.call_tool(step.tool, step.arguments or {})
            return _tool_difference(step, returned)
        if step.text is not None:
            result = await session.step(text=step.text)
        else:
            result = await session.step(step.action)
    except InfrastructureError:
        raise
    except EnvError as error:
        code = str(error.code)
        if code == step.error:
            return ""
        return f"expected {_describe_expected(step)}, got {code}: {error}"
    if step.result is None:
        return f"expected {_describe_expected(step)}, got a result"
    return _difference(step.result, result)


def _tool_difference(step: RecordedStep, returned: JsonObject) -> str:
    if step.tool_hash is None:
        return f"expected {_describe_expected(step)} from the tool {step.tool!r}, got {returned}"
    tool_hash = hash_observation(returned)
    if tool_hash == step.tool_hash:
        return ""
    return (
        f"expected the recorded result of the tool {step.tool!r} (hash {step.tool_hash}), got"
        f" {returned} (hash {tool_hash})"
    )


def _describe_expected(step: RecordedStep) -> str:
    return f"the error {step.error}" if step.error else "a result"


def _difference(recorded: RecordedResult, result: StepResult) -> str:
    for name in ("reward", "terminated", "truncated"):
        recorded_value, value = getattr(recorded, name), getattr(result, name)
        if recorded_value != value:
            return f"expected {name} {recorded_value}, got {value}"
    if recorded.success not in (None, result.success):
        return f"expected success {recorded.success}, got {result.success}"
    observation_hash = hash_observation(result.observation, result.tensors)
    if observation_hash == recorded.observation_hash:
        return ""
    if recorded.observation is None:
        return f"expected observation hash {recorded.observation_hash}, got {observation_hash}"
    return f"expected observation {recorded.observation}, got {result.observation}"
