"""Verification of recordings: play the episodes again and compare.

RecordedEpisode --replay_episode--> Replay: no difference, or the first one
                      |
                      +-- client of a server at an address, or of a local server
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
from ludus.env.types import StepResult, ToolResult
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


def make_recorded_factory(episode: RecordedEpisode) -> TargetFactory:
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
        difference = _compare_results(episode.first, first_result)
        if difference:
            return Replay(episode, 0, f"reset: {difference}")
        for step_number, step in enumerate(episode.steps, 1):
            difference = await _repeat_step(session, step)
            if difference:
                return Replay(episode, step_number, f"step {step_number}: {difference}")
        return Replay(episode, len(episode.steps))
    finally:
        await session.close()


async def _repeat_step(session: AsyncSession, step: RecordedStep) -> str:
    """Repeat a step and return the difference, or "" if there is none."""
    try:
        if step.tool is not None:
            tool_result = await session.call_tool(step.tool, step.arguments or {})
            return _compare_tool_results(step, tool_result)
        if step.text is not None:
            step_result = await session.step(text=step.text)
        else:
            step_result = await session.step(step.action)
    except InfrastructureError:
        raise
    except EnvError as error:
        code = str(error.code)
        if code == step.error:
            return ""
        return f"expected {_describe_expected(step)}, got {code}: {error}"
    if step.result is None:
        return f"expected {_describe_expected(step)}, got a result"
    return _compare_results(step.result, step_result)


def _compare_tool_results(step: RecordedStep, tool_result: ToolResult) -> str:
    content = tool_result.content
    if step.tool_hash is None:
        return f"expected {_describe_expected(step)} from the tool {step.tool!r}, got {content}"
    tool_hash = hash_observation(content)
    if tool_hash != step.tool_hash:
        return (
            f"expected the recorded result of the tool {step.tool!r} (hash {step.tool_hash}), got"
            f" {content} (hash {tool_hash})"
        )
    return _compare_effects(step.result or RecordedResult(observation_hash=tool_hash), tool_result)


def _describe_expected(step: RecordedStep) -> str:
    return f"the error {step.error}" if step.error else "a result"


def _compare_effects(recording: RecordedResult, replay: StepResult | ToolResult) -> str:
    """Compare the rewards, the flags and the success."""
    for name in ("reward", "terminated", "truncated", "success"):
        expected, actual = getattr(recording, name), getattr(replay, name)
        is_unknown = name == "success" and expected is None
        if expected != actual and not is_unknown:
            return f"expected {name} {expected}, got {actual}"
    return ""


def _compare_results(recording: RecordedResult, replay: StepResult) -> str:
    if difference := _compare_effects(recording, replay):
        return difference
    observation_hash = hash_observation(replay.observation, replay.tensors)
    if observation_hash == recording.observation_hash:
        return ""
    if recording.observation is None:
        return f"expected observation hash {recording.observation_hash}, got {observation_hash}"
    return f"expected observation {recording.observation}, got {replay.observation}"
