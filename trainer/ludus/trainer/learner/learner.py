"""One rank of the learner: a training step, the weights to publish, the state to keep.

    Batch --split--> minibatches --cut--> micro-batches
                                            |  all of the step, before anything moves
                                            v
                       policy, reference: Targets (old log-probs, values, advantages)
                                            |  minibatch by minibatch
                                            v
                       forward, loss, backward for each micro-batch; clip; AdamW

Every method is a collective: all ranks call it with equal arguments, or all of them hang.
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
from ludus.trainer.core.disk import describe_write_error
from ludus.trainer.core.streams import Stream, seed_torch
from ludus.trainer.core.types import Batch, Coefficients, SavedFile, ScoringRequest, TrainingSample
from ludus.trainer.learner.actor_critic import ActorCritic
from ludus.trainer.learner.algorithm import Denominators, Targets, make_algorithm
from ludus.trainer.learner.attention_check import can_pack_trees, reads_alike
from ludus.trainer.learner.critic import Critic, load_critic
from ludus.trainer.learner.device import take_device
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
    one_micro_batch,
    split_samples,
    unscored_sample,
)
from ludus.trainer.learner.model import (
    VALUE_HEAD,
    Entropy,
    Policy,
    PolicyOutput,
    full_state_of,
    full_tensor,
    prepare,
    row_costs,
)
from ludus.trainer.learner.step_metrics import (
    MicroBatchSums,
    PassedBatch,
    StepMetrics,
    StepTotals,
    step_metrics,
)
from ludus.trainer.models.flops import TrainingWork
from ludus.trainer.models.load import load_language_model, load_tokenizer
from ludus.trainer.weights.adapters import AdapterMerger

_VALUE_HEAD_FILE = "value_head.safetensors"
_CRITIC_FOLDER = "critic"
_PROMPTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """What a learner rank is made from."""

    model_path: str
    config: LearnerConfig
    learning_rate: float
    """Peak learning rate of the policy."""
    algorithm: AlgorithmConfig
    temperature: float
    """At which the rollout workers sample: log-probs are of that distribution."""
    max_tokens: int
    """Longest episode: the denominator of aggregation "constant"."""
    seed: int
    """The run's."""
    lora: LoraConfig | None = None
    """Adapters, which alone are trained."""


class Learner:
    """The policy, its optimizer, and a reference model when the loss wants one."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._device = take_device(self._rank)
        seed_torch(spec.seed, Stream.LEARNER)
        self._mesh = init_device_mesh(self._device.type, (self._num_ranks,))
        config, algorithm = spec.config, spec.algorithm
        self._algorithm = make_algorithm(algorithm)
        critic = algorithm.critic if isinstance(algorithm, PpoConfig) else None
        self._policy = self._load_policy(value_head=isinstance(critic, HeadCritic))
        # With adapters the reference is the policy without them.
        self._reference = (
            self._load_policy(offload=config.offload_reference)
            if algorithm.kl_coef > 0 and spec.lora is None
            else None
        )
        dtype = getattr(torch, config.dtype)
        self._trained = ActorCritic(self._policy, self._load_critic(critic))
        models = self._trained.models()
        self._work = TrainingWork.of(models, self._device, dtype, self._num_ranks)
        packs_trees = (
            config.packing == "tree"
            and can_pack_trees(self._policy, dtype, self._device)
            and all(reads_alike(models[0], model) for model in models)
        )
        self._trained.reshard()
        self._micro_batches = MicroBatchConfig(
            config.max_tokens_per_micro_batch,
            row_costs(self._policy.language_model) if packs_trees else None,
            self._rank,
            self._num_ranks,
        )
        # The frozen weights under adapters are those of the model's folder: they are not saved.
        self._state_options = StateDictOptions(
            ignore_frozen_params=spec.lora is not None, strict=spec.lora is None
        )
        groups = self._trained.optimizer_groups(spec.learning_rate, algorithm)
        self._rate_scales = [group.rate_scale for group in groups]
        self._optimizer = torch.optim.AdamW(
            [{"params": group.parameters} for group in groups],
            lr=spec.learning_rate,
            fused=True,
            **_adamw_settings(config),
        )
        self._num_skipped_in_a_row = 0

    def train_step(self, batch: Batch, coefficients: Coefficients) -> StepMetrics:
        """What the step did; the policy has moved by one update per minibatch and pass.

        A minibatch whose gradient is not finite on any rank moves nothing, on all ranks.
        """
        self._trained.train()
        for group, scale in zip(self._optimizer.param_groups, self._rate_scales, strict=True):
            group["lr"] = coefficients.learning_rate * scale
        parts = split_samples(batch, self._spec.config.num_minibatches)
        minibatches = [self._cut(batch, samples) for samples in parts]
        targets = self._targets(minibatches, coefficients)
        sums: list[MicroBatchSums] = []
        grad_norms: list[float | None] = []
        for _ in range(self._spec.config.update_epochs):
            for samples, micro_batches, aims in zip(parts, minibatches, targets, strict=True):
                denominators = self._denominators(batch, samples)
                sums += self._accumulate(micro_batches, aims, denominators, coefficients)
                grad_norms.append(self._apply_gradients())
        passed = PassedBatch(batch, self._spec.config.update_epochs)
        metrics = step_metrics(StepTotals.of(sums), grad_norms, coefficients, passed, self._work)
        return replace(metrics, num_skipped_in_a_row=self._num_skipped_in_a_row)

    def step_on_logits(self, losses: Sequence[LogitsLoss], learning_rate: float) -> float:
        """The mean of the losses before an update by it; with a gradient that is not finite none.

        The algorithm of the configuration has no part in it.
        """
        self._policy.train()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        total = 0.0
        for rows in losses:
            inputs = (one.to(self._device) for one in rows[:3])
            loss = rows.of_logits(self._policy.all_logits(*inputs)) / len(losses)
            (loss * self._num_ranks).backward()
            total += float(loss.detach())
        self._apply_gradients()
        return total

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor]:
        """What is published: full tensors on the CPU, by their Hugging Face names.

        All weights of the policy, or the adapters alone; copies, which no later step changes.
        """
        if self._spec.lora is not None:
            return adapter_state(self._policy.language_model)
        names = self._policy.full_names()
        return {
            names[name]: full_tensor(parameter)
            for name, parameter in self._policy.named_parameters()
            if name in names
        }

    @torch.no_grad()
    def score_completions(self, prompts: Sequence[ScoringRequest]) -> list[list[float]]:
        """The log-probs of each prompt's completion under the policy, at temperature 1."""
        self._policy.eval()
        answers: list[list[float]] = []
        for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
            samples = [_as_sample(prompt) for prompt in prompts[start : start + _PROMPTS_AT_ONCE]]
            asked = one_micro_batch(samples).to(self._device)
            logprobs = asked.of_samples(self._policy(asked.rows, temperature=1.0).logprobs)
            answers += [row[mask].tolist() for row, mask in zip(logprobs, asked.mask, strict=True)]
        self._trained.reshard()
        return answers

    def save(self, folder: Path) -> list[SavedFile]:
        """Write weights, optimizer and random state, each rank its part: this rank's files.

        Raises:
            CheckpointError: they cannot be written.
        """
        state = self._state()
        with _writing(folder):
            dcp.save(state, checkpoint_id=folder)
        written = sorted(folder.glob(f"__{self._rank}_*"))
        return [SavedFile.of(path) for path in (*written, *self._of_rank_0(folder / ".metadata"))]

    def export_model(self, folder: Path) -> list[SavedFile]:
        """Write the policy, from rank 0, as a Hugging Face folder: what it has written.

        Raises:
            CheckpointError: it cannot be written.
        """
        state = self.full_state()
        value_head = self._value_head_state()
        critic = self._critic_state()
        lora = self._spec.lora
        if lora is not None:
            base = base_state(self._policy.language_model)
        if self._rank == 0:
            tokenizer = load_tokenizer(self._spec.model_path)
            with _writing(folder):
                if lora is not None:
                    save_adapters(folder / ADAPTER_FOLDER, state, lora, self._spec.model_path)
                    state = AdapterMerger(base, lora).merge(state)
                self._policy.language_model.config.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
                if value_head:
                    save_file(value_head, folder / _VALUE_HEAD_FILE)
                if critic:
                    self._save_critic(critic, folder / _CRITIC_FOLDER)
        written = self._of_rank_0(*sorted(folder.rglob("*")))
        return [SavedFile.of(path) for path in written if path.is_file()]

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, also with another number of ranks.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
        """
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=folder)
        except (CheckpointException, RuntimeError, OSError) as error:
            raise CheckpointError(
                f"checkpoint '{folder}' cannot be read: {_reason(error)}; it must be whole, and "
                "come from a run with the same model"
            ) from error
        set_state_dict(
            self._trained.stateful,
            self._optimizer,
            model_state_dict=state["policy"],
            optim_state_dict=state["optimizer"],
            options=self._state_options,
        )
        # A checkpoint brings the settings that it was written with.
        for group in self._optimizer.param_groups:
            group.update(_adamw_settings(self._spec.config))
        torch.set_rng_state(state["torch_random"])

    def _of_rank_0(self, *paths: Path) -> Sequence[Path]:
        """The paths, which rank 0 writes, on that rank; none on the others."""
        return paths if self._rank == 0 else ()

    def _load_policy(self, *, value_head: bool = False, offload: bool = False) -> Policy:
        language_model = load_language_model(self._spec.model_path)
        if self._spec.lora is not None:
            add_adapters(language_model, self._spec.lora)
        policy = Policy(language_model, value_head=value_head).to(self._device)
        offload = offload and self._device.type != "cpu"
        return prepare(policy, self._spec.config, self._mesh, offload=offload)

    def _load_critic(self, config: CriticConfig | None) -> Critic | None:
        if not isinstance(config, ModelCritic):
            return None
        critic = load_critic(config.path or self._spec.model_path, self._spec.model_path)
        return prepare(critic.to(self._device), self._spec.config, self._mesh)

    @torch.no_grad()
    def _critic_state(self) -> dict[str, Tensor]:
        """The critic's weights as full tensors on the CPU; empty where it is no model."""
        critic = self._trained.critic
        return {} if critic is None else full_state_of(critic.classifier)

    def _save_critic(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write the critic as a Hugging Face folder, which another run may begin with."""
        assert self._trained.critic is not None
        self._trained.critic.classifier.config.save_pretrained(folder)
        load_tokenizer(self._spec.model_path).save_pretrained(folder)
        save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})

    @torch.no_grad()
    def _value_head_state(self) -> dict[str, Tensor]:
        """The value head's weights as full tensors on the CPU; empty without one."""
        return {
            name.removeprefix(f"{VALUE_HEAD}."): full_tensor(parameter)
            for name, parameter in self._policy.named_parameters()
            if name.startswith(VALUE_HEAD)
        }

    def _state(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(
            self._trained.stateful, self._optimizer, options=self._state_options
        )
        return {
            "policy": model_state,
            "optimizer": optimizer_state,
            "torch_random": torch.get_rng_state(),
        }

    def _cut(self, batch: Batch, samples: np.ndarray) -> list[MicroBatch]:
        micro_batches = make_micro_batches(batch, samples, self._micro_batches)
        return [micro_batch.to(self._device) for micro_batch in micro_batches]

    @torch.no_grad()
    def _targets(
        self, minibatches: Sequence[Sequence[MicroBatch]], coefficients: Coefficients
    ) -> list[list[Targets]]:
        """For each micro-batch of each minibatch, what the loss compares the policy with."""
        temperature, kl_coef = self._spec.temperature, coefficients.kl
        targets: list[list[Targets]] = []
        for index, micro_batches in enumerate(minibatches):
            meets_moved = index > 0 or self._spec.config.update_epochs > 1
            needs_start = self._algorithm.needs_start(coefficients, meets_moved=meets_moved)
            targets.append([])
            for micro_batch in micro_batches:
                start = self._trained(micro_batch.rows, temperature) if needs_start else None
                reference = self._ask_reference(micro_batch) if kl_coef > 0 else None
                made = self._algorithm.targets(micro_batch, start, reference, kl_coef)
                targets[-1].append(made)
        return self._algorithm.whitened(targets, minibatches)

    def _ask_reference(self, micro_batch: MicroBatch) -> PolicyOutput:
        if self._reference is not None:
            output: PolicyOutput = self._reference(micro_batch.rows, self._spec.temperature)
            return output
        set_adapters_enabled(self._policy, False)
        try:
            output = self._policy(micro_batch.rows, self._spec.temperature)
        finally:
            set_adapters_enabled(self._policy, True)
        return output

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        targets: Sequence[Targets],
        denominators: Denominators,
        coefficients: Coefficients,
    ) -> list[MicroBatchSums]:
        """The sums of each micro-batch; the gradients wait in the parameters."""
        entropy: Entropy = "gradient" if coefficients.entropy > 0 else "value"
        sums: list[MicroBatchSums] = []
        for index, (micro_batch, aims) in enumerate(zip(micro_batches, targets, strict=True)):
            self._trained.sync_gradients(index == len(micro_batches) - 1)
            output = self._trained(micro_batch.rows, self._spec.temperature, entropy)
            loss = self._algorithm.loss(micro_batch, output, aims, denominators, coefficients)
            # FSDP averages gradients over ranks; the denominator has already counted them all.
            (loss.total * self._num_ranks).backward()
            sums.append(MicroBatchSums(loss, aims.critic, micro_batch))
        return sums

    def _denominators(self, batch: Batch, samples: np.ndarray) -> Denominators:
        """Of the whole optimizer step: every rank counts all samples, not only its own."""
        num_sampled = torch.from_numpy(batch.num_sampled[batch.sequence_of_sample[samples]])
        return self._algorithm.denominators(num_sampled, self._spec.max_tokens)

    def _apply_gradients(self) -> float | None:
        """The norm of the policy's gradient before clipping; None where the update is skipped."""
        norm, is_finite = self._trained.clip_gradients(self._spec.config.max_grad_norm)
        is_taken = self._agree(is_finite)
        if is_taken:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_skipped_in_a_row = 0 if is_taken else self._num_skipped_in_a_row + 1
        return norm if is_taken else None

    def _agree(self, is_fine: bool) -> bool:
        """Whether it is fine on every rank."""
        answer = torch.tensor(float(is_fine), device=self._device)
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        return bool(answer)


def _adamw_settings(config: LearnerConfig) -> dict[str, Any]:
    """What AdamW takes from the configuration beside its learning rate, which each step has."""
    return {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}


def _reason(error: BaseException) -> str:
    """What went wrong on the first rank on which anything did."""
    first = _first_failure(error)
    return str(error) if first is error else repr(first)


def _first_failure(error: BaseException) -> BaseException:
    """Of the ranks' failures the first one."""
    failures = getattr(error, "failures", {})
    return next((failure[0] for failure in failures.values()), error)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Says which folder cannot be written, and why.

    What writes in Rust raises classes of its own, or none. Errors of torch.distributed are those
    of ranks that no longer meet.
    """
    try:
        yield
    except RuntimeError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{describe_write_error(folder, _first_failure(error))}; make room, and check that "
            "every node can write to it"
        ) from error


def _as_sample(canary: ScoringRequest) -> TrainingSample:
    token_ids = canary.prompt_ids + canary.completion_ids
    mask = [index >= len(canary.prompt_ids) for index in range(len(token_ids))]
    return unscored_sample(token_ids, mask)
