"""The API of Forge (https://github.com/meta-pytorch/torchforge), implemented by Ludus.

A run, as in Forge's tutorial:

    trainer = await setup_forge_training("blackjack.yaml")
    results = await trainer.run(steps=100)
    completions = await trainer.policy.generate("hard 16 vs 10")
    await trainer.shutdown()

A custom loop in this process can use Generator, RLTrainer, ReplayBuffer, ReferenceModel and
ComputeAdvantages. Custom actors use ForgeActor and `endpoint`.
"""

from ludus.trainer.compat.forge.actors.generator import Generator
from ludus.trainer.compat.forge.actors.reference_model import ReferenceModel
from ludus.trainer.compat.forge.actors.replay_buffer import ReplayBuffer
from ludus.trainer.compat.forge.actors.trainer import RLTrainer
from ludus.trainer.compat.forge.configuration import ForgeConfig, load_forge_config
from ludus.trainer.compat.forge.controller.actor import ForgeActor, endpoint
from ludus.trainer.compat.forge.data_models.completion import Completion
from ludus.trainer.compat.forge.grpo import ComputeAdvantages, compute_logprobs, simple_grpo_loss
from ludus.trainer.compat.forge.training import GRPOTrainer, Results, setup_forge_training

__all__ = [
    "Completion",
    "ComputeAdvantages",
    "ForgeActor",
    "ForgeConfig",
    "GRPOTrainer",
    "Generator",
    "RLTrainer",
    "ReferenceModel",
    "ReplayBuffer",
    "Results",
    "compute_logprobs",
    "endpoint",
    "load_forge_config",
    "setup_forge_training",
    "simple_grpo_loss",
]
