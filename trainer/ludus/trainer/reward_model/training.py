"""Training of a reward model from preferences.

    data set --read--> comparisons as tokens --split--> train | held out
                                                          |        |
                        batches of similar length in each |        | evaluated after each
                        epoch                             v        v epoch
    scores [n, K] --log softmax at the preferred--> loss, AdamW -> metrics.json, model folder

All random numbers follow from the seed and from counters, so a resumed training is identical to an
uninterrupted one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ludus.proto.config import RewardModelConfig
from ludus.proto.config.reward_model import MAX_DEFAULT_WARMUP_STEPS
from ludus.proto.reward_models import (
    METRICS_FILE,
    PreferenceScores,
    RewardModelEpoch,
    RewardModelMetrics,
    RewardModelProgress,
)
from ludus.trainer.core.output import write_atomically
from ludus.trainer.core.stopping import RunStopped, check_skipped_updates
from ludus.trainer.core.streams import Stream, seed_torch
from ludus.trainer.reward_model.batches import pad_rows, split_by_budget
from ludus.trainer.reward_model.comparison_set import (
    ComparisonSet,
    encode_comparisons,
    make_epoch_batches,
    split_comparisons,
)
from ludus.trainer.reward_model.evaluation import evaluate_comparisons, rank_best
from ludus.trainer.reward_model.folder import TrainingFolder, check_output
from ludus.trainer.reward_model.model import (
    RewardModel,
    choose_device,
    load_reward_model,
    make_reward_model,
)
from ludus.trainer.reward_model.position import Position
from ludus.trainer.reward_model.preferences import read_comparisons

_log = logging.getLogger(__name__)

OnProgress = Callable[[RewardModelProgress], None]

_REPORT_EVERY_S = 1.0
_CHECKPOINT_EVERY_S = 600.0


def train_reward_model(
    config: RewardModelConfig,
    *,
    resume: Path | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[RewardModel, RewardModelMetrics]:
    """Train a reward model, write its folder, and return the model and its metrics.

    Args:
        resume: a checkpoint, or its folder, to continue from.
        overwrite: whether to replace an existing reward model in the output folder.
        on_progress: called about once a second.
        should_stop: called after each optimizer step.

    Raises:
        UserError: the training cannot start as configured. Nothing is written.
        RunStopped: `should_stop` returned True. The checkpoint is written.
        TrainingStalledError: too many consecutive gradients were not finite.
    """
    check_output(config.output, overwrite=overwrite)
    with _training_environment(config), TrainingFolder.open(config, resume) as folder:
        training = _Training(config, folder, on_progress)
        metrics = training.run(should_stop)
        folder.remove()
        return training.finished_model(), metrics


def check_training(config: RewardModelConfig, *, overwrite: bool = False) -> tuple[int, int]:
    """Check model and data without writing; return the numbers of training and held-out rows.

    Raises:
        UserError: the training cannot start as configured.
    """
    check_output(config.output, overwrite=overwrite)
    choose_device(config.device)
    with _training_environment(config):
        model = make_reward_model(config.model, config.format, config.max_tokens)
    comparisons = encode_comparisons(
        read_comparisons(config.data), model.encoder, lambda number: None
    )
    train, test = split_comparisons(comparisons, config.test_size, config.seed)
    return len(train), len(test)


class _Training:
    """A training, from the data to the model folder."""

    def __init__(
        self, config: RewardModelConfig, folder: TrainingFolder, on_progress: OnProgress
    ) -> None:
        self._config, self._folder, self._on_progress = config, folder, on_progress
        self._start_s = time.monotonic()
        self._last_report_s = -math.inf
        self._position = Position()
        device = choose_device(config.device)
        self._model = make_reward_model(config.model, config.format, config.max_tokens)
        self._model.to(device)
        self._comparisons = self._read_data()
        self._train, self._test = split_comparisons(
            self._comparisons, config.test_size, config.seed
        )
        self._steps_per_epoch = math.ceil(len(self._train) / config.batch_size)
        self._num_steps = self._steps_per_epoch * config.epochs
        self._warmup_steps = self._choose_warmup_steps()
        self._num_texts_cut = self._model.encoder.num_cut
        if config.freeze_backbone:
            self._model.requires_grad_(False)
            self._model.head.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            [parameter for parameter in self._model.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
        )
        self._last_checkpoint_s = time.monotonic()
        self._restore()

    def run(self, should_stop: Callable[[], bool]) -> RewardModelMetrics:
        """Train the remaining epochs, write the model, and return the metrics."""
        while self._position.epoch < self._config.epochs:
            self._run_epoch(should_stop)
            self._end_epoch()
        self._report("save")
        if self._config.keep == "last":
            self._model.save(self._config.output)
        metrics = self._make_metrics()
        path = self._config.output / METRICS_FILE
        write_atomically(path, metrics.model_dump_json(indent=2) + "\n")
        return metrics

    def finished_model(self) -> RewardModel:
        """Return the model with the weights in its folder."""
        if self._position.kept_epoch == len(self._position.epochs):
            return self._model.eval()
        return load_reward_model(
            self._config.output, device=self._model.device, max_tokens=self._config.max_tokens
        )

    def _run_epoch(self, should_stop: Callable[[], bool]) -> None:
        config, position = self._config, self._position
        batches = make_epoch_batches(
            self._train,
            self._comparisons.max_lengths,
            config.batch_size,
            config.seed,
            position.epoch,
        )
        for batch in batches[position.batch :]:
            self._train_batch(batch)
            position.batch += 1
            position.step += 1
            self._report("train")
            if should_stop():
                self._save_checkpoint()
                raise RunStopped(
                    f"stopped after step {position.step} of {self._num_steps}; continue with "
                    f"--resume, or resume_checkpoint = '{self._folder.path}'"
                )
            if time.monotonic() - self._last_checkpoint_s > _CHECKPOINT_EVERY_S:
                self._save_checkpoint()

    def _end_epoch(self) -> None:
        position = self._position
        self._report("judge")
        test = self._evaluate()
        num_rows = len(self._train)
        epoch = RewardModelEpoch(
            epoch=position.epoch + 1,
            train_loss=position.loss_sum / num_rows,
            train_accuracy=position.num_right / num_rows,
            test=test,
            elapsed_s=self._elapsed_s,
        )
        position.end_epoch(epoch, is_kept=self._is_best(epoch))
        if position.kept_epoch == position.epoch and self._config.keep == "best":
            self._model.save(self._config.output)
        self._report("train", epoch)
        if position.epoch < self._config.epochs:
            self._save_checkpoint()

    def _is_best(self, epoch: RewardModelEpoch) -> bool:
        position = self._position
        if self._config.keep == "last" or epoch.test is None or position.kept_epoch == 0:
            return True
        best_report = position.epochs[position.kept_epoch - 1].test
        return best_report is None or epoch.test.loss < best_report.loss

    def _train_batch(self, batch: list[int]) -> None:
        """Take one optimizer step on these comparisons."""
        self._model.train()
        if self._config.freeze_backbone:
            self._model.eval()  # no dropout in the frozen layers
        position = self._position
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * self._rate_factor(position.step)
        max_lengths = self._comparisons.max_lengths[batch].tolist()
        parts = split_by_budget(
            max_lengths, self._config.max_tokens_per_micro_batch, self._comparisons.num_answers
        )
        loss_sum, num_right = 0.0, 0
        for part in parts:
            rows = [batch[index] for index in part]
            best_indices = torch.from_numpy(self._comparisons.best[rows])
            scores = self._score(rows)
            loss = cross_entropy(scores, best_indices.to(scores.device)) * len(rows)
            (loss / len(batch)).backward()
            loss_sum += loss.item()
            num_right += int((rank_best(scores.detach().cpu(), best_indices) == 1).sum())
        position.loss_sum += loss_sum
        position.num_right += num_right
        position.recent_loss = loss_sum / len(batch)
        self._step_optimizer()

    def _score(self, rows: list[int]) -> Tensor:
        """Return the scores of all answers, float32 [n, K]."""
        with self._autocast():
            scores: Tensor = self._model(pad_rows(self._comparisons.rows(rows)))
        return scores.view(len(rows), -1)

    def _step_optimizer(self) -> None:
        position = self._position
        parameters = [
            parameter for parameter in self._model.parameters() if parameter.grad is not None
        ]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm)
        if torch.isfinite(norm):
            self._optimizer.step()
            position.num_skipped_in_a_row = 0
        else:
            position.num_skipped += 1
            position.num_skipped_in_a_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        check_skipped_updates(
            position.num_skipped_in_a_row,
            f"lower learning_rate = {self._config.learning_rate:g}, or set dtype = 'float32'",
        )

    def _rate_factor(self, step: int) -> float:
        """Return the share of the peak learning rate: a linear rise, then a linear decay to 0."""
        if step < self._warmup_steps:
            return (step + 1) / self._warmup_steps
        return (self._num_steps - step) / max(1, self._num_steps - self._warmup_steps)

    def _choose_warmup_steps(self) -> int:
        num_steps = self._config.warmup_steps
        if num_steps is None:
            return min(MAX_DEFAULT_WARMUP_STEPS, self._num_steps // 10)
        if num_steps >= self._num_steps:
            _log.warning(
                "warmup_steps = %d, but training has only %d steps: the learning rate rises until "
                "the end, to %.2g of %.2g; lower warmup_steps, or leave it out",
                *(num_steps, self._num_steps),
                *(self._config.learning_rate * self._num_steps / num_steps,),
                *(self._config.learning_rate,),
            )
        return num_steps

    def _evaluate(self) -> PreferenceScores | None:
        with self._autocast():
            max_tokens = self._config.max_tokens_per_micro_batch
            return evaluate_comparisons(self._model, self._comparisons, self._test, max_tokens)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._model.device.type, torch.bfloat16)

    def _read_data(self) -> ComparisonSet:
        def report(number: int) -> None:
            if time.monotonic() - self._last_report_s > _REPORT_EVERY_S:
                self._report("read")

        encoder = self._model.encoder
        comparisons = encode_comparisons(read_comparisons(self._config.data), encoder, report)
        if encoder.num_cut:
            _log.warning(
                "%d texts are longer than max_tokens = %d and lose their beginning",
                *(encoder.num_cut, encoder.max_tokens),
            )
        if comparisons.num_left_out:
            _log.warning(
                "%d comparisons are skipped, because their answers are all equal",
                comparisons.num_left_out,
            )
        return comparisons

    def _restore(self) -> None:
        """Continue from a checkpoint, if the training resumes."""
        state = self._folder.load_checkpoint(self._config, self._comparisons.fingerprint())
        if state is None:
            return
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._position = Position.model_validate_json(state["position"])
        self._start_s = time.monotonic() - self._position.elapsed_s
        torch.set_rng_state(state["torch_random"])
        if self._model.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"], self._model.device)

    def _save_checkpoint(self) -> None:
        self._position.elapsed_s = self._elapsed_s
        is_cuda = self._model.device.type == "cuda"
        self._folder.save_checkpoint(
            {
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "position": self._position.model_dump_json(),
                "torch_random": torch.get_rng_state(),
                "cuda_random": torch.cuda.get_rng_state(self._model.device) if is_cuda else None,
                "config": self._config.model_dump_json(),
                "data": self._comparisons.fingerprint(),
            }
        )
        self._last_checkpoint_s = time.monotonic()

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _report(self, phase: Any, epoch: RewardModelEpoch | None = None) -> None:
        """Report the progress, during an epoch at most once a second."""
        is_due = time.monotonic() - self._last_report_s > _REPORT_EVERY_S
        if phase == "train" and epoch is None and not is_due:
            return
        self._last_report_s = time.monotonic()
        position = self._position
        progress = RewardModelProgress(
            phase=phase,
            step=position.step,
            num_steps=0 if phase == "read" else self._num_steps,
            epoch=min(position.epoch + 1, self._config.epochs),
            num_epochs=self._config.epochs,
            loss=position.recent_loss,
            elapsed_s=self._elapsed_s,
            finished=epoch,
        )
        self._folder.append_progress(progress)
        self._on_progress(progress)

    def _make_metrics(self) -> RewardModelMetrics:
        position, comparisons = self._position, self._comparisons
        test = position.epochs[position.kept_epoch - 1].test
        return RewardModelMetrics(
            model=self._config.model,
            data=str(self._config.data),
            num_train=len(self._train),
            num_test=len(self._test),
            num_answers=comparisons.num_answers,
            num_left_out=comparisons.num_left_out,
            num_texts_cut=self._num_texts_cut,
            num_steps=self._num_steps,
            num_steps_skipped=position.num_skipped,
            kept_epoch=position.kept_epoch,
            accuracy=None if test is None else test.accuracy,
            mrr=None if test is None else test.mrr,
            loss=None if test is None else test.loss,
            epochs=tuple(position.epochs),
            elapsed_s=self._elapsed_s,
        )


@contextmanager
def _training_environment(config: RewardModelConfig) -> Iterator[None]:
    """Give torch the training's random stream and number of threads within the block."""
    num_threads = torch.get_num_threads()
    with torch.random.fork_rng():
        seed_torch(config.seed, Stream.REWARD_MODEL)
        torch.set_num_threads(config.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)
