"""Environment SDK: write an environment once, serve it on every wire, and play it anywhere."""

import os
from typing import TYPE_CHECKING, Any

# gRPC reads this during its import. Its support of forks does not cover asynchronous clients, and
# ends some forked processes by a segmentation fault, even if they do not use gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

if TYPE_CHECKING:
    from ludus.env.environment import Environment, TextRenderer
    from ludus.env.types import (
        Action,
        EnvironmentDescription,
        Message,
        Observation,
        PolicyChartPrompt,
        ReturnRange,
        State,
        StepResult,
        TaskSet,
        TextView,
        Tool,
        ToolResult,
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
    "ReturnRange",
    "State",
    "StepResult",
    "TaskSet",
    "TextRenderer",
    "TextView",
    "Tool",
    "ToolError",
    "ToolResult",
    "Transition",
]


def __getattr__(name: str) -> Any:
    # Importing pydantic takes longer than most programs of coding_env run, and the process that
    # runs those programs only needs `sandbox`.
    if name not in __all__:
        raise AttributeError(f"module 'ludus.env' has no attribute '{name}'")
    from ludus.env import environment, types

    # `environment` imports the names that it does not define from `types` and the errors.
    return getattr(types if hasattr(types, name) else environment, name)
