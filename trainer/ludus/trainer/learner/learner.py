"""One rank of the learner: training steps, the weights to publish, the state to save.

    Batch --split--> minibatches --pack--> micro-batches
                                             |  for the whole step, before any update
                                             v
                       policy, reference: LossTargets (old log-probs, advantages, returns)
                                             |  minibatch by minibatch
                                             v
                       forward, loss, backward for each micro-batch; clip; AdamW

Every method is a collective: all ranks must call it with equal arguments, or all of them hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ludus.proto.config import (
    AlgorithmConfig,
    CriticConfig,
    HeadCritic,
    LearnerConfig,
    LoraConfig,
    ModelCritic,
    PpoConfig,
)
from ludus.proto.errors import CheckpointError
from ludus.trainer.core.output import describe_write_error
from ludus.trainer.core.streams import Stream, seed_torch
from ludus.trainer.core.types import Batch, Coefficients, SavedFile, ScoringRequest, TrainingSample
from ludus.trainer.learner.actor_critic import ActorCritic
from ludus.trainer.learner.algorithm import Denominators, LossTargets, make_algorithm
from ludus.trainer.learner.attention_check import can_pack_trees, has_same_attention
from ludus.trainer.learner.critic import Critic, load_critic
from ludus.trainer.learner.device import select_device
from ludus.trainer.learner.logits_loss import LogitsLoss
from ludus.trainer.learner.lora import (
    ADAPTER_FOLDER,
    adapter_state,
    add_adapters,
    base_state,
    save_adapters,
    set_adapters_enabled,
)
from ludus.trainer.learner.micro_batches import (
    MicroBatch,
    MicroBatchConfig,
    make_micro_batches,
    pack_one_micro_batch,
    split_samples,
    unscored_sample,
)
from ludus.trainer.learner.model import (
    VALUE_HEAD,
    EntropyMode,
    PolicyModel,
    PolicyOutput,
    gather_state,
    prepare_model,
    row_costs,
)
from ludus.trainer.learner.step_metrics import (
    MicroBatchSums,
    StepMetrics,
    StepTotals,
    make_step_metrics,
)
from ludus.trainer.models.flops import TrainingWork
from ludus.trainer.models.load import load_language_model, load_tokenizer
from ludus.trainer.weights.adapters import AdapterMerger

_VALUE_HEAD_FILE = "value_head.safetensors"
_CRITIC_FOLDER = "critic"
_PROMPTS_PER_PASS = 64


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The settings of a learner rank."""

    model_path: str
    config: LearnerConfig
    learning_rate: float
    """Peak learning rate of the policy."""
    algorithm: AlgorithmConfig
    temperature: float
    """Temperature of the rollout workers: log-probs are computed at this temperature."""
    max_tokens: int
    """Maximum length of an episode: part of the denominator of aggregation "constant"."""
    seed: int
    """Seed of the run."""
    lora: LoraConfig | None = None
    """Adapters; if set, only the adapters are trained."""


class Learner:
    """The policy, its optimizer, and a reference model if the loss needs one."""

    model: ActorCritic
    """The modules that are trained."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._device = select_device(self._rank)
        seed_torch(spec.seed, Stream.LEARNER)
        self._mesh = init_device_mesh(self._device.type, (self._num_ranks,))
        config, algorithm = spec.config, spec.algorithm
        self._algorithm = make_algorithm(algorithm)
        critic = algorithm.critic if isinstance(algorithm, PpoConfig) else None
        self._policy = self._load_policy(value_head=isinstance(critic, HeadCritic))
        # The reference model of adapters is the policy with its adapters disabled.
        self._reference = (
            self._load_policy(offload=config.offload_reference)
            if algorithm.kl_coef > 0 and spec.lora is None
            else None
        )
        dtype = getattr(torch, config.dtype)
        self.model = ActorCritic(self._policy, self._load_critic(critic))
        models = self.model.models()
        self._work = TrainingWork.for_models(models, self._device, dtype, self._num_ranks)
        packs_trees = (
            config.packing == "tree"
            and can_pack_trees(self._policy, dtype, self._device)
            and all(has_same_attention(models[0], model) for model in models)
        )
        self.model.reshard()
        self._micro_batch_config = MicroBatchConfig(
            config.max_tokens_per_micro_batch,
            row_costs(self._policy.language_model) if packs_trees else None,
            self._rank,
            self._num_ranks,
        )
        # The frozen weights under adapters come from the model's folder and are not saved.
        self._state_options = StateDictOptions(
            ignore_frozen_params=spec.lora is not None, strict=spec.lora is None
        )
        groups = self.model.optimizer_groups(spec.learning_rate, algorithm)
        self._rate_scales = [group.rate_scale for group in groups]
        self._optimizer = torch.optim.AdamW(
            [{"params": group.parameters} for group in groups],
            lr=spec.learning_rate,
            fused=True,
            **_adamw_settings(config),
        )
        self._num_skipped_in_a_row = 0

    def train_step(self, batch: Batch, coefficients: Coefficients) -> StepMetrics:
        """Train on a batch, with one update per minibatch and pass, and return the metrics.

        An update whose gradient is not finite on any rank is skipped on all ranks.
        """
        self.model.train()
        for group, scale in zip(self._optimizer.param_groups, self._rate_scales, strict=True):
            group["lr"] = coefficients.learning_rate * scale
        config = self._spec.config
        samples = split_samples(batch, config.num_minibatches)
        minibatches = [self._pack(batch, sample_ids) for sample_ids in samples]
        targets = self._make_targets(minibatches, coefficients)
        denominators = [self._denominators(batch, sample_ids) for sample_ids in samples]
        sums: list[MicroBatchSums] = []
        grad_norms: list[float | None] = []
        for _ in range(config.update_epochs):
            for minibatch in zip(minibatches, targets, denominators, strict=True):
                sums += self._accumulate_gradients(*minibatch, coefficients)
                grad_norms.append(self._apply_gradients())
        lengths = batch.sequences.lengths[batch.sequence_of_sample].tolist() * config.update_epochs
        totals = StepTotals.reduce(sums)
        metrics = make_step_metrics(totals, grad_norms, coefficients, lengths, self._work)
        return replace(metrics, num_skipped_in_a_row=self._num_skipped_in_a_row)

    def step_on_logits(self, losses: Sequence[LogitsLoss], learning_rate: float) -> float:
        """Update the policy by the mean of the losses, and return that mean.

        The configured algorithm is not used. An update whose gradient is not finite is skipped.
        """
        self._policy.train()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        total = 0.0
        for rows in losses:
            inputs = (tensor.to(self._device) for tensor in rows[:3])
            loss = rows.loss_function(self._policy.all_logits(*inputs)) / len(losses)
            (loss * self._num_ranks).backward()
            total += float(loss.detach())
        self._apply_gradients()
        return total

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor]:
        """Return copies of the weights to publish, on the CPU, by their Hugging Face names.

        These are all weights of the policy, or only the adapters. Ranks other than 0 take part in
        gathering them, and return an empty dictionary.
        """
        if self._spec.lora is not None:
            return adapter_state(self._policy.language_model, keep=self._rank == 0)
        parameters = self._policy.language_model.named_parameters()
        return gather_state(parameters, keep=self._rank == 0)

    @torch.no_grad()
    def score_completions(self, prompts: Sequence[ScoringRequest]) -> list[list[float]]:
        """Return the log-probs of each prompt's completion under the policy, at temperature 1."""
        self._policy.eval()
        logprobs_of_prompts: list[list[float]] = []
        for start in range(0, len(prompts), _PROMPTS_PER_PASS):
            chunk = prompts[start : start + _PROMPTS_PER_PASS]
            micro_batch = pack_one_micro_batch([_scoring_sample(prompt) for prompt in chunk])
            micro_batch = micro_batch.to(self._device)
            output: PolicyOutput = self._policy(micro_batch.rows, temperature=1.0)
            rows = micro_batch.gather_samples(output.logprobs)
            logprobs_of_prompts += [
                row[mask].tolist() for row, mask in zip(rows, micro_batch.mask, strict=True)
            ]
        self.model.reshard()
        return logprobs_of_prompts

    def save(self, folder: Path) -> list[SavedFile]:
        """Save weights, optimizer and random state, and return the files of this rank.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        state = self._state()
        with _checked_writes(folder):
            dcp.save(state, checkpoint_id=folder)
        paths = sorted(folder.glob(f"__{self._rank}_*"))
        if self._rank == 0:
            paths.append(folder / ".metadata")
        return [SavedFile.from_path(path) for path in paths]

    def export_model(self, folder: Path) -> list[SavedFile]:
        """Save the policy from rank 0 as a Hugging Face folder, and return this rank's files.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        is_writer = self._rank == 0
        state = self.full_state()
        value_head = self._value_head_state()
        critic = self._critic_state()
        lora = self._spec.lora
        base = {} if lora is None else base_state(self._policy.language_model, keep=is_writer)
        if not is_writer:
            return []
        tokenizer = load_tokenizer(self._spec.model_path)
        with _checked_writes(folder):
            if lora is not None:
                save_adapters(folder / ADAPTER_FOLDER, state, lora, self._spec.model_path)
                state = AdapterMerger(base, lora).merge(state)
            _save_pretrained(self._policy.language_model.config, tokenizer, state, folder)
            if value_head:
                save_file(value_head, folder / _VALUE_HEAD_FILE)
            if self.model.critic is not None:
                config = self.model.critic.classifier.config
                _save_pretrained(config, tokenizer, critic, folder / _CRITIC_FOLDER)
        return [SavedFile.from_path(path) for path in sorted(folder.rglob("*")) if path.is_file()]

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, possibly with a different number of ranks.

        Raises:
            CheckpointError: the folder cannot be read, or belongs to a different model.
        """
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=folder)
        except (CheckpointException, RuntimeError, OSError) as error:
            raise CheckpointError(
                f"checkpoint '{folder}' cannot be read: {_describe_failure(error)}; it must be "
                "complete, and come from a run with the same model"
            ) from error
        set_state_dict(
            self.model.stateful,
            self._optimizer,
            model_state_dict=state["policy"],
            optim_state_dict=state["optimizer"],
            options=self._state_options,
        )
        # A checkpoint contains the optimizer settings of its run; use the current ones instead.
        for group in self._optimizer.param_groups:
            group.update(_adamw_settings(self._spec.config))
        torch.set_rng_state(state["torch_random"])

    def _load_policy(self, *, value_head: bool = False, offload: bool = False) -> PolicyModel:
        language_model = load_language_model(self._spec.model_path)
        if self._spec.lora is not None:
            add_adapters(language_model, self._spec.lora)
        policy = PolicyModel(language_model, value_head=value_head).to(self._device)
        offload = offload and self._device.type != "cpu"
        return prepare_model(policy, self._spec.config, self._mesh, offload=offload)

    def _load_critic(self, config: CriticConfig | None) -> Critic | None:
        if not isinstance(config, ModelCritic):
            return None
        critic = load_critic(config.path or self._spec.model_path, self._spec.model_path)
        return prepare_model(critic.to(self._device), self._spec.config, self._mesh)

    @torch.no_grad()
    def _critic_state(self) -> dict[str, Tensor]:
        if self.model.critic is None:
            return {}
        parameters = self.model.critic.classifier.named_parameters()
        return gather_state(parameters, keep=self._rank == 0)

    @torch.no_grad()
    def _value_head_state(self) -> dict[str, Tensor]:
        prefix = f"{VALUE_HEAD}."
        parameters = (
            (name.removeprefix(prefix), parameter)
            for name, parameter in self._policy.named_parameters()
            if name.startswith(prefix)
        )
        return gather_state(parameters, keep=self._rank == 0)

    def _state(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(
            self.model.stateful, self._optimizer, options=self._state_options
        )
        return {
            "policy": model_state,
            "optimizer": optimizer_state,
            "torch_random": torch.get_rng_state(),
        }

    def _pack(self, batch: Batch, sample_ids: np.ndarray) -> list[MicroBatch]:
        micro_batches = make_micro_batches(batch, sample_ids, self._micro_batch_config)
        return [micro_batch.to(self._device) for micro_batch in micro_batches]

    @torch.no_grad()
    def _make_targets(
        self, minibatches: Sequence[Sequence[MicroBatch]], coefficients: Coefficients
    ) -> list[list[LossTargets]]:
        """Return the loss targets of each micro-batch of each minibatch."""
        temperature, kl_coef = self._spec.temperature, coefficients.kl
        targets: list[list[LossTargets]] = []
        for index, micro_batches in enumerate(minibatches):
            is_updated = index > 0 or self._spec.config.update_epochs > 1
            needs_start = self._algorithm.needs_start(coefficients, is_updated=is_updated)
            targets.append([])
            for micro_batch in micro_batches:
                start = self.model(micro_batch.rows, temperature) if needs_start else None
                reference = self._reference_output(micro_batch) if kl_coef > 0 else None
                target = self._algorithm.make_targets(micro_batch, start, reference, kl_coef)
                targets[-1].append(target)
        return self._algorithm.whiten_targets(targets, minibatches)

    def _reference_output(self, micro_batch: MicroBatch) -> PolicyOutput:
        if self._reference is not None:
            output: PolicyOutput = self._reference(micro_batch.rows, self._spec.temperature)
            return output
        set_adapters_enabled(self._policy, False)
        try:
            output = self._policy(micro_batch.rows, self._spec.temperature)
        finally:
            set_adapters_enabled(self._policy, True)
        return output

    def _denominators(self, batch: Batch, sample_ids: np.ndarray) -> Denominators:
        """Return the denominators of an optimizer step; every rank counts the samples of all."""
        num_sampled = torch.from_numpy(batch.num_sampled[batch.sequence_of_sample[sample_ids]])
        return self._algorithm.denominators(num_sampled, self._spec.max_tokens)

    def _accumulate_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        targets: Sequence[LossTargets],
        denominators: Denominators,
        coefficients: Coefficients,
    ) -> list[MicroBatchSums]:
        """Add the gradients of a minibatch to the parameters, and return its metric sums."""
        entropy_mode: EntropyMode = "gradient" if coefficients.entropy > 0 else "value"
        sums: list[MicroBatchSums] = []
        for index, (micro_batch, target) in enumerate(zip(micro_batches, targets, strict=True)):
            self.model.sync_gradients(index == len(micro_batches) - 1)
            output = self.model(micro_batch.rows, self._spec.temperature, entropy_mode)
            loss = self._algorithm.loss(micro_batch, output, target, denominators, coefficients)
            # FSDP averages gradients over ranks, but the denominator already counts all ranks.
            (loss.total * self._num_ranks).backward()
            sums.append(MicroBatchSums(loss, target.critic, micro_batch))
        return sums

    def _apply_gradients(self) -> float | None:
        """Update the weights; return the policy's gradient norm, or None if skipped."""
        norm, is_finite = self.model.clip_gradients(self._spec.config.max_grad_norm)
        is_finite = self._is_true_on_all_ranks(is_finite)
        if is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_skipped_in_a_row = 0 if is_finite else self._num_skipped_in_a_row + 1
        return norm if is_finite else None

    def _is_true_on_all_ranks(self, value: bool) -> bool:
        tensor = torch.tensor(float(value), device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return bool(tensor)


def _save_pretrained(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Tensor],
    folder: Path,
) -> None:
    """Write a folder that Hugging Face loads."""
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})


def _adamw_settings(config: LearnerConfig) -> dict[str, Any]:
    """Return AdamW's settings other than the learning rate, which is set per step."""
    return {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}


def _describe_failure(error: BaseException) -> str:
    """Return the reason of the first rank that failed."""
    failure = _first_failure(error)
    return str(error) if failure is error else repr(failure)


def _first_failure(error: BaseException) -> BaseException:
    """Return the first failure of any rank; `error` itself if it does not list any."""
    failures = getattr(error, "failures", {})
    return next((failure[0] for failure in failures.values()), error)


@contextmanager
def _checked_writes(folder: Path) -> Iterator[None]:
    """Raise a CheckpointError that names the folder and the reason if a write fails.

    Writers in Rust raise their own exception classes. A RuntimeError of torch.distributed means
    that the ranks lost contact, so it passes unchanged.
    """
    try:
        yield
    except RuntimeError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{describe_write_error(folder, _first_failure(error))}; free some space, and "
            "check that every node can write there"
        ) from error


def _scoring_sample(canary: ScoringRequest) -> TrainingSample:
    token_ids = canary.prompt_ids + canary.completion_ids
    mask = [index >= len(canary.prompt_ids) for index in range(len(token_ids))]
    return unscored_sample(token_ids, mask)
