"""Training of a reward model from preferences.

    data set --read--> comparisons as tokens --split--> train | held out
                                                          |        |
                epoch by epoch: batches of similar length |        | judged after each epoch
                                                          v        v
    scores [n, K] --log softmax at the preferred--> loss, AdamW -> metrics.json, the model's folder

Everything random follows from the seed and from counters, so a training that is stopped and
continued is the same, to the bit, as one that was not.
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

from ludus.proto.config import RewardModelConfig
from ludus.proto.config.reward_model import MAX_DEFAULT_WARMUP_STEPS
from ludus.proto.errors import LudusError
from ludus.proto.reward_models import (
    METRICS_FILE,
    PreferenceScores,
    RewardModelEpoch,
    RewardModelMetrics,
    RewardModelProgress,
)
from ludus.trainer.algorithms.preference import listwise_loss
from ludus.trainer.core.disk import write_atomically
from ludus.trainer.core.stopping import RunStopped
from ludus.trainer.core.streams import Stream, seed_torch
from ludus.trainer.reward_model.batches import pad, within_budget
from ludus.trainer.reward_model.comparison_set import ComparisonSet, encode, epoch_batches, split
from ludus.trainer.reward_model.folder import TrainingFolder, check_output
from ludus.trainer.reward_model.judge import judge, ranks
from ludus.trainer.reward_model.model import (
    RewardModel,
    begin_reward_model,
    chosen_device,
    load_reward_model,
)
from ludus.trainer.reward_model.position import Position
from ludus.trainer.reward_model.preferences import comparisons_of

_log = logging.getLogger(__name__)

Tell = Callable[[RewardModelProgress], None]

_MOST_SKIPPED_IN_A_ROW = 10
_TELL_EVERY_S = 1.0
_CHECKPOINT_EVERY_S = 600.0


def train_reward_model(
    config: RewardModelConfig,
    *,
    resume: Path | None = None,
    overwrite: bool = False,
    tell: Tell = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[RewardModel, RewardModelMetrics]:
    """The reward model, whose folder is written, and how it does.

    Args:
        resume: a checkpoint, or the folder that holds it, to continue from.
        overwrite: replaces the reward model that the output folder may hold.
        tell: is called now and then with where training stands.
        should_stop: is asked after each optimizer step.

    Raises:
        UserError: it cannot begin as configured; nothing is written then.
        RunStopped: `should_stop` said so; the checkpoint is written.
    """
    check_output(config.output, overwrite=overwrite)
    with _own_random_numbers(config), TrainingFolder.opened(config, resume) as folder:
        training = _Training(config, folder, tell)
        metrics = training.run(should_stop)
        folder.discard()
        return training.finished_model(), metrics


def check_training(config: RewardModelConfig, *, overwrite: bool = False) -> tuple[int, int]:
    """The numbers of comparisons to train on and held out: all is read, and nothing is written.

    Raises:
        UserError: training could not begin as configured.
    """
    check_output(config.output, overwrite=overwrite)
    chosen_device(config.device)
    with _own_random_numbers(config):
        model = begin_reward_model(config.model, config.format, config.max_tokens)
    comparisons = encode(comparisons_of(config.data), model.texts, lambda number: None)
    train, test = split(comparisons, config.test_size, config.seed)
    return len(train), len(test)


class _Training:
    """One training, from the data to the model's folder."""

    def __init__(self, config: RewardModelConfig, folder: TrainingFolder, tell: Tell) -> None:
        self._config, self._folder, self._tell = config, folder, tell
        self._begun_s = time.monotonic()
        self._told_s = -math.inf
        self._position = Position()
        device = chosen_device(config.device)
        self._model = begin_reward_model(config.model, config.format, config.max_tokens)
        self._model.to(device)
        self._comparisons = self._read()
        self._train, self._test = split(self._comparisons, config.test_size, config.seed)
        self._steps_per_epoch = math.ceil(len(self._train) / config.batch_size)
        self._num_steps = self._steps_per_epoch * config.epochs
        self._warmup_steps = self._num_warmup_steps()
        self._num_texts_cut = self._model.texts.num_cut
        self._freeze()
        self._optimizer = torch.optim.AdamW(
            [p for p in self._model.parameters() if p.requires_grad],
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
        )
        self._saved_s = time.monotonic()
        self._continue()

    def run(self, should_stop: Callable[[], bool]) -> RewardModelMetrics:
        """The metrics, once the last epoch is over and the model is written."""
        place = self._position
        while place.epoch < self._config.epochs:
            self._run_epoch(should_stop)
            self._end_epoch()
        self._say("save")
        if self._config.keep == "last":
            self._model.save(self._config.output)
        metrics = self._metrics()
        path = self._config.output / METRICS_FILE
        write_atomically(path, metrics.model_dump_json(indent=2) + "\n")
        return metrics

    def finished_model(self) -> RewardModel:
        """The model with the weights that its folder has."""
        if self._position.kept_epoch == len(self._position.epochs):
            return self._model.eval()
        return load_reward_model(
            self._config.output, device=self._model.device, max_tokens=self._config.max_tokens
        )

    def _run_epoch(self, should_stop: Callable[[], bool]) -> None:
        config, place = self._config, self._position
        batches = epoch_batches(
            self._train, self._comparisons.longest, config.batch_size, config.seed, place.epoch
        )
        for batch in batches[place.batch :]:
            self._learn(batch)
            place.batch += 1
            place.step += 1
            self._say("train")
            if should_stop():
                self._save_checkpoint()
                raise RunStopped(
                    f"stopped after step {place.step} of {self._num_steps}; continue with "
                    f"--resume, or resume_checkpoint = '{self._folder.path}'"
                )
            if time.monotonic() - self._saved_s > _CHECKPOINT_EVERY_S:
                self._save_checkpoint()

    def _end_epoch(self) -> None:
        place = self._position
        self._say("judge")
        test = self._judge()
        num_rows = len(self._train)
        finished = RewardModelEpoch(
            epoch=place.epoch + 1,
            train_loss=place.loss_sum / num_rows,
            train_accuracy=place.num_right / num_rows,
            test=test,
            elapsed_s=self._elapsed_s,
        )
        place.end_epoch(finished, self._is_kept(finished))
        if place.kept_epoch == place.epoch and self._config.keep == "best":
            self._model.save(self._config.output)
        self._say("train", finished)
        if place.epoch < self._config.epochs:
            self._save_checkpoint()

    def _is_kept(self, finished: RewardModelEpoch) -> bool:
        place = self._position
        if self._config.keep == "last" or finished.test is None or place.kept_epoch == 0:
            return True
        kept = place.epochs[place.kept_epoch - 1].test
        return kept is None or finished.test.loss < kept.loss

    def _learn(self, batch: list[int]) -> None:
        """Take one optimizer step on these comparisons."""
        self._model.train()
        if self._config.freeze_backbone:
            self._model.eval()  # what does not learn must not drop anything either
        place = self._position
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * self._rate_at(place.step)
        longest = self._comparisons.longest[batch].tolist()
        parts = within_budget(
            longest, self._config.max_tokens_per_micro_batch, self._comparisons.num_answers
        )
        loss_sum, num_right = 0.0, 0
        for part in parts:
            rows = [batch[index] for index in part]
            best = torch.from_numpy(self._comparisons.best[rows])
            scores = self._scores(rows)
            loss = listwise_loss(scores, best.to(scores.device)) * len(rows)
            (loss / len(batch)).backward()
            loss_sum += loss.item()
            num_right += int((ranks(scores.detach().cpu(), best) == 1).sum())
        place.loss_sum += loss_sum
        place.num_right += num_right
        place.recent_loss = loss_sum / len(batch)
        self._take_step()

    def _scores(self, rows: list[int]) -> Tensor:
        """The scores of all answers, float32 [n, K]."""
        with self._precision():
            scores: Tensor = self._model(pad(self._comparisons.rows(rows)))
        return scores.view(len(rows), -1)

    def _take_step(self) -> None:
        place = self._position
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm)
        if torch.isfinite(norm):
            self._optimizer.step()
            place.num_skipped_in_a_row = 0
        else:
            place.num_skipped += 1
            place.num_skipped_in_a_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        if place.num_skipped_in_a_row >= _MOST_SKIPPED_IN_A_ROW:
            raise LudusError(
                f"the gradients of {_MOST_SKIPPED_IN_A_ROW} steps in a row are not finite; lower "
                f"learning_rate = {self._config.learning_rate:g}, or set dtype = 'float32'"
            )

    def _rate_at(self, step: int) -> float:
        """The share of the peak learning rate at a step, from 0: rising, then falling to 0."""
        if step < self._warmup_steps:
            return (step + 1) / self._warmup_steps
        return (self._num_steps - step) / max(1, self._num_steps - self._warmup_steps)

    def _num_warmup_steps(self) -> int:
        wanted = self._config.warmup_steps
        if wanted is None:
            return min(MAX_DEFAULT_WARMUP_STEPS, self._num_steps // 10)
        if wanted >= self._num_steps:
            _log.warning(
                "warmup_steps = %d, and training has %d steps: the learning rate rises to the end, "
                "to %.2g of %.2g; lower warmup_steps, or leave it out",
                *(wanted, self._num_steps),
                *(self._config.learning_rate * self._num_steps / wanted,),
                *(self._config.learning_rate,),
            )
        return wanted

    def _judge(self) -> PreferenceScores | None:
        with self._precision():
            max_tokens = self._config.max_tokens_per_micro_batch
            return judge(self._model, self._comparisons, self._test, max_tokens)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._model.device.type, torch.bfloat16)

    def _read(self) -> ComparisonSet:
        def tell(number: int) -> None:
            if time.monotonic() - self._told_s > _TELL_EVERY_S:
                self._say("read")

        found = encode(comparisons_of(self._config.data), self._model.texts, tell)
        texts = self._model.texts
        if texts.num_cut:
            _log.warning(
                "%d texts are longer than max_tokens = %d: their beginnings are cut off",
                *(texts.num_cut, texts.max_tokens),
            )
        if found.num_left_out:
            _log.warning(
                "%d comparisons are left out: their answers are all equal", found.num_left_out
            )
        return found

    def _freeze(self) -> None:
        if self._config.freeze_backbone:
            self._model.requires_grad_(False)
            self._model.head.requires_grad_(True)

    def _continue(self) -> None:
        """Go back to where a checkpoint stands, if there is one to continue from."""
        state = self._folder.checkpoint(self._config, self._comparisons.fingerprint())
        if state is None:
            return
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._position = Position.model_validate_json(state["position"])
        self._begun_s = time.monotonic() - self._position.elapsed_s
        torch.set_rng_state(state["torch_random"])
        if self._model.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"], self._model.device)

    def _save_checkpoint(self) -> None:
        self._position.elapsed_s = self._elapsed_s
        is_cuda = self._model.device.type == "cuda"
        self._folder.save(
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
        self._saved_s = time.monotonic()

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def _say(self, phase: Any, finished: RewardModelEpoch | None = None) -> None:
        """Tell where training stands, at most once a second but at the end of an epoch."""
        is_due = time.monotonic() - self._told_s > _TELL_EVERY_S
        if phase == "train" and finished is None and not is_due:
            return
        self._told_s = time.monotonic()
        place = self._position
        progress = RewardModelProgress(
            phase=phase,
            step=place.step,
            num_steps=0 if phase == "read" else self._num_steps,
            epoch=min(place.epoch + 1, self._config.epochs),
            num_epochs=self._config.epochs,
            loss=place.recent_loss,
            elapsed_s=self._elapsed_s,
            finished=finished,
        )
        self._folder.tell(progress)
        self._tell(progress)

    def _metrics(self) -> RewardModelMetrics:
        place, comparisons = self._position, self._comparisons
        kept = place.epochs[place.kept_epoch - 1].test
        return RewardModelMetrics(
            model=self._config.model,
            data=str(self._config.data),
            num_train=len(self._train),
            num_test=len(self._test),
            num_answers=comparisons.num_answers,
            num_left_out=comparisons.num_left_out,
            num_texts_cut=self._num_texts_cut,
            num_steps=self._num_steps,
            num_steps_skipped=place.num_skipped,
            kept_epoch=place.kept_epoch,
            accuracy=None if kept is None else kept.accuracy,
            mrr=None if kept is None else kept.mrr,
            loss=None if kept is None else kept.loss,
            epochs=tuple(place.epochs),
            elapsed_s=self._elapsed_s,
        )


@contextmanager
def _own_random_numbers(config: RewardModelConfig) -> Iterator[None]:
    """Torch draws from the training's own stream meanwhile; the program's own is left alone."""
    num_threads = torch.get_num_threads()
    with torch.random.fork_rng():
        seed_torch(config.seed, Stream.REWARD_MODEL)
        torch.set_num_threads(config.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)
