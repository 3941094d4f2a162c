"""The training plane: rollouts, learner, weights, and the loops that join them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludus.trainer.driver.parts import Step
    from ludus.trainer.driver.trainer import Policy, Stopped, Trainer

__all__ = ["Policy", "Step", "Stopped", "Trainer"]


def __getattr__(name: str) -> Any:
    # torch and Ray take seconds to import, and most of what lies here needs neither.
    if name == "Step":
        from ludus.trainer.driver.parts import Step

        return Step
    if name in __all__:
        from ludus.trainer.driver import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'ludus.trainer' has no attribute '{name}'")
