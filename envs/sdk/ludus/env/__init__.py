"""Environment SDK: write an environment once, serve it on every wire, drive it from anywhere."""

from ludus.env.environment import Environment, TextFace
from ludus.env.types import (
    Action,
    EnvironmentDescription,
    Message,
    Observation,
    PolicyProbe,
    State,
    StepResult,
    TextView,
    Transition,
)

__all__ = [
    "Action",
    "Environment",
    "EnvironmentDescription",
    "Message",
    "Observation",
    "PolicyProbe",
    "State",
    "StepResult",
    "TextFace",
    "TextView",
    "Transition",
]
