"""A run that trains a reward model from preferences, and writes a model folder.

    data set --read--> comparisons as tokens --split--> train | held out
                                                          |        |
                        batches of similar length in each |        | evaluated after each
                        epoch                             v        v epoch
    scores [n, K] --cross-entropy of the preferred--> loss, AdamW -> metrics.json, model folder

The run's folder (`ludus.proto.reward_models`) exists only during training. All random numbers are
derived from the seed and from counters, so a resumed run is identical to an uninterrupted run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from ludus.proto.config import RewardModelRun
from ludus.proto.config.training_run import DEFAULT_CHECKPOINT_INTERVAL_S
from ludus.proto.errors import ConfigError
from ludus.proto.reward_models import (
    METRICS_FILE,
    PROGRESS_FILE,
    PreferenceScores,
    RewardModelEpoch,
    RewardModelMetrics,
    RewardModelProgress,
)
from ludus.proto.runs import CONFIG_FILE, Resume
from ludus.trainer.core.devices import choose_device, use_torch_threads
from ludus.trainer.core.option_names import name_option
from ludus.trainer.core.output import warn_user, write_atomically
from ludus.trainer.core.stopping import (
    RunStopped,
    StepAbandoned,
    StopRequest,
    check_skipped_updates,
    stop_on_signals,
)
from ludus.trainer.core.streams import Stream, seed_torch
from ludus.trainer.reward_model.comparisons import (
    ComparisonSet,
    encode_comparisons,
    evaluate_comparisons,
    make_epoch_batches,
    rank_preferred,
    read_comparisons,
    split_comparisons,
)
from ludus.trainer.reward_model.model import (
    RewardModel,
    load_reward_model,
    make_reward_model,
    pad_rows,
    split_by_budget,
)
from ludus.trainer.reward_model.rates import RateSchedule
from ludus.trainer.run.checkpoint import SavedState, restore_learner_state
from ludus.trainer.run.lifecycle import RunStorage, find_start, open_run
from ludus.trainer.run.schedule import CheckpointSchedule

ProgressCallback = Callable[[RewardModelProgress], None]

_REPORT_INTERVAL_S = 1.0


class RewardModelState(SavedState):
    """State of a reward model's run between two optimizer steps; `step` includes skipped steps."""

    fingerprint: str = Field(default="", alias="comparisons")
    """Fingerprint of the comparisons."""
    epoch: int = 0
    """Number of finished epochs."""
    batch: int = 0
    """Number of finished batches of the current epoch."""
    loss_sum: float = 0.0
    """Sum of the losses of the current epoch's comparisons."""
    num_correct: int = Field(default=0, alias="num_right")
    """Number of comparisons of the current epoch whose preferred answer got the highest score."""
    recent_loss: float | None = None
    num_skipped: int = 0
    """Number of steps that were skipped because their gradient was not finite."""
    num_skipped_in_a_row: int = 0
    epochs: list[RewardModelEpoch] = Field(default_factory=list)
    kept_epoch: int = 0
    """Number of the epoch, from 1, whose weights are the best so far."""
    elapsed_s: float = 0.0

    def end_epoch(self, report: RewardModelEpoch, *, is_kept: bool) -> None:
        """Record a finished epoch and start the next one."""
        self.epochs.append(report)
        self.epoch += 1
        self.batch, self.loss_sum, self.num_correct = 0, 0.0, 0
        if is_kept:
            self.kept_epoch = self.epoch


def train(run: RewardModelRun, *, resume: Resume, overwrite: bool) -> Path:
    """Train a reward model, and return its folder.

    Raises:
        UserError: the run cannot start as configured.
        RunStopped: SIGINT or SIGTERM stopped the run.
    """
    stop_request = StopRequest()
    with stop_on_signals(stop_request):
        train_reward_model(run, resume=resume, overwrite=overwrite, stop_request=stop_request)
    return run.output


def check(run: RewardModelRun, *, resume: Resume, overwrite: bool) -> None:
    """Check model and data without writing; print the numbers of training and held-out rows."""
    find_start(run, resume, RewardModelState)
    num_train, num_test = check_training(run, overwrite=overwrite)
    sys.stdout.write(
        f"{num_train} training comparisons, {num_test} held out; nothing was written\n"
    )


def train_reward_model(
    run: RewardModelRun,
    *,
    resume: Resume = Resume.NEVER,
    overwrite: bool = False,
    on_progress: ProgressCallback = lambda progress: None,
    stop_request: StopRequest | None = None,
) -> tuple[RewardModel, RewardModelMetrics]:
    """Train a reward model, write its folder, and return the model and its metrics.

    Args:
        overwrite: whether to replace a reward model in the output folder, or a run that stopped.
        on_progress: called about once a second.
        stop_request: stops the run after its current step. Default: none.

    Raises:
        UserError: the run cannot start as configured. Nothing is written.
        RunStopped: a stop was requested. A checkpoint of the last complete step is written.
        TrainingStalledError: too many consecutive gradients were not finite.
    """
    _check_output(run.output, overwrite=overwrite)
    with (
        _training_environment(run),
        open_run(run, RewardModelState, 1, resume=resume, overwrite=overwrite) as storage,
    ):
        stop_request = stop_request or StopRequest()
        try:
            with stop_request.interrupts_step():
                training = _RewardModelTraining(run, storage, on_progress, stop_request)
        except StepAbandoned:
            raise RunStopped("stopped before the first step; nothing was trained") from None
        metrics = training.train()
        storage.folder.discard()
        return training.load_finished_model(), metrics


def check_training(run: RewardModelRun, *, overwrite: bool = False) -> tuple[int, int]:
    """Check model and data without writing; return the numbers of training and held-out rows."""
    _check_output(run.output, overwrite=overwrite)
    choose_device(run.device)
    with _training_environment(run):
        model = make_reward_model(run.model, run.format, run.max_tokens)
    comparisons = encode_comparisons(read_comparisons(run.data), model.encoder, lambda: None)
    train_rows, test_rows = split_comparisons(comparisons, run.test_size, run.seed)
    return len(train_rows), len(test_rows)


class _RewardModelTraining:
    """The training of one reward model, from the data to the model folder."""

    def __init__(
        self,
        run: RewardModelRun,
        storage: RunStorage[RewardModelState],
        on_progress: ProgressCallback,
        stop_request: StopRequest,
    ) -> None:
        self._run, self._storage, self._state = run, storage, storage.state
        self._on_progress, self._stop_request = on_progress, stop_request
        self._start_s = time.monotonic() - self._state.elapsed_s
        self._last_report_s = -math.inf
        device = choose_device(run.device)
        self._model = make_reward_model(run.model, run.format, run.max_tokens).to(device)
        self._comparisons = self._read_comparisons()
        self._train_indices, self._test_indices = split_comparisons(
            self._comparisons, run.test_size, run.seed
        )
        self._num_steps = math.ceil(len(self._train_indices) / run.batch_size) * run.epochs
        self._rate_schedule = RateSchedule(run, self._num_steps)
        self._num_texts_cut = self._model.encoder.num_texts_cut
        if run.freeze_backbone:
            self._model.requires_grad_(False)
            self._model.head.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            [weight for weight in self._model.parameters() if weight.requires_grad],
            lr=run.learning_rate,
            weight_decay=run.weight_decay,
        )
        self._checkpoint_schedule = CheckpointSchedule(None, DEFAULT_CHECKPOINT_INTERVAL_S)
        self._restore_checkpoint()

    def train(self) -> RewardModelMetrics:
        """Train the remaining epochs, write the model, and return the metrics.

        Raises:
            RunStopped: a stop was requested.
            Exception: a step failed. The checkpoint is of the step before it.
        """
        while self._state.epoch < self._run.epochs:
            self._run_epoch()
            with self._restoring_state():
                self._end_epoch()
        self._report_progress("save")
        if self._run.keep == "last":
            self._model.save(self._run.output)
        metrics = self._make_metrics()
        path = self._run.output / METRICS_FILE
        write_atomically(path, metrics.model_dump_json(indent=2) + "\n")
        return metrics

    def load_finished_model(self) -> RewardModel:
        """Return the model with the weights that were written to its folder."""
        if self._state.kept_epoch == len(self._state.epochs):
            return self._model.eval()
        return load_reward_model(
            self._run.output, device=self._model.device, max_tokens=self._run.max_tokens
        )

    def _run_epoch(self) -> None:
        run = self._run
        max_lengths = self._comparisons.max_lengths
        batches = make_epoch_batches(
            self._train_indices, max_lengths, run.batch_size, run.seed, self._state.epoch
        )
        for batch in batches[self._state.batch :]:
            with self._restoring_state():
                self._train_batch(batch)
            state = self._state
            state.batch += 1
            state.step += 1
            self._report_progress("train")
            self._checkpoint_schedule.end_step()
            if self._stop_request.is_set:
                self._save_checkpoint()
                raise self._make_stop()
            if self._checkpoint_schedule.is_due(state.step):
                self._save_checkpoint()

    @contextmanager
    def _restoring_state(self) -> Iterator[None]:
        """If the block fails or is abandoned, save the state from before it.

        The block may change the weights only as its last action.
        """
        state = self._state.model_copy(deep=True)
        torch_random, cuda_random = torch.get_rng_state(), self._get_cuda_random()
        try:
            yield
        except (Exception, StepAbandoned) as error:
            self._state = state
            torch.set_rng_state(torch_random)
            if cuda_random is not None:
                torch.cuda.set_rng_state(cuda_random, self._model.device)
            self._save_checkpoint()
            if isinstance(error, StepAbandoned):
                raise self._make_stop() from None
            error.add_note(f"continue with {name_option('resume')} from step {state.step}")
            raise

    def _make_stop(self) -> RunStopped:
        return RunStopped(
            f"stopped after step {self._state.step} of {self._num_steps}; continue with "
            f"{name_option('resume')}"
        )

    def _end_epoch(self) -> None:
        state = self._state
        self._report_progress("judge")
        with self._stop_request.interrupts_step():
            test_scores = self._evaluate()
        num_rows = len(self._train_indices)
        report = RewardModelEpoch(
            epoch=state.epoch + 1,
            train_loss=state.loss_sum / num_rows,
            train_accuracy=state.num_correct / num_rows,
            test=test_scores,
            elapsed_s=self._elapsed_s,
        )
        state.end_epoch(report, is_kept=self._is_best(report))
        if state.kept_epoch == state.epoch and self._run.keep == "best":
            self._model.save(self._run.output)
        self._report_progress("train", report)
        if state.epoch < self._run.epochs:
            self._save_checkpoint()

    def _is_best(self, report: RewardModelEpoch) -> bool:
        state = self._state
        if self._run.keep == "last" or report.test is None or state.kept_epoch == 0:
            return True
        best_scores = state.epochs[state.kept_epoch - 1].test
        return best_scores is None or report.test.loss < best_scores.loss

    def _train_batch(self, batch: list[int]) -> None:
        """Take one optimizer step on these comparisons."""
        self._model.train()
        if self._run.freeze_backbone:
            self._model.eval()  # no dropout in the frozen layers
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate_schedule.compute_rate(self._state.step)
        with self._stop_request.interrupts_step():
            self._accumulate_gradients(batch)
        self._take_optimizer_step()

    def _accumulate_gradients(self, batch: list[int]) -> None:
        state, comparisons, loss_sum = self._state, self._comparisons, 0.0
        for micro_batch in split_by_budget(
            comparisons.max_lengths[batch].tolist(),
            self._run.max_tokens_per_micro_batch,
            comparisons.num_answers,
        ):
            rows = [batch[index] for index in micro_batch]
            best_indices = torch.from_numpy(comparisons.best_indices[rows])
            with self._make_autocast_context():
                scores = self._model(pad_rows(comparisons.select_rows(rows))).view(len(rows), -1)
            loss = cross_entropy(scores, best_indices.to(scores.device)) * len(rows)
            (loss / len(batch)).backward()
            loss_sum += loss.item()
            ranks = rank_preferred(scores.detach().cpu(), best_indices)
            state.num_correct += int((ranks == 1).sum())
        state.loss_sum += loss_sum
        state.recent_loss = loss_sum / len(batch)

    def _take_optimizer_step(self) -> None:
        state = self._state
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._run.max_grad_norm
        )
        if torch.isfinite(grad_norm):
            self._optimizer.step()
            state.num_skipped_in_a_row = 0
        else:
            state.num_skipped += 1
            state.num_skipped_in_a_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        check_skipped_updates(
            state.num_skipped_in_a_row,
            f"lower learning_rate = {self._run.learning_rate:g}, or set dtype = 'float32'",
        )

    def _evaluate(self) -> PreferenceScores | None:
        max_tokens = self._run.max_tokens_per_micro_batch
        with self._make_autocast_context():
            return evaluate_comparisons(
                self._model, self._comparisons, self._test_indices, max_tokens
            )

    def _make_autocast_context(self) -> AbstractContextManager[Any]:
        if self._run.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._model.device.type, torch.bfloat16)

    def _read_comparisons(self) -> ComparisonSet:
        encoder = self._model.encoder
        comparisons = encode_comparisons(
            read_comparisons(self._run.data), encoder, lambda: self._report_progress("read")
        )
        if encoder.num_texts_cut:
            warn_user(
                f"{encoder.num_texts_cut} texts are longer than max_tokens = {encoder.max_tokens} "
                "and lose their beginning"
            )
        if comparisons.num_left_out:
            warn_user(
                f"{comparisons.num_left_out} comparisons are skipped, because their answers are "
                "all equal"
            )
        return comparisons

    def _restore_checkpoint(self) -> None:
        """Continue from the checkpoint, if the run resumes."""
        fingerprint = self._comparisons.compute_fingerprint()
        if self._storage.checkpoint is None:
            self._state.fingerprint = fingerprint
            return
        if self._state.fingerprint != fingerprint:
            raise ConfigError(
                f"data = '{self._run.data}' has changed since the training started; restore "
                f"the old data, or start again without {name_option('resume')}"
            )
        restore_learner_state(self._storage.checkpoint, self._restore_learner)
        self._storage.folder.write(CONFIG_FILE, self._run)

    def _restore_learner(self, learner_state: dict[str, Any]) -> None:
        self._model.load_state_dict(learner_state["model"])
        self._optimizer.load_state_dict(learner_state["optimizer"])
        torch.set_rng_state(learner_state["torch_random"])
        if self._model.device.type == "cuda" and learner_state["cuda_random"] is not None:
            torch.cuda.set_rng_state(learner_state["cuda_random"], self._model.device)

    def _save_checkpoint(self) -> None:
        self._state.elapsed_s = self._elapsed_s
        start_s = time.monotonic()
        self._storage.checkpoints.save(
            self._state,
            {
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "torch_random": torch.get_rng_state(),
                "cuda_random": self._get_cuda_random(),
            },
        )
        self._checkpoint_schedule.end_checkpoint(time.monotonic() - start_s)

    def _get_cuda_random(self) -> Tensor | None:
        device = self._model.device
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _report_progress(self, phase: Any, report: RewardModelEpoch | None = None) -> None:
        """Report the progress, while reading and during an epoch at most once a second."""
        is_due = time.monotonic() - self._last_report_s > _REPORT_INTERVAL_S
        if phase in ("read", "train") and report is None and not is_due:
            return
        self._last_report_s = time.monotonic()
        state = self._state
        progress = RewardModelProgress(
            phase=phase,
            step=state.step,
            num_steps=0 if phase == "read" else self._num_steps,
            epoch=min(state.epoch + 1, self._run.epochs),
            num_epochs=self._run.epochs,
            loss=state.recent_loss,
            elapsed_s=self._elapsed_s,
            finished=report,
        )
        with (self._run.folder / PROGRESS_FILE).open("a", encoding="utf-8") as file:
            file.write(progress.model_dump_json() + "\n")
        self._on_progress(progress)

    def _make_metrics(self) -> RewardModelMetrics:
        state, comparisons = self._state, self._comparisons
        scores = state.epochs[state.kept_epoch - 1].test
        return RewardModelMetrics(
            model=self._run.model,
            data=str(self._run.data),
            num_train=len(self._train_indices),
            num_test=len(self._test_indices),
            num_answers=comparisons.num_answers,
            num_left_out=comparisons.num_left_out,
            num_texts_cut=self._num_texts_cut,
            num_steps=self._num_steps,
            num_steps_skipped=state.num_skipped,
            kept_epoch=state.kept_epoch,
            accuracy=scores and scores.accuracy,
            mrr=scores and scores.mrr,
            loss=scores and scores.loss,
            epochs=tuple(state.epochs),
            elapsed_s=self._elapsed_s,
        )


def _check_output(output: Path, *, overwrite: bool) -> None:
    """Check that the output folder is empty, or may be replaced."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / METRICS_FILE).is_file():
        raise ConfigError(
            f"output = '{output}' exists and is not the folder of a reward model; choose another "
            "folder"
        )
    if not overwrite:
        raise ConfigError(
            f"output = '{output}' already contains a reward model; replace it with "
            f"{name_option('overwrite')}, or choose another folder"
        )


@contextmanager
def _training_environment(run: RewardModelRun) -> Iterator[None]:
    """Give torch the run's random stream and number of threads within the block."""
    with torch.random.fork_rng(), use_torch_threads(run.num_threads):
        seed_torch(run.seed, Stream.REWARD_MODEL)
        yield
