"""Forge's calls (https://github.com/meta-pytorch/torchforge) over what is here.

from ludus.trainer.compat.forge import setup_forge_training

trainer = await setup_forge_training("blackjack.yaml")
results = await trainer.run(steps=100)
completions = await trainer.policy.generate("hard 16 vs 10")
await trainer.shutdown()
"""

from ludus.trainer.compat.forge.configuration import ForgeConfig, load_forge_config
from ludus.trainer.compat.forge.data_models.completion import Completion
from ludus.trainer.compat.forge.training import GRPOTrainer, Results, setup_forge_training

__all__ = [
    "Completion",
    "ForgeConfig",
    "GRPOTrainer",
    "Results",
    "load_forge_config",
    "setup_forge_training",
]
