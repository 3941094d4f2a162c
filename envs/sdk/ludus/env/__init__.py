"""Environment SDK: write an environment once, serve it on every wire, drive it from anywhere."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    # Pydantic takes longer to import than most programs of coding_env take to run, and of all this
    # the process that runs them needs `sandbox` alone.
    if name not in __all__:
        raise AttributeError(f"module 'ludus.env' has no attribute '{name}'")
    from ludus.env import environment, types

    # Where a name is not its own, `environment` has it from `types` or from the errors.
    return getattr(types if hasattr(types, name) else environment, name)
