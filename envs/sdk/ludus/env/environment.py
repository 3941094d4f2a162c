"""The base class of environments, and the renderer that language models play through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ludus.env.types import (
    Action,
    ActionT,
    JsonObject,
    Message,
    Observation,
    ObservationT,
    ReturnRange,
    State,
    StateT,
    TaskSet,
    Tool,
    ToolResult,
    Transition,
)
from ludus.proto.errors import ToolError

ReadActionT = TypeVar("ReadActionT", bound=Action, covariant=True)
ShownObservationT = TypeVar("ShownObservationT", bound=Observation, contravariant=True)


class TextRenderer(Protocol[ReadActionT, ShownObservationT]):
    """Converts observations to messages, and completions to actions.

    A renderer for which every text is an action has an attribute `takes_any_text = True`;
    otherwise `check_environment` requires that it refuses nonsense.
    """

    def render(self, observation: ShownObservationT, *, first: bool) -> list[Message]:
        """Return the messages of an observation; `first` is True after a reset."""

    def parse(self, text: str, observation: ShownObservationT) -> ReadActionT:
        """Return the action that a completion means.

        Raises:
            ActionParseError: the text is not a legal action.
        """

    def legal_answers(self, observation: ShownObservationT) -> list[str]:
        """Return the legal actions as text that `parse` accepts; empty if they cannot be listed."""


def takes_any_text(renderer: TextRenderer[Any, Any] | None) -> bool:
    """Return True if the renderer declares that every text is an action."""
    return bool(getattr(renderer, "takes_any_text", False))


class Environment(ABC, Generic[ActionT, ObservationT, StateT]):
    """An environment: one player's session, one episode at a time.

    `ludus.env.check.check_environment` checks this contract: equal seeds and actions give equal
    episodes, bit for bit, whatever else the process does. All randomness must therefore come from
    generators that `reset(seed=...)` makes, never from global state.
    """

    action_type: ClassVar[type[Action]]
    observation_type: ClassVar[type[Observation]]
    state_type: ClassVar[type[State]] = State
    name: ClassVar[str] = ""
    description: ClassVar[str] = ""
    version: ClassVar[str] = "0.1.0"
    steps_on_event_loop: ClassVar[bool] = False
    """True promises that reset and step return within about a millisecond and never block. The
    server then calls them on the event loop."""

    one_per_process: ClassVar[bool] = False
    """True if a process can have only one environment of the class. Making a second one raises
    CapacityError, so a server with several sessions needs `isolation="process"`."""

    needs_network: ClassVar[bool] = True
    """False declares that it opens no IP sockets. Its workers then cannot open any."""

    is_game: bool = False
    """True for a game, whose episodes are won, drawn or lost. False for tasks, which are solved or
    not. Tables, progress and reports use these words."""

    text_renderer: TextRenderer[Any, Any] | None = None
    """Renderer for language models; None if they cannot play."""

    @property
    def options(self) -> JsonObject:
        """Options that this environment was made with, for people and reports."""
        return {}

    @property
    def tasks(self) -> TaskSet | None:
        """Tasks behind the seeds; None if every seed is a different task."""
        return None

    @property
    def return_range(self) -> ReturnRange | None:
        """Possible returns of an episode; None if they are unknown or have no bounds.

        A run chooses the reward of an invalid action from it.
        """
        return None

    @abstractmethod
    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[ObservationT]:
        """Start a new episode and return its first observation, without a reward.

        Args:
            seed: fixes all randomness of the episode; None draws a random seed.
            options: additional keyword arguments that an environment may declare by name.
        """

    @abstractmethod
    def step(self, action: ActionT) -> Transition[ObservationT]:
        """Take a step and return its result.

        Raises:
            IllegalActionError: the rules forbid the action; the episode is unchanged.
        """

    @property
    @abstractmethod
    def state(self) -> StateT:
        """State of the episode."""

    @property
    def tools(self) -> list[Tool]:
        """Tools that a player may call between steps; empty by default."""
        return []

    def call_tool(self, name: str, arguments: JsonObject) -> JsonObject | ToolResult:
        """Call a tool and return its result as a JSON object.

        A `ToolResult` adds a reward to the episode or ends it.

        Raises:
            ToolError: the tool does not exist, or it failed; the episode continues.
        """
        names = ", ".join(tool.name for tool in self.tools) or "none"
        raise ToolError(f"this environment has no tool {name!r}; its tools are: {names}")

    def close(self) -> None:
        """Free the environment's resources; called once, also after errors."""
        return None


AnyEnvironment = Environment[Any, Any, Any]
"""An environment of any type."""

Builder = Callable[..., AnyEnvironment]
"""A function that makes an environment from options, given as keyword arguments."""
