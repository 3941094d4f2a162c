"""What an environment is: one class to subclass, and its renderer for language models."""

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
    State,
    StateT,
    TaskSet,
    Tool,
    Transition,
)
from ludus.proto.errors import ToolError

ReadActionT = TypeVar("ReadActionT", bound=Action, covariant=True)
ShownObservationT = TypeVar("ShownObservationT", bound=Observation, contravariant=True)


class TextRenderer(Protocol[ReadActionT, ShownObservationT]):
    """How a language model sees an environment and answers it.

    A renderer for which every text is an action, nonsense included, says so with an attribute
    `takes_any_text = True`; `check_environment` else expects nonsense to be refused.
    """

    def render(self, observation: ShownObservationT, *, first: bool) -> list[Message]:
        """The messages that this observation adds; `first` is True right after a reset."""

    def parse(self, text: str, observation: ShownObservationT) -> ReadActionT:
        """The action that `text` means here.

        Raises:
            ActionParseError: no legal action can be read from the text.
        """

    def legal_answers(self, observation: ShownObservationT) -> list[str]:
        """The legal actions as text that `parse` reads back; empty when they cannot be listed."""


def takes_any_text(renderer: TextRenderer[Any, Any] | None) -> bool:
    """Whether the renderer says that every text is an action; False where there is none."""
    return bool(getattr(renderer, "takes_any_text", False))


class Environment(ABC, Generic[ActionT, ObservationT, StateT]):
    """One environment instance: one player's session, one episode at a time.

    Contract, checked by `ludus.env.check.check_environment`: the same seed and the same
    actions give the same episode, bit for bit, whatever else the process does. So all
    randomness comes from generators that `reset(seed=...)` makes, never from global state.
    """

    action_type: ClassVar[type[Action]]
    observation_type: ClassVar[type[Observation]]
    state_type: ClassVar[type[State]] = State
    name: ClassVar[str] = ""
    description: ClassVar[str] = ""
    version: ClassVar[str] = "0.1.0"
    steps_on_event_loop: ClassVar[bool] = False
    """True promises that reset and step return within about a millisecond, never block and
    never wait: the server then calls them without a thread hop."""

    one_per_process: ClassVar[bool] = False
    """True says that a process can hold only one at a time: making a second one is a
    CapacityError, and servers need `isolation="process"` to hold several sessions."""

    text_renderer: TextRenderer[Any, Any] | None = None
    """Set it to let language models play."""

    @property
    def options(self) -> JsonObject:
        """What this environment was built with, for people and reports."""
        return {}

    @property
    def tasks(self) -> TaskSet | None:
        """How many different tasks the seeds stand for; None where each is another one."""
        return None

    @abstractmethod
    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[ObservationT]:
        """The first observation of a new episode; reward None.

        Args:
            seed: fixes all randomness of the episode; None draws a fresh one.
            options: further keyword arguments an environment may declare by name.
        """

    @abstractmethod
    def step(self, action: ActionT) -> Transition[ObservationT]:
        """What the action led to.

        Raises:
            IllegalActionError: the rules do not allow it; the episode is unchanged.
        """

    @property
    @abstractmethod
    def state(self) -> StateT:
        """Where the episode stands."""

    @property
    def tools(self) -> list[Tool]:
        """The tools that a player may call between steps; none unless overridden."""
        return []

    def call_tool(self, name: str, arguments: JsonObject) -> JsonObject:
        """What the tool returned, as a JSON object.

        Raises:
            ToolError: there is no such tool, or it failed; the episode continues.
        """
        offered = ", ".join(tool.name for tool in self.tools) or "none"
        raise ToolError(f"expected one of the tools {offered}; got {name!r}")

    def close(self) -> None:
        """Frees what the environment holds; called once, also after errors."""
        return None


AnyEnvironment = Environment[Any, Any, Any]
"""An environment whose types do not matter here."""

Builder = Callable[..., AnyEnvironment]
"""Makes an environment of options, given as keyword arguments."""
