"""Modules that register environments of Gymnasium when they are imported."""

from __future__ import annotations

import importlib.util
import re

_MODULES_BY_ID = {
    r"ALE/": "ale_py",
    r"MiniGrid-|BabyAI-": "minigrid",
    r"\w*BulletEnv-": "pybullet_envs_gymnasium",
}
"""Modules by a pattern for the start of their ids."""

_PACKAGE_NAMES = {
    "ale_py": "ale-py",
    "pybullet_envs_gymnasium": "pybullet pybullet-envs-gymnasium",
}
"""Names of packages that differ from those of their modules."""


def find_package_name(module: str) -> str:
    """Return the name with which a module is installed."""
    top_module = module.partition(".")[0]
    return _PACKAGE_NAMES.get(top_module, top_module)


def suggest_registering_module(env_id: str) -> str:
    """Return the target that imports the module of an id first; "" if the module is unknown."""
    for pattern, module in _MODULES_BY_ID.items():
        if re.match(pattern, env_id):
            is_installed = importlib.util.find_spec(module) is not None
            command = "" if is_installed else f"pip install {find_package_name(module)}, then "
            return f"{command}use the target gymnasium:{module}:{env_id}"
    return ""
