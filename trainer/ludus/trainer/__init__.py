"""The trainer: rollouts, learner, weights, and the loops that connect them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludus.proto.config import LanguageModelRun
    from ludus.trainer.core.stopping import RunStopped
    from ludus.trainer.driver.loops.steps import Step
    from ludus.trainer.driver.policy import Policy
    from ludus.trainer.driver.sync_trainer import SyncTrainer, train
    from ludus.trainer.driver.trainer import Trainer

__all__ = ["LanguageModelRun", "Policy", "RunStopped", "Step", "SyncTrainer", "Trainer", "train"]
_MODULES = {
    "LanguageModelRun": "ludus.proto.config",
    "Policy": "ludus.trainer.driver.policy",
    "RunStopped": "ludus.trainer.core.stopping",
    "Step": "ludus.trainer.driver.loops.steps",
    "SyncTrainer": "ludus.trainer.driver.sync_trainer",
    "Trainer": "ludus.trainer.driver.trainer",
    "train": "ludus.trainer.driver.sync_trainer",
}


def __getattr__(name: str) -> Any:
    # torch and Ray take seconds to import, and most modules of this package need neither.
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ludus.trainer' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
