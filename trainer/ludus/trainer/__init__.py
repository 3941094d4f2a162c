"""The trainer: rollouts, learner, weights, and the loops that connect them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludus.trainer.core.stopping import RunStopped
    from ludus.trainer.driver.loops.steps import Step
    from ludus.trainer.driver.policy import Policy
    from ludus.trainer.driver.trainer import Trainer

__all__ = ["Policy", "RunStopped", "Step", "Trainer"]
_MODULES = {
    "Policy": "driver.policy",
    "RunStopped": "core.stopping",
    "Step": "driver.loops.steps",
    "Trainer": "driver.trainer",
}


def __getattr__(name: str) -> Any:
    # torch and Ray take seconds to import, and most modules of this package need neither.
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"ludus.trainer.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'ludus.trainer' has no attribute '{name}'")
