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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from ludus.proto.config import (
    CriticConfig,
    HeadCritic,
    LanguageModelRun,
    LearnerConfig,
    ModelCritic,
    PpoConfig,
)
from ludus.proto.errors import CheckpointError
from ludus.trainer.core.output import describe_write_error
from ludus.trainer.core.streams import Stream, seed_torch
from ludus.trainer.core.types import Batch, Coefficients, SavedFile, ScoringRequest, TrainingSample
from ludus.trainer.learner import lora
from ludus.trainer.learner.abandonment import StepAbandonedError, StepAbandonment
from ludus.trainer.learner.actor_critic import ActorCritic, Critic, load_critic
from ludus.trainer.learner.algorithm import Algorithm, LossTargets
from ludus.trainer.learner.checkpoint_reader import (
    CheckpointReader,
    PlainValuePlanner,
    UnsafeFileError,
)
from ludus.trainer.learner.micro_batches import (
    MicroBatch,
    MicroBatchConfig,
    make_micro_batches,
    make_unscored_sample,
    pack_one_micro_batch,
    split_samples,
)
from ludus.trainer.learner.model import (
    EntropyMode,
    LogitsLoss,
    PolicyModel,
    PolicyOutput,
    can_pack_trees,
    estimate_row_costs,
    gather_parameters,
    has_same_attention,
    prepare_model,
)
from ludus.trainer.learner.process_group import select_device
from ludus.trainer.learner.rounding import change_rounding, compute_max_difference
from ludus.trainer.learner.step_metrics import (
    StepMetrics,
    TrainingWork,
    make_step_metrics,
    sum_metrics,
)
from ludus.trainer.models.load import load_language_model, load_policy_tokenizer
from ludus.trainer.weights.adapters import AdapterMerger

_VALUE_HEAD_FILE = "value_head.safetensors"
_CRITIC_FOLDER = "critic"
_REQUESTS_PER_PASS = 64


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
        self._device = select_device(self._rank)
        seed_torch(run.seed, Stream.LEARNER)
        self._mesh = init_device_mesh(self._device.type, (self._num_ranks,))
        config, algorithm = run.learner, run.algorithm
        self._algorithm = Algorithm(algorithm, run.rollout.max_tokens)
        critic = algorithm.critic if isinstance(algorithm, PpoConfig) else None
        self._policy = self._load_policy(has_value_head=isinstance(critic, HeadCritic))
        # The reference model of adapters is the policy with its adapters disabled.
        self._reference: PolicyModel | None = None
        if algorithm.kl_coef > 0 and self._lora_config is None:
            self._reference = self._load_policy(offloads_parameters=config.offload_reference)
        dtype = getattr(torch, config.dtype)
        self.model = ActorCritic(self._policy, self._load_critic(critic))
        models = self.model.list_models()
        self._work = TrainingWork.for_models(models, self._device, dtype, self._num_ranks)
        packs_trees = (
            config.packing == "tree"
            and can_pack_trees(self._policy, dtype, self._device)
            and all(has_same_attention(models[0], model) for model in models)
        )
        self.model.reshard()
        row_costs = estimate_row_costs(self._policy.language_model) if packs_trees else None
        self._micro_batch_config = MicroBatchConfig(
            config.max_tokens_per_micro_batch, row_costs, self._rank, self._num_ranks
        )
        # The frozen weights under adapters come from the model's folder and are not saved.
        self._state_options = StateDictOptions(
            ignore_frozen_params=self._lora_config is not None, strict=self._lora_config is None
        )
        groups = self.model.make_optimizer_groups(run.learning_rate, algorithm)
        self._rate_scales = [group.rate_scale for group in groups]
        self._optimizer = torch.optim.AdamW(
            [{"params": group.parameters} for group in groups],
            lr=run.learning_rate,
            fused=True,
            **_make_adamw_settings(config),
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
        return self._gather_parameters(self._policy.language_model)

    @torch.no_grad()
    def score_completions(self, requests: Sequence[ScoringRequest]) -> list[list[float]]:
        """Return the log-probs of each completion under the policy, at temperature 1."""
        samples = list(map(_make_scoring_sample, requests))
        scores: list[list[float]] = []
        for start in range(0, len(samples), _REQUESTS_PER_PASS):
            micro_batch = pack_one_micro_batch(samples[start : start + _REQUESTS_PER_PASS])
            micro_batch = micro_batch.to(self._device)
            output: PolicyOutput = self._policy(micro_batch.rows, temperature=1.0)
            logprobs = micro_batch.gather_samples(output.logprobs)
            pairs = zip(logprobs, micro_batch.mask, strict=True)
            scores += [row[mask].tolist() for row, mask in pairs]
        self.model.reshard()
        return scores

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
        state = self._get_state()
        with _convert_write_errors(folder):
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
        language_model, critic = self._policy.language_model, self.model.critic
        weights = self.gather_weights()
        value_head = self._gather_parameters(self._policy.value_head)
        critic_state = self._gather_parameters(None if critic is None else critic.classifier)
        base_weights: dict[str, Tensor] = {}
        if self._lora_config is not None:
            base_weights = lora.gather_base_weights(language_model, keeps_copies=self._rank == 0)
        if self._rank != 0:
            return []
        tokenizer = load_policy_tokenizer(self._model_path, self._run.model)
        with _convert_write_errors(folder):
            if self._lora_config is not None:
                adapter_folder = folder / lora.ADAPTER_FOLDER
                lora.save_adapters(adapter_folder, weights, self._lora_config, self._model_path)
                weights = AdapterMerger(base_weights, self._lora_config).merge(weights)
            _save_pretrained(language_model.config, tokenizer, weights, folder)
            # Unlike save_pretrained, this accepts the sampling settings of every published model.
            language_model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME)
            if value_head:
                save_file(value_head, folder / _VALUE_HEAD_FILE)
            if critic is not None:
                config = critic.classifier.config
                _save_pretrained(config, tokenizer, critic_state, folder / _CRITIC_FOLDER)
        return [SavedFile.from_path(path) for path in sorted(folder.rglob("*")) if path.is_file()]

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, possibly with a different number of ranks.

        Raises:
            CheckpointError: the folder cannot be read, contains an object that could run code, or
                belongs to a different model.
        """
        state = self._get_state()
        try:
            dcp.load(state, storage_reader=CheckpointReader(folder), planner=PlainValuePlanner())
        except (CheckpointException, RuntimeError, OSError) as error:
            failure = _find_first_failure(error)
            is_described = failure is error or isinstance(failure, UnsafeFileError)
            reason = str(failure) if is_described else repr(failure)
            raise CheckpointError(
                f"checkpoint '{folder}' cannot be read: {reason}; it must be complete, and come "
                "from a run with the same model"
            ) from error
        set_state_dict(
            self.model.checkpoint_module,
            self._optimizer,
            model_state_dict=state["policy"],
            optim_state_dict=state["optimizer"],
            options=self._state_options,
        )
        # A checkpoint contains the optimizer settings of its run; use the current ones instead.
        for group in self._optimizer.param_groups:
            group.update(_make_adamw_settings(self._config))
        torch.set_rng_state(state["torch_random"])

    @contextmanager
    def _clean_up_abandoned_step(self) -> Iterator[None]:
        random_state = torch.get_rng_state()
        try:
            yield
        except StepAbandonedError:
            self.model.reshard()
            torch.set_rng_state(random_state)
            raise
        finally:
            self.abandonment.end_step()

    def _load_policy(
        self, *, has_value_head: bool = False, offloads_parameters: bool = False
    ) -> PolicyModel:
        language_model = load_language_model(self._model_path)
        if self._lora_config is not None:
            lora.add_adapters(language_model, self._lora_config)
        # Dropout would make the learner a different policy than the sampler.
        policy = PolicyModel(language_model, has_value_head=has_value_head).eval()
        offloads = offloads_parameters and self._device.type != "cpu"
        return prepare_model(
            policy.to(self._device), self._config, self._mesh, offloads_parameters=offloads
        )

    def _load_critic(self, config: CriticConfig | None) -> Critic | None:
        if not isinstance(config, ModelCritic):
            return None
        critic = load_critic(config.path or self._model_path, self._model_path)
        return prepare_model(critic.eval().to(self._device), self._config, self._mesh)

    @torch.no_grad()
    def _gather_parameters(self, module: nn.Module | None) -> dict[str, Tensor]:
        """Return copies of a module's parameters on rank 0; a collective if there is a module."""
        if module is None:
            return {}
        return gather_parameters(module.named_parameters(), keeps_copies=self._rank == 0)

    def _get_state(self) -> dict[str, Any]:
        module, options = self.model.checkpoint_module, self._state_options
        if not self._optimizer.state:
            # torch creates the state by a step without a learning rate, which must not count.
            get_state_dict(module, self._optimizer, options=options)
            for parameter_state in self._optimizer.state.values():
                parameter_state["step"].zero_()
        policy, optimizer = get_state_dict(module, self._optimizer, options=options)
        return {"policy": policy, "optimizer": optimizer, "torch_random": torch.get_rng_state()}

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
            self.model.sync_gradients(index == len(micro_batches) - 1)
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
            self._optimizer.step()
            self.abandonment.count_update()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_skipped_in_a_row = 0 if is_finite else self._num_skipped_in_a_row + 1
        return grad_norm if is_finite else None


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


def _make_adamw_settings(config: LearnerConfig) -> dict[str, Any]:
    """Return AdamW's settings other than the learning rate, which is set per step."""
    return {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}


def _find_first_failure(error: BaseException) -> BaseException:
    """Return the first failure of any rank that `error` lists, or `error` itself."""
    failures = getattr(error, "failures", {})
    return next((failure[0] for failure in failures.values()), error)


@contextmanager
def _convert_write_errors(folder: Path) -> Iterator[None]:
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
            f"{describe_write_error(folder, _find_first_failure(error))}; free some space, and "
            "check that every node can write there"
        ) from error


def _make_scoring_sample(request: ScoringRequest) -> TrainingSample:
    token_ids = request.prompt_ids + request.completion_ids
    mask = [index >= len(request.prompt_ids) for index in range(len(token_ids))]
    return make_unscored_sample(token_ids, mask)
