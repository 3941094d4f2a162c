"""Types of actions and results, from the environment to the client.

Action --step--> Transition  (in the environment: typed observation)
                    | server: JSON, text view, step number
                    v
                 StepResult  (in the client: content of the message)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypedDict, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ludus.proto.seeds import FIRST_EVAL_SEED

if TYPE_CHECKING:
    import numpy as np

JsonObject = dict[str, Any]


class Action(BaseModel):
    """An action of a player; subclass it with typed fields."""

    model_config = ConfigDict(extra="forbid")

    metadata: JsonObject = Field(default_factory=dict)

    @classmethod
    def from_json(cls, action_json: bytes) -> Self:
        """Parse an action, as `model_validate_json` does; override for a faster parser.

        Raises:
            ValidationError: the JSON does not match the fields.
        """
        action: Self = cls.__pydantic_validator__.validate_json(action_json)
        return action


class Observation(BaseModel):
    """An observation of a player; subclass it with typed fields."""

    model_config = ConfigDict(extra="forbid")

    metadata: JsonObject = Field(default_factory=dict)

    def to_json(self) -> bytes:
        """Encode the observation, as `model_dump_json` does; override for a faster encoder."""
        return self.__pydantic_serializer__.to_json(self)


class State(BaseModel):
    """The state of an episode, for people and tools, not for the player."""

    model_config = ConfigDict(extra="allow")

    episode_id: str | None = None
    step_count: int = 0


ActionT = TypeVar("ActionT", bound=Action)
ObservationT = TypeVar("ObservationT", bound=Observation)
StateT = TypeVar("StateT", bound=State)


MESSAGE_ROLES: Final = ("system", "user", "assistant", "tool")
"""Roles that a message of an environment or an agent can have."""


class Message(TypedDict):
    """A chat message; `role` is one of `MESSAGE_ROLES`, and `content` is text."""

    role: str
    content: str


def has_message_role(message: Any) -> TypeGuard[JsonObject]:
    """Return True if the value is a message whose role is one of `MESSAGE_ROLES`."""
    return isinstance(message, dict) and message.get("role") in MESSAGE_ROLES


def find_extra_field(message: Mapping[str, Any]) -> str | None:
    """Return the first field with a value that a `Message` cannot have, such as `tool_calls`."""
    for name, value in message.items():
        if name not in Message.__annotations__ and value not in (None, "", [], {}):
            return name
    return None


def format_extra_field_error(name: str, number: int) -> str:
    """Return the error for a message in a row of a data set with a field that cannot be shown."""
    return (
        f"message {number} has the field '{name}', which a prompt cannot show; write what the "
        "model needs into its content, or remove the field"
    )


@dataclass(frozen=True, slots=True)
class TextView:
    """The text of one observation for a language model."""

    messages: list[Message]
    """Messages that this observation adds to the conversation."""
    legal_answers: list[str] = field(default_factory=list)
    """Legal actions as text; empty if they cannot be listed."""


@dataclass(slots=True)
class Transition(Generic[ObservationT]):
    """The result of an environment's `reset` or `step`; must not be changed.

    It is not frozen, because every step makes one and a frozen dataclass takes three times as long
    to make.
    """

    observation: ObservationT
    reward: float | None = None
    """Reward of the step; None if there is none, for example after a reset."""
    terminated: bool = False
    """True if the rules ended the episode; the value of later states is zero."""
    truncated: bool = False
    """True if a limit outside the rules ended the episode; the value of later states is unknown."""
    info: JsonObject = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """Arrays that are too large for JSON, by name."""
    success: bool | None = None
    """True if the player solved or won the episode; set at its end.

    None if the environment does not define success, and before the end.
    """

    def encode_observation(self) -> tuple[bytes, JsonObject]:
        """Return the observation as JSON, and its metadata."""
        observation = self.observation
        return observation.to_json(), observation.metadata


@dataclass(frozen=True)
class StepResult:
    """The result of a `reset` or `step` that a client receives, over any wire."""

    observation: JsonObject
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: JsonObject = field(default_factory=dict)
    step_index: int = 0
    """Number of steps in this episode; 0 after a reset."""
    text: TextView | None = None
    """Text view; None if the environment has no text renderer."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    success: bool | None = None
    """True if the environment reports success at the end of the episode; None if it does not
    report success or failure."""

    @property
    def done(self) -> bool:
        """True if the episode is over, for either reason."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of an environment's sessions."""

    name: str
    description: str
    input_schema: JsonObject = field(default_factory=lambda: {"type": "object"})
    """JSON schema of the arguments, which are an object."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, in the environment and in the client.

    A tool call is not a step, so the number of steps stays the same.
    """

    content: JsonObject
    """Result for the player."""
    reward: float | None = None
    """Reward of the call, which is part of the episode's return; None if there is none."""
    terminated: bool = False
    """True if the call ended the episode by the rules."""
    truncated: bool = False
    """True if the call ended the episode by a limit outside the rules."""
    success: bool | None = None
    """True if the player solved or won the episode; None if it continues or is not judged."""

    @property
    def done(self) -> bool:
        """True if the call ended the episode, for either reason."""
        return self.terminated or self.truncated

    def update(self, result: StepResult) -> StepResult:
        """Return the last result of the episode with the reward and the end that this call adds."""
        return replace(
            result,
            reward=self.reward,
            terminated=self.terminated,
            truncated=self.truncated,
            success=self.success,
        )


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The tasks of an environment with a fixed number of tasks, such as the rows of a data set.

    Seeds 0 to `num_tasks` - 1 select each training task once, and so do the next `num_tasks` seeds,
    up to 2**31. Seeds from 2**31 do the same with the test tasks, or with the training
    tasks if there are no test tasks.
    """

    num_tasks: int
    """Number of training tasks."""
    num_test_tasks: int = 0
    """Number of test tasks."""
    columns: tuple[str, ...] = ()
    """Names of the task's columns, which the `info` of every result contains."""

    def find_first_seed(self, seed: int) -> int:
        """Return the seed of the first pass over the tasks at the same place as `seed`.

        Each pass may have a different order, so only the seeds of the first pass tell tasks apart.
        """
        first_seed, num_tasks = 0, self.num_tasks
        if seed >= FIRST_EVAL_SEED:
            first_seed, num_tasks = FIRST_EVAL_SEED, self.num_eval_tasks
        return first_seed + (seed - first_seed) % num_tasks if num_tasks else seed

    @property
    def num_eval_tasks(self) -> int:
        """Number of different tasks that seeds from 2**31 select."""
        return self.num_test_tasks or self.num_tasks


@dataclass(frozen=True, slots=True)
class ReturnRange:
    """The returns that an episode of an environment can have.

    Raises:
        ValueError: a bound is not finite, or the range is empty.
    """

    lowest: float
    highest: float

    def __post_init__(self) -> None:
        if not -math.inf < self.lowest < self.highest < math.inf:
            raise ValueError(
                "the lowest and the highest return must be different finite numbers in this order, "
                f"got {self.lowest} and {self.highest}"
            )

    @property
    def invalid_action_reward(self) -> float:
        """Reward of an invalid action, with which no episode ends above the lowest return.

        It is min(lowest, 0) - max(highest, (highest - lowest) / 2). An episode that has already
        earned the highest return ends with at most min(lowest, 0), and one that has earned nothing
        ends below the lowest return by half of the range or more.
        """
        return min(self.lowest, 0.0) - max(self.highest, (self.highest - self.lowest) / 2)


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """A server's description of its environment."""

    name: str
    description: str
    version: str
    action_schema: JsonObject
    observation_schema: JsonObject
    state_schema: JsonObject
    has_text_view: bool
    max_sessions: int
    options: JsonObject = field(default_factory=dict)
    """Options that the environment was made with, for example {"game": "blackjack"}."""
    reset_options: frozenset[str] | None = None
    """Names of reset's options in addition to `seed`; None means any."""
    is_deterministic: bool = False
    """True if a check found that equal seeds and actions give equal episodes."""
    tools: list[Tool] = field(default_factory=list)
    server_id: str = ""
    """Id of the server process or pod."""
    linger_s: float = 0.0
    """Default time that sessions survive the end of their connections."""
    idle_timeout_s: float = 0.0
    """Time without a call after which a session is closed; 0 if unknown."""
    tasks: TaskSet | None = None
    """Number of tasks; None if every seed is a different task, or if unknown."""
    takes_any_text: bool = False
    """True if every text is a legal action."""
    return_range: ReturnRange | None = None
    """Possible returns of an episode; None if the environment does not declare them."""
    is_game: bool = False
    """True for a game, whose episodes are won, drawn or lost; False for tasks, which are solved."""

    def takes_option(self, name: str) -> bool:
        """Return True if `reset` has an option of that name."""
        return self.reset_options is None or name in self.reset_options


@dataclass(frozen=True, slots=True)
class PolicyChartPrompt:
    """A situation in which a policy is evaluated, for charts and reports."""

    messages: list[Message]
    answers: list[str]
    """Completions to compare, for example ["HIT", "STAND"]."""
    reference: str
    """Best known completion."""
    panel: str
    row: str
    column: str
