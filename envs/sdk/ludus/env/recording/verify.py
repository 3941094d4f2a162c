"""Playing recorded episodes again, to see that they go the same way.

RecordedEpisode --replay_episode--> Replay: same, or the first difference
                      |
                      +-- a client: of the server at an address, or of one started here
"""

from __future__ import annotations

from dataclasses import dataclass

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.recording.format import (
    RecordedEpisode,
    RecordedResult,
    RecordedStep,
    hash_json,
    hash_observation,
)
from ludus.env.targets.targets import TargetFactory, environment_factory
from ludus.env.types import JsonObject, StepResult
from ludus.proto.errors import ConfigError, EnvError, InfrastructureError


@dataclass(frozen=True, slots=True)
class Replay:
    """How one episode went when it was played again."""

    episode: RecordedEpisode
    num_steps: int
    """Steps that were taken again."""
    difference: str = ""
    """The first difference; empty where all was the same."""

    @property
    def is_same(self) -> bool:
        """True when nothing differed."""
        return not self.difference


def recorded_factory(episode: RecordedEpisode) -> TargetFactory:
    """What makes the environment of a recording.

    Raises:
        ConfigError: the recording does not say; the message does.
        NotFoundError: it is not installed here.
    """
    environment = episode.environment
    target = environment.target or environment.name
    if not target:
        raise ConfigError("expected a recording that names its environment; name a target or URL")
    return environment_factory(target, environment.options)


async def replay_episode(client: AsyncEnvClient, episode: RecordedEpisode) -> Replay:
    """The episode once more on the client's server, compared step by step.

    Raises:
        InfrastructureError: the server went away.
    """
    try:
        session, first = await client.open(
            seed=episode.seed, options=episode.reset_options, episode_id=episode.episode_id
        )
    except InfrastructureError:
        raise
    except EnvError as error:
        return Replay(episode, 0, f"reset: expected a result, got {error.code}: {error}")
    try:
        difference = _difference(episode.first, first)
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
    """What differed this time; empty where nothing did."""
    try:
        if step.tool is not None:
            returned = await session.call_tool(step.tool, step.arguments or {})
            return _difference_of_tool(step, returned)
        if step.text is not None:
            result = await session.step(text=step.text)
        else:
            result = await session.step(step.action)
    except InfrastructureError:
        raise
    except EnvError as error:
        code = str(error.code)
        return "" if code == step.error else f"expected {_wanted(step)}, got {code}: {error}"
    if step.result is None:
        return f"expected {_wanted(step)}, got a result"
    return _difference(step.result, result)


def _difference_of_tool(step: RecordedStep, returned: JsonObject) -> str:
    if step.tool_hash is None:
        return f"expected {_wanted(step)} from the tool {step.tool!r}, got {returned}"
    found = hash_json(returned)
    if found == step.tool_hash:
        return ""
    return (
        f"expected the tool {step.tool!r} to return what it did (hash {step.tool_hash}), got"
        f" {returned} ({found})"
    )


def _wanted(step: RecordedStep) -> str:
    return f"the error {step.error}" if step.error else "a result"


def _difference(recorded: RecordedResult, result: StepResult) -> str:
    for name in ("reward", "terminated", "truncated"):
        before, now = getattr(recorded, name), getattr(result, name)
        if before != now:
            return f"expected {name} {before}, got {now}"
    if recorded.success not in (None, result.success):
        return f"expected success {recorded.success}, got {result.success}"
    found = hash_observation(result.observation, result.tensors)
    if found == recorded.observation_hash:
        return ""
    if recorded.observation is None:
        return f"expected another observation (hash {recorded.observation_hash}), got {found}"
    return f"expected observation {recorded.observation}, got {result.observation}"
