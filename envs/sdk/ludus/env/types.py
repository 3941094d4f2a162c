"""The types of the environment plane, one per stage.

Action --step--> Transition  (environment's side: typed observation)
                    | server: JSON, text view, step number
                    v
                 StepResult  (client's side: what came over the wire)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import numpy as np

JsonObject = dict[str, Any]


class Action(BaseModel):
    """What a player does; subclass it with typed fields."""

    model_config = ConfigDict(extra="forbid")

    metadata: JsonObject = Field(default_factory=dict)

    @classmethod
    def from_json(cls, action_json: bytes) -> Self:
        """What `model_validate_json` gives; override it where the same can be had cheaper.

        Raises:
            ValidationError: the JSON does not fit.
        """
        return cls.__pydantic_validator__.validate_json(action_json)


class Observation(BaseModel):
    """What a player sees; subclass it with typed fields."""

    model_config = ConfigDict(extra="forbid")

    metadata: JsonObject = Field(default_factory=dict)

    def to_json(self) -> bytes:
        """What `model_dump_json` gives; override it where the same can be written cheaper."""
        return self.__pydantic_serializer__.to_json(self)


class State(BaseModel):
    """Where an episode stands, for people and tools, not for the player."""

    model_config = ConfigDict(extra="allow")

    episode_id: str | None = None
    step_count: int = 0


ActionT = TypeVar("ActionT", bound=Action)
ObservationT = TypeVar("ObservationT", bound=Observation)
StateT = TypeVar("StateT", bound=State)


class Message(TypedDict):
    """One chat message; `content` is text."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextView:
    """What a language model is shown for one observation."""

    messages: list[Message]
    """The messages this observation adds to the conversation."""
    legal_answers: list[str] = field(default_factory=list)
    """The legal actions as text; empty when they cannot be listed."""


@dataclass(slots=True)
class Transition(Generic[ObservationT]):
    """What one `reset` or `step` of an environment returns; nobody changes one.

    It is not frozen because there is one for every step, and making a frozen one takes three
    times as long.
    """

    observation: ObservationT
    reward: float | None = None
    """None where nothing was scored: always after a reset."""
    terminated: bool = False
    """The rules ended the episode: the value of what follows is zero."""
    truncated: bool = False
    """A limit outside the rules ended it: what would have followed is unknown."""
    info: JsonObject = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """Arrays too large for JSON, by name."""
    success: bool | None = None
    """Said with the end of an episode: whether the player did what was asked, or won. None where
    the environment has no such notion, and always before the end."""

    def encoded_observation(self) -> tuple[bytes, JsonObject]:
        """The observation as JSON, and its metadata."""
        observation = self.observation
        return observation.to_json(), observation.metadata


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a client gets for one `reset` or `step`, over any wire."""

    observation: JsonObject
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: JsonObject = field(default_factory=dict)
    step_index: int = 0
    """Steps taken in this episode; 0 after a reset."""
    text: TextView | None = None
    """Present when the environment has a text renderer."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    success: bool | None = None
    """Whether the episode that ended here succeeded, as its environment says; None where it does
    not say."""

    @property
    def done(self) -> bool:
        """True when the episode is over, for either reason."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that an environment offers in its sessions."""

    name: str
    description: str
    input_schema: JsonObject = field(default_factory=lambda: {"type": "object"})
    """JSON schema of the arguments, an object."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The tasks of an environment that has so many of them: rows of a data set.

    Seeds 0 to `num_tasks` - 1 show each task of training once, in some order, the next ones each
    of them once more, and so on below 2**31. From 2**31 on it is the same with the tasks that are
    held back; where none are, with those of training.
    """

    num_tasks: int
    """For training."""
    num_test_tasks: int = 0
    """Held back."""
    columns: tuple[str, ...] = ()
    """The names that `info` has in every result of an episode."""


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """What an environment server says of itself."""

    name: str
    description: str
    version: str
    action_schema: JsonObject
    observation_schema: JsonObject
    state_schema: JsonObject
    has_text_view: bool
    max_sessions: int
    options: JsonObject = field(default_factory=dict)
    """What the environment was built with, for example {"game": "blackjack"}."""
    reset_options: frozenset[str] | None = None
    """The names that `reset` takes beside `seed`; None means any."""
    is_deterministic: bool = False
    """The same seed and actions were seen to give the same episode."""
    tools: list[Tool] = field(default_factory=list)
    server_id: str = ""
    """The server process (or pod) that answers."""
    linger_s: float = 0.0
    """Sessions outlive the connection that opened them by so long without asking for it."""
    idle_timeout_s: float = 0.0
    """Sessions without a call for so long are ended; 0 where that is not known."""
    tasks: TaskSet | None = None
    """Where they can be counted; None where every seed is another one, or nobody says."""
    takes_any_text: bool = False
    """Every text of a player is an action, nonsense included."""

    def takes_option(self, name: str) -> bool:
        """True when `reset` takes an option of that name."""
        return self.reset_options is None or name in self.reset_options


@dataclass(frozen=True, slots=True)
class PolicyChartPrompt:
    """One situation in which a policy is asked what it would do, for charts and reports."""

    messages: list[Message]
    answers: list[str]
    """The answers to compare, for example ["HIT", "STAND"]."""
    reference: str
    """The best answer known."""
    panel: str
    row: str
    column: str
