"""Environment SDK: write an environment once, serve it on every wire, drive it from anywhere."""

from ludus.env.environment import Environment, TextRenderer
from ludus.env.types import (
    Action,
    EnvironmentDescription,
    Message,
    Observation,
    PolicyChartPrompt,
    State,
    StepResult,
    TaskSet,
    TextView,
    Tool,
    Transition,
)
from ludus.proto.errors import ToolError

__all__ = [
    "Action",
    "Environment",
    "EnvironmentDescription",
    "Message",
    "Observation",
    "PolicyChartPrompt",
    "State",
    "StepResult",
    "TaskSet",
    "TextRenderer",
    "TextView",
    "Tool",
    "ToolError",
    "Transition",
]
