"""Forge's RLTrainer: the policy and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.forge.actor_support import (
    get_weight_exchange,
    make_actor_settings,
    mask_left_padding,
)
from ludus.trainer.compat.forge.controller.actor import ForgeActor, endpoint
from ludus.trainer.compat.forge.grpo import simple_grpo_loss
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.learner.learner import Learner
from ludus.trainer.learner.model import LogitsLoss
from ludus.trainer.learner.process_group import leave_process_group
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.run.schedule import compute_coefficients
from ludus.trainer.weights.payload import make_manifest

_CANARY_REQUESTS = (ScoringRequest([5, 6, 7, 8], [9, 10, 11, 12]),)
"""Canary requests, whose tokens exist in every vocabulary."""


@dataclass
class RLTrainer(ForgeActor):
    """A learner with one rank and a loss. The other fields are sections of Forge's `trainer`."""

    loss: Callable[..., Tensor] = simple_grpo_loss
    """Loss function: (logits, **target) -> scalar."""
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    lr_scheduler: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    compile: Mapping[str, Any] = field(default_factory=dict)
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    activation_checkpoint: Mapping[str, Any] = field(default_factory=dict)
    use_dcp: bool = False
    """Accepted for compatibility, without effect."""

    def setup(self) -> None:
        """Load the model and create its optimizer."""
        self._run, model_path = make_actor_settings(
            "trainer", vars(self), max_tokens=self.training.get("seq_len")
        )
        if self._run.learner.num_ranks > 1:
            raise ConfigError(
                f"parallelism.data_parallel_shard_degree = {self._run.learner.num_ranks} must be "
                "1, because this actor is a single rank; setup_forge_training trains on several"
            )
        self._pad_id = load_tokenizer(model_path).pad_token_id
        self._owns_process_group = not dist.is_initialized()
        if self._owns_process_group:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.learner = Learner(self._run, model_path)
        self._num_steps = 0

    @endpoint
    def train_step(
        self, inputs: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]]
    ) -> float:
        """Update the policy and return the loss, averaged over the data-parallel ranks.

        Args:
            inputs: "tokens" [B, S] for each rank; requests are padded on the left.
            targets: arguments of the loss in addition to the logits, for each rank.
        """
        if len(inputs) != len(targets) or not inputs:
            raise ConfigError(
                f"inputs and targets must have the same length, at least 1, got {len(inputs)} and "
                f"{len(targets)}"
            )
        learning_rate = compute_coefficients(self._run, self._num_steps).learning_rate
        losses = []
        for rank_inputs, target in zip(inputs, targets, strict=True):
            token_ids = rank_inputs["tokens"]
            mask, position_ids = mask_left_padding(token_ids, self._pad_id)
            loss_function = partial(self._compute_loss, target)
            losses.append(LogitsLoss(token_ids, mask, position_ids, loss_function))
        mean_loss = self.learner.step_on_logits(losses, learning_rate)
        self._num_steps += 1
        return mean_loss

    @endpoint
    def push_weights(self, policy_version: int) -> None:
        """Publish the policy for the Generators of this process."""
        state = self.learner.gather_weights()
        logprobs = self.learner.score_completions(_CANARY_REQUESTS)
        rounding_error = self.learner.measure_rounding(_CANARY_REQUESTS, logprobs)
        manifest = make_manifest(policy_version, state, _CANARY_REQUESTS, logprobs, rounding_error)
        get_weight_exchange().push(manifest, state)

    async def shutdown(self) -> None:
        """Release the model, and leave the process group if this actor created it."""
        del self.learner
        if self._owns_process_group and dist.is_initialized():
            leave_process_group()

    def _compute_loss(self, target: Mapping[str, Tensor], logits: Tensor) -> Tensor:
        moved_target = {
            name: argument.to(logits.device) if isinstance(argument, Tensor) else argument
            for name, argument in target.items()
        }
        return self.loss(logits, **moved_target)
