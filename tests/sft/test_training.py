"""Fine-tuning: the loss, packing, validation, early stopping and resuming."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ludus.proto.config import SftRun
from ludus.proto.errors import ConfigError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import Resume, read_metrics
from ludus.trainer.learner.learner import Learner
from ludus.trainer.models.load import load_language_model
from ludus.trainer.run.schedule import compute_coefficients
from ludus.trainer.sft.conversations import BatchOrder
from ludus.trainer.sft.preparation import prepare_run
from tests.sft.chats import make_rows, make_rule_rows, write_rows
from tests.sft.in_process import assert_equal_weights, make_run, train_in_process

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_rank_group")]


@pytest.fixture(scope="session")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file with 32 random conversations."""
    return write_rows(tmp_path_factory.mktemp("data") / "chats.jsonl", make_rows(32))


def compute_plain_loss(model: torch.nn.Module, run: SftRun, indices: list[int]) -> torch.Tensor:
    """Return the cross-entropy of the responses of conversations, each in a separate pass."""
    conversations = prepare_run(run).data.train_set
    losses = []
    for index in indices:
        tokens = slice(*conversations.offsets[index : index + 2])
        token_ids = torch.from_numpy(conversations.token_ids[tokens].astype(np.int64))
        mask = torch.from_numpy(conversations.is_trained[tokens].copy())
        logits = model(input_ids=token_ids[None]).logits[0]
        token_losses = cross_entropy(logits[:-1].float(), token_ids[1:], reduction="none")
        losses.append(token_losses[mask[1:]])
    return torch.cat(losses).mean()


def test_training_equals_a_plain_loop(model_path: str, data_path: str, tmp_path: Path) -> None:
    run = make_run(model_path, data_path, tmp_path, validation={"size": 0})
    prepared = prepare_run(run)
    order = BatchOrder(prepared.data.train_indices, 4, run.seed)
    learner = Learner(run.make_learner_run(), model_path)
    model = load_language_model(model_path).eval()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(3):
        indices = order.choose(step)
        coefficients = compute_coefficients(run.make_learner_run(), step)
        metrics = learner.train_step(prepared.data.train_set.make_batch(indices), coefficients)
        loss = compute_plain_loss(model, run, indices)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = coefficients.learning_rate
        optimizer.step()
        assert metrics.loss == pytest.approx(loss.item(), abs=1e-5)
        assert metrics.grad_norm == pytest.approx(grad_norm.item(), rel=1e-4)
    weights = learner.gather_weights()
    for name, parameter in model.named_parameters():
        assert torch.allclose(weights[name], parameter.detach(), atol=1e-4), name


def test_packed_and_padded_conversations_train_the_same(
    model_path: str, data_path: str, tmp_path: Path
) -> None:
    losses, forwarded = [], []
    for packing in ("tree", "pad"):
        learner_fields = {"packing": packing, "max_tokens_per_micro_batch": 4096}
        run = make_run(model_path, data_path, tmp_path, learner=learner_fields)
        batch = prepare_run(run).data.train_set.make_batch(range(16))
        learner = Learner(run.make_learner_run(), model_path)
        coefficients = compute_coefficients(run.make_learner_run(), 0)
        metrics = [learner.train_step(batch, coefficients) for _ in range(3)]
        losses.append([step.loss for step in metrics])
        forwarded.append(metrics[0].num_tokens_forwarded)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert forwarded[0] < forwarded[1]


def test_validation_loss_is_the_cross_entropy_of_the_held_out_conversations(
    model_path: str, data_path: str, tmp_path: Path
) -> None:
    run = make_run(model_path, data_path, tmp_path)
    data = prepare_run(run).data
    assert not set(data.train_indices) & set(data.validation_indices)
    assert (len(data.train_indices), len(data.validation_indices)) == (24, 8)
    state, _ = train_in_process(run)
    with torch.no_grad():
        start_loss = compute_plain_loss(
            load_language_model(model_path).eval(), run, list(data.validation_indices)
        )
        trained_model = AutoModelForCausalLM.from_pretrained(run.folder / "model").eval()
        best_loss = compute_plain_loss(trained_model, run, list(data.validation_indices))
    assert state.start_loss == pytest.approx(start_loss.item(), abs=1e-5)
    assert state.best_loss == pytest.approx(best_loss.item(), abs=1e-5)
    rows = [row for row in read_metrics(run.folder) if TrainMetric.VALIDATION_LOSS in row.values]
    assert [row.step for row in rows] == [0, 2, 4, 6]


@pytest.mark.parametrize("lora", [None, {"rank": 2, "targets": ["q_proj"]}])
def test_resumed_run_equals_an_uninterrupted_run(
    model_path: str, data_path: str, tmp_path: Path, lora: dict[str, object] | None
) -> None:
    model = {"path": model_path, "lora": lora}
    run = make_run(model_path, data_path, tmp_path / "whole", model=model)
    stopped_run = make_run(model_path, data_path, tmp_path / "stopped", model=model)
    state, weights = train_in_process(run)
    train_in_process(stopped_run, stop_after=3)
    resumed_state, resumed_weights = train_in_process(stopped_run, Resume.ALWAYS)
    assert_equal_weights(weights, resumed_weights)
    assert resumed_state == state
    losses, resumed_losses = (
        [
            (row.step, row.values.get(TrainMetric.LOSS), row.values.get("validation_loss"))
            for row in read_metrics(folder)
            if row.kind in ("train", "event") and "checkpoint_s" not in row.values
        ]
        for folder in (run.folder, stopped_run.folder)
    )
    assert losses == resumed_losses
    model_files = [
        folder / "model/model.safetensors" for folder in (run.folder, stopped_run.folder)
    ]
    assert model_files[0].read_bytes() == model_files[1].read_bytes()


def test_resume_refuses_changed_conversations(model_path: str, tmp_path: Path) -> None:
    data_path = write_rows(tmp_path / "chats.jsonl", make_rows(8))
    run = make_run(model_path, data_path, tmp_path)
    train_in_process(run, stop_after=2)
    write_rows(tmp_path / "chats.jsonl", make_rows(8, seed=1))
    with pytest.raises(ConfigError, match=r"chats.jsonl' has changed since the training started"):
        train_in_process(run, Resume.ALWAYS)


@pytest.mark.parametrize("keep", ["best", "last"])
def test_early_stop_keeps_the_best_or_the_last_weights(
    model_path: str, data_path: str, tmp_path: Path, keep: str
) -> None:
    validation = {"patience": 2, "every_steps": 1, "keep": keep, "min_improvement": 0.1}
    run = make_run(
        model_path, data_path, tmp_path, validation=validation, training={"num_steps": 20}
    )
    state, weights = train_in_process(run, validation_losses=[9.0, 3.0, 2.0, 1.95, 2.5, 0.0])
    assert (state.step, state.best_step, state.best_loss) == (4, 2, 2.0)
    exported_model = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    is_last = all(
        torch.equal(weights[name], parameter.detach())
        for name, parameter in exported_model.named_parameters()
    )
    assert is_last == (keep == "last")


@pytest.mark.parametrize(("keep", "steps"), [("last", [2, 5, 6]), ("best", [5, 6])])
def test_the_checkpoint_with_the_lowest_loss_is_kept_unless_its_model_is(
    model_path: str, data_path: str, tmp_path: Path, keep: str, steps: list[int]
) -> None:
    validation = {"every_steps": 1, "keep": keep}
    training = {"num_steps": 6, "checkpoint_every_steps": 5}
    run = make_run(model_path, data_path, tmp_path, validation=validation, training=training)
    train_in_process(run, validation_losses=[1.0, 3.0, 2.0, 2.5, 2.4, 2.3, 2.2])
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in steps]


def test_infinite_validation_loss_is_no_gain(
    model_path: str, data_path: str, tmp_path: Path
) -> None:
    validation = {"patience": 3, "every_steps": 1}
    run = make_run(
        model_path, data_path, tmp_path, validation=validation, training={"num_steps": 20}
    )
    losses = [9.0, math.nan, 3.0, math.inf, math.nan, math.nan, 0.0]
    state, _ = train_in_process(run, validation_losses=losses)
    assert (state.step, state.best_step, state.best_loss) == (5, 2, 3.0)
    assert "NaN" not in (run.folder / "metrics.jsonl").read_text()


def test_model_learns_the_responses(model_path: str, tmp_path: Path) -> None:
    data_path = write_rows(tmp_path / "rules.jsonl", make_rule_rows(40))
    run = make_run(
        model_path,
        data_path,
        tmp_path,
        training={"num_steps": 30, "batch_size": 8},
        metrics={"tensorboard": True, "prometheus": {}},
    )
    state, _ = train_in_process(run)
    assert state.start_loss is not None and state.start_loss > 4
    assert state.best_loss is not None and state.best_loss < 0.5
    losses = [
        row.values[TrainMetric.LOSS] for row in read_metrics(run.folder) if row.kind == "train"
    ]
    assert len(losses) == 30 and all(map(math.isfinite, losses))
    assert list((run.folder / "tensorboard").iterdir())
