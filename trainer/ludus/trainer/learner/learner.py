"""One rank of the learner: training steps, the weights to publish, the state to save.

    Batch --split--> minibatches --pack--> micro-batches
                                             |  for the whole step, before any update
                                             v
                       policy, reference: LossTargets (old log-probs, advantages, returns)
                                             |  minibatch by minibatch
                                             v
                       forward, loss, backward for each micro-batch; clip; AdamW

Every method is a collective: all ranks must call it with equal arguments, otherwise they hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ludus.proto.config import (
    HeadCritic,
    LanguageModelRun,
    LearnerConfig,
    ModelCritic,
    PpoConfig,
)
from ludus.trainer.core.streams import Stream, seed_torch
from ludus.trainer.core.types import Batch, Coefficients, SavedFile, ScoringRequest, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner import lora
from ludus.trainer.learner.abandonment import StepAbandonedError, StepAbandonment
from ludus.trainer.learner.actor_critic import ActorCritic
from ludus.trainer.learner.algorithm import Algorithm, LossTargets
from ludus.trainer.learner.construction import ModelLoader
from ludus.trainer.learner.micro_batches import (
    MicroBatch,
    MicroBatchConfig,
    make_micro_batches,
    make_unscored_sample,
    split_samples,
)
from ludus.trainer.learner.model import (
    EntropyMode,
    LogitsLoss,
    PolicyModel,
    PolicyOutput,
    estimate_row_costs,
    gather_parameters,
)
from ludus.trainer.learner.model_export import ExportSettings, export_model
from ludus.trainer.learner.process_group import select_device
from ludus.trainer.learner.rounding import change_rounding, compute_max_difference
from ludus.trainer.learner.saved_state import LearnerState
from ludus.trainer.learner.step_metrics import (
    StepMetrics,
    TrainingWork,
    make_step_metrics,
    sum_metrics,
)
from ludus.trainer.learner.tree_check import can_pack_trees
from ludus.trainer.learner.weight_export import MAX_FILE_BYTES
from ludus.trainer.models.load import load_policy_tokenizer


class Learner:
    """The policy, its optimizer, and a reference model if the loss needs one."""

    model: ActorCritic
    """The modules that are trained."""

    def __init__(self, run: LanguageModelRun, model_path: str) -> None:
        """`model_path` is the model that the policy and the reference model start from."""
        self._run = run
        self._model_path = model_path
        self._config, self._lora_config = run.learner, run.model.lora
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._device = select_device(run.learner.num_gpus_per_rank)
        seed_torch(run.seed, Stream.LEARNER)
        self._mesh = init_device_mesh(self._device.type, (self._num_ranks,))
        config, algorithm = run.learner, run.algorithm
        self._algorithm = Algorithm(algorithm, run.rollout.max_tokens)
        critic = algorithm.critic if isinstance(algorithm, PpoConfig) else None
        loader = ModelLoader(run, model_path, self._mesh, self._device)
        self._policy = loader.load_policy(has_value_head=isinstance(critic, HeadCritic))
        # The reference model of adapters is the policy with its adapters disabled.
        self._reference: PolicyModel | None = None
        if algorithm.kl_coef > 0 and self._lora_config is None:
            self._reference = loader.load_policy(offloads_parameters=config.offload_reference)
        dtype = getattr(torch, config.dtype)
        self.model = ActorCritic(
            self._policy,
            loader.load_critic(critic) if isinstance(critic, ModelCritic) else None,
        )
        models = self.model.list_models()
        self._work = TrainingWork.for_models(models, self._device, dtype, self._num_ranks)
        packs_trees = config.packing == "tree" and can_pack_trees(models, self._device)
        self.model.reshard()
        self._micro_batch_config = MicroBatchConfig(
            config.known_max_tokens_per_micro_batch,
            estimate_row_costs(self._policy.language_model),
            self._rank,
            self._num_ranks,
            packs_trees,
        )
        groups = self.model.make_optimizer_groups(run.learning_rate, algorithm)
        self._rate_scales = [group.rate_scale for group in groups]
        self._reduces_each = config.memory.reduces_each(self.model.count_trained())
        self._optimizer = torch.optim.AdamW(
            [{"params": group.parameters} for group in groups],
            lr=run.learning_rate,
            fused=True,
            **_make_adamw_settings(config),
        )
        self._state = LearnerState(
            self.model.checkpoint_module,
            self._optimizer,
            has_adapters=self._lora_config is not None,
        )
        self._num_skipped_in_a_row = 0
        self.abandonment = StepAbandonment(self._optimizer, self._device, self._num_ranks)
        """Requests to abandon the current step."""

    def train_step(
        self,
        batch: Batch,
        coefficients: Coefficients,
        *,
        step_id: int = 0,
        keeps_restore_point: bool = False,
    ) -> StepMetrics:
        """Train on a batch, with one update per minibatch and pass, and return the metrics.

        An update whose gradient is not finite on any rank is skipped on all ranks.

        Args:
            step_id: id by which `abandonment` can be requested.
            keeps_restore_point: whether the step can be abandoned after its first update too.

        Raises:
            StepAbandonedError: the step was abandoned.
        """
        with self._clean_up_abandoned_step():
            for group, rate_scale in zip(
                self._optimizer.param_groups, self._rate_scales, strict=True
            ):
                group["lr"] = coefficients.learning_rate * rate_scale
            config = self._config
            sample_ids = split_samples(batch, config.num_minibatches)
            minibatches = [self._pack_micro_batches(batch, ids) for ids in sample_ids]
            self.abandonment.begin_step(
                step_id,
                num_micro_batches=sum(map(len, minibatches)) * config.update_epochs,
                keeps_restore_point=keeps_restore_point
                and len(minibatches) * config.update_epochs > 1,
            )
            targets = self._make_targets(minibatches, coefficients, batch.adds_next_return)
            num_tokens = batch.num_sampled_tokens
            num_sampled = [num_tokens[batch.sequence_of_sample[ids]] for ids in sample_ids]
            metric_sums: list[Tensor] = []
            grad_norms: list[float | None] = []
            for _ in range(config.update_epochs):
                for minibatch in zip(minibatches, targets, num_sampled, strict=True):
                    metric_sums += self._accumulate_gradients(*minibatch, coefficients)
                    grad_norms.append(self._apply_gradients())
            lengths = (
                batch.sequences.lengths[batch.sequence_of_sample].tolist() * config.update_epochs
            )
            metrics = make_step_metrics(metric_sums, grad_norms, coefficients, lengths, self._work)
            return replace(metrics, num_skipped_in_a_row=self._num_skipped_in_a_row)

    def step_on_logits(self, losses: Sequence[LogitsLoss], learning_rate: float) -> float:
        """Update the policy by the mean of the losses, and return that mean.

        The configured algorithm is not used. An update whose gradient is not finite is skipped.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        mean_loss = 0.0
        for logits_loss in losses:
            model_inputs = (tensor.to(self._device) for tensor in logits_loss[:3])
            logits = self._policy.compute_logits(*model_inputs)
            loss = logits_loss.loss_function(logits) / len(losses)
            (loss * self._num_ranks).backward()
            mean_loss += float(loss.detach())
        self._apply_gradients()
        return mean_loss

    @torch.no_grad()
    def gather_weights(self) -> dict[str, Tensor]:
        """Return copies of the weights to publish, on the CPU, by their Hugging Face names.

        The result has all weights of the policy, or only the adapters. Ranks other than 0 take part
        in the collective and return an empty dictionary.
        """
        if self._lora_config is not None:
            return lora.gather_adapters(self._policy.language_model, keeps_copies=self._rank == 0)
        parameters = self._policy.language_model.named_parameters()
        return gather_parameters(parameters, keeps_copies=self._rank == 0)

    @torch.no_grad()
    def score_completions(self, requests: Sequence[ScoringRequest]) -> list[list[float]]:
        """Return the log-probs of each completion under the policy, at temperature 1."""
        if not requests:
            return []
        batch = collate(list(map(_make_scoring_sample, requests)))
        # Each rank scores all requests.
        config = replace(self._micro_batch_config, rank=0, num_ranks=1)
        scores: dict[int, list[float]] = {}
        for micro_batch in make_micro_batches(batch, np.arange(batch.num_samples), config):
            micro_batch = micro_batch.to(self._device)
            output: PolicyOutput = self._policy(micro_batch.rows, temperature=1.0)
            logprobs = micro_batch.gather_samples(output.logprobs)
            rows = zip(micro_batch.sample_ids.tolist(), logprobs, micro_batch.mask, strict=True)
            scores |= {sample_id: row[mask].tolist() for sample_id, row, mask in rows}
        self.model.reshard()
        return [scores[sample_id] for sample_id in range(len(requests))]

    def measure_rounding(
        self, requests: Sequence[ScoringRequest], logprobs: Sequence[Sequence[float]]
    ) -> float:
        """Return the largest difference of `logprobs`, the requests' scores, by rounding alone."""
        with change_rounding(self._policy.language_model):
            return compute_max_difference(self.score_completions(requests), logprobs)

    @torch.no_grad()
    def compute_mean_loss(self, batch: Batch) -> float:
        """Return the mean negative log-prob of the batch's sampled tokens, without an update."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro_batch in self._pack_micro_batches(batch, np.arange(batch.num_samples)):
            output: PolicyOutput = self._policy(micro_batch.rows, self._run.rollout.temperature)
            logprobs = micro_batch.gather_samples(output.logprobs)[micro_batch.mask].double()
            sums += torch.stack([-logprobs.sum(), micro_batch.mask.sum()])
        self.model.reshard()
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def save(self, folder: Path) -> list[SavedFile]:
        """Save weights, optimizer and random state, and return the files of this rank.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        return self._state.save(folder)

    def export_model(
        self, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES
    ) -> list[SavedFile]:
        """Save the policy as a Hugging Face folder, and return the files of this rank.

        Args:
            max_file_bytes: maximum size of a file of weights that has more than one tensor.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        tokenizer = load_policy_tokenizer(self._model_path, self._run.model)
        settings = ExportSettings(tokenizer, self._model_path, self._lora_config, max_file_bytes)
        return export_model(self.model, folder, settings)

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, possibly with a different number of ranks.

        Raises:
            CheckpointError: the folder cannot be read, contains an object that could run code, or
                belongs to a different model.
        """
        self._state.load(folder)
        # A checkpoint contains the optimizer settings of its run; use the current ones instead.
        for group in self._optimizer.param_groups:
            group.update(_make_adamw_settings(self._config))

    @contextmanager
    def _clean_up_abandoned_step(self) -> Iterator[None]:
        random_state = torch.get_rng_state()
        try:
            yield
        except StepAbandonedError:
            self.model.reshard()
            torch.set_rng_state(random_state)
            self.abandonment.end_step()
            raise
        # After any other error, the state from before the step can still be copied.
        self.abandonment.end_step()

    def _pack_micro_batches(self, batch: Batch, sample_ids: np.ndarray) -> list[MicroBatch]:
        micro_batches = make_micro_batches(batch, sample_ids, self._micro_batch_config)
        return [micro_batch.to(self._device) for micro_batch in micro_batches]

    @torch.no_grad()
    def _make_targets(
        self,
        minibatches: Sequence[Sequence[MicroBatch]],
        coefficients: Coefficients,
        adds_next_return: np.ndarray,
    ) -> list[list[LossTargets]]:
        """Return the loss targets of each micro-batch of each minibatch."""
        algorithm, kl_coef = self._algorithm, coefficients.kl
        targets: list[list[LossTargets]] = []
        for index, micro_batches in enumerate(minibatches):
            targets.append([])
            is_after_update = index > 0 or self._config.update_epochs > 1
            needs_initial_output = algorithm.needs_initial_output(
                coefficients, is_after_update=is_after_update
            )
            for batch in micro_batches:
                self.abandonment.check()
                initial_output = reference_output = None
                if needs_initial_output:
                    initial_output = self.model(batch.rows, self._run.rollout.temperature)
                if kl_coef > 0:
                    reference_output = self._compute_reference_output(batch)
                target = algorithm.make_targets(batch, initial_output, reference_output, kl_coef)
                targets[-1].append(target)
        targets = algorithm.add_later_penalties(targets, minibatches, adds_next_return)
        return algorithm.whiten_targets(targets, minibatches)

    def _compute_reference_output(self, micro_batch: MicroBatch) -> PolicyOutput:
        temperature = self._run.rollout.temperature
        if self._reference is not None:
            return self._reference(micro_batch.rows, temperature)
        lora.set_adapters_enabled(self._policy, False)
        try:
            return self._policy(micro_batch.rows, temperature)
        finally:
            lora.set_adapters_enabled(self._policy, True)

    def _accumulate_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        targets: Sequence[LossTargets],
        num_sampled: np.ndarray,
        coefficients: Coefficients,
    ) -> list[Tensor]:
        """Add the gradients of a minibatch to the parameters, and return its metric sums.

        `num_sampled` is the number of sampled tokens by sample of the minibatch, on all ranks.
        """
        counts = torch.from_numpy(num_sampled)
        entropy_mode: EntropyMode = "gradient" if coefficients.entropy > 0 else "value"
        metric_sums: list[Tensor] = []
        for index, (micro_batch, target) in enumerate(zip(micro_batches, targets, strict=True)):
            self.abandonment.check()
            is_last = index == len(micro_batches) - 1
            self.model.sync_gradients(is_last or self._reduces_each)
            output = self.model(micro_batch.rows, self._run.rollout.temperature, entropy_mode)
            loss = self._algorithm.compute_loss(micro_batch, output, target, counts, coefficients)
            # FSDP averages gradients over ranks, but the denominator already counts all ranks.
            (loss.total_loss * self._num_ranks).backward()
            metric_sums.append(sum_metrics(loss, target, micro_batch))
        return metric_sums

    def _apply_gradients(self) -> float | None:
        """Update the weights; return the policy's gradient norm, or None if skipped."""
        grad_norm, is_finite = self.model.clip_gradients(self._config.max_grad_norm)
        finite_flag = torch.tensor(float(is_finite), device=self._device)
        dist.all_reduce(finite_flag, dist.ReduceOp.MIN)
        is_finite = bool(finite_flag)
        if is_finite:
            self.abandonment.count_update()
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_skipped_in_a_row = 0 if is_finite else self._num_skipped_in_a_row + 1
        return grad_norm if is_finite else None


def _make_adamw_settings(config: LearnerConfig) -> dict[str, Any]:
    """Return AdamW's settings other than the learning rate, which is set per step."""
    return {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}


def _make_scoring_sample(request: ScoringRequest) -> TrainingSample:
    token_ids = request.prompt_ids + request.completion_ids
    mask = [index >= len(request.prompt_ids) for index in range(len(token_ids))]
    return make_unscored_sample(token_ids, mask)
