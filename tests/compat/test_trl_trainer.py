"""Conversion of GRPOTrainer's arguments to the settings of a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ludus.proto.errors import CheckpointError, ConfigError, UserError
from ludus.proto.metrics import TrainMetric
from ludus.trainer.compat.trl import GRPOConfig, GRPOTrainer, generate_rollout_completions
from ludus.trainer.compat.trl import trainer as trl_trainer
from ludus.trainer.compat.trl.history import TrainerState
from ludus.trainer.compat.trl.inputs import PromptRows
from ludus.trainer.compat.trl.run_settings import Batches
from ludus.trainer.core.functions import import_callable
from ludus.trainer.driver.loops.steps import Step

ROWS = [{"prompt": f"word {n}", "answer": n} for n in range(16)]
TINY_MODEL = {"kind": "tiny", "max_tokens": 128}


def score_answer(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    return [float(value) for value in answer]


def run_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return {}


def make_trainer(tmp_path: Path, **fields: Any) -> GRPOTrainer:
    config_fields = {"use_cpu": True, "max_completion_length": 8}
    args = fields.pop("args", None) or GRPOConfig(str(tmp_path / "run"), **config_fields)
    arguments = {"model": TINY_MODEL, "reward_funcs": score_answer, "train_dataset": ROWS, **fields}
    return GRPOTrainer(args=args, **arguments)


def test_trainer_arguments_become_a_run_configuration(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_func=run_rollout)
    run = trainer.run
    [name] = run.environments
    environment = run.environments[name]
    assert (run.name, run.output_dir, run.model.kind) == ("run", str(tmp_path), "tiny")
    assert environment.package == "prompts_env"
    [term] = environment.rewards
    assert (term.name, term.weight) == ("score_answer", 1.0)
    assert import_callable(term.function, "x") is score_answer
    function_object = import_callable(environment.rollout_function, "x")
    assert (function_object.function, function_object.args) == (run_rollout, trainer.args)
    assert trainer.state.max_steps == 16 * 3
    assert not (tmp_path / "run").exists(), "the constructor created the run folder"


def test_large_batch_has_one_session_per_row(tmp_path: Path) -> None:
    args = GRPOConfig(
        str(tmp_path / "run"),
        use_cpu=True,
        per_device_train_batch_size=8192,
        max_completion_length=8,
    )
    rows = [{"prompt": f"word {n}", "answer": n} for n in range(1024)]
    run = make_trainer(tmp_path, args=args, train_dataset=rows).run
    assert run.rollout.num_groups_in_flight * run.rollout.group_size == 8192
    assert run.environment.max_sessions == 8192


def test_rows_are_written_to_the_paths_of_the_environment(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_dataset={"prompt": ["a", "b"], "answer": [1, 2]})
    trainer.write_rows()
    options = trainer.run.environment.options
    lines = Path(options["path"]).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == ROWS
    assert len(Path(options["test_path"]).read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"callbacks": [1]}, "instances of transformers.TrainerCallback, but one is 1"),
        ({"callbacks": 1}, "callbacks must be a list of callbacks, got 1"),
        ({"optimizers": (1, None)}, "optimizers=.* is not supported; AdamW is the only optimizer"),
        ({"tools": [print]}, "tool 'print' needs typed arguments"),
        ({"reward_funcs": None}, "reward_funcs needs at least one function"),
        ({"reward_funcs": [3]}, "reward_funcs must be functions, .* but one is 3"),
        (
            {"train_dataset": [{"text": "a"}]},
            "train_dataset: row 0 needs a 'prompt'",
        ),
        (
            {"train_dataset": [{"prompt": [{"role": "a", "content": "", "tool_calls": [1]}]}]},
            "train_dataset: row 0: message 0 has the field 'tool_calls', which a prompt cannot",
        ),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"train_dataset": "rows.jsonl"}, "load a file with datasets.load_dataset"),
        (
            {"train_dataset": [{"prompt": "a"}] * 4},
            "'score_answer' requires 'answer', which train_dataset does not",
        ),
        ({"eval_dataset": {"prompt": ["a"], "n": [1, 2]}}, "columns of one length"),
        (
            {"eval_dataset": [{"prompt": "a"}]},
            "'score_answer' requires 'answer', which eval_dataset does not",
        ),
        (
            {"train_dataset": {"prompt": "abcdefgh"}},
            "in column 'prompt', but it has 'abc",
        ),
        ({"train_dataset": {"prompt": ["a"] * 8, "answer": 5}}, "in column 'answer', but it has 5"),
        (
            {"train_dataset": {"train": SimpleNamespace(column_names=["prompt"])}},
            r"has the splits \['train'\]; pass one",
        ),
        (
            {
                "reward_funcs": lambda completions, trainer_state: [],
                "rollout_func": lambda prompts, trainer: {},
            },
            "requires 'trainer_state', which is not available",
        ),
        ({"reward_funcs": max}, "reward function 'max' must have named parameters"),
        ({"reward_funcs": torch.nn.Linear(1, 1)}, "save a model with save_pretrained"),
        ({"args": {"output_dir": "x"}}, "GRPOConfig, but it is a builtins.dict; change the import"),
        ({"model": None}, "model must be a Hugging Face id, .* it is None"),
        ({"model": "/nowhere"}, "the model cannot be loaded"),
        ({"rollout_func": 5}, "rollout_func must be a function, but it is 5"),
        ({"rollout_func": len}, r"must have one of the signatures .* it has \(obj\)"),
        ({"environment_factory": 5}, "environment_factory must be a class, or a function"),
        (
            {"model": TINY_MODEL, "args": GRPOConfig(chat_template_kwargs={"date": "today"})},
            r"only enable_thinking, but has \['date'\]",
        ),
    ],
)
def test_invalid_arguments_are_refused_before_the_start(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(tmp_path, **fields)


def test_reward_function_of_another_environment_may_return_none(tmp_path: Path) -> None:
    run = make_trainer(tmp_path, reward_funcs=[score_answer, score_answer]).run
    assert [term.optional for term in run.environment.rewards] == [True, True]


def test_functions_with_the_same_name_get_distinct_names(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, reward_funcs=[score_answer, score_answer, score_answer])
    names = [term.name for term in trainer.run.environment.rewards]
    assert names == ["score_answer", "score_answer_2", "score_answer_3"]


def test_empty_callbacks_and_optimizers_are_accepted(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, callbacks=[], optimizers=None).run.name == "run"
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint = '/x' must be True"):
        make_trainer(tmp_path).train(resume_from_checkpoint=Path("/x"))  # type: ignore[arg-type]


def test_damaged_checkpoint_is_reported_with_the_arguments_of_trl(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match="start again with resume_from_checkpoint=False"
    ) as info:
        make_trainer(tmp_path).train(resume_from_checkpoint=True)
    assert "--" not in str(info.value)


def test_reward_weights_follow_the_order_of_reward_functions(tmp_path: Path) -> None:
    def score_brevity(completions: list[str], **_: Any) -> list[float]:
        return [-float(len(completion)) for completion in completions]

    def make_config(weights: list[float]) -> GRPOConfig:
        path, length = str(tmp_path / "run"), 8
        return GRPOConfig(path, max_completion_length=length, reward_weights=weights)

    trainer = make_trainer(
        tmp_path, reward_funcs=[score_answer, score_brevity], args=make_config([1.0, 0.5])
    )
    terms = trainer.run.environment.rewards
    assert [(term.name, term.weight) for term in terms] == [
        ("score_answer", 1.0),
        ("score_brevity", 0.5),
    ]
    with pytest.raises(ConfigError, match="reward_weights has 1 numbers, but there are 2"):
        make_trainer(tmp_path, reward_funcs=[score_answer, score_brevity], args=make_config([1.0]))


def test_nan_in_a_column_is_a_missing_value(tmp_path: Path) -> None:
    rows = [{**row, "answer": float("nan")} for row in ROWS]
    trainer = make_trainer(tmp_path, train_dataset=rows)
    trainer.write_rows()
    lines = Path(trainer.run.environment.options["path"]).read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["answer"] for line in lines} == {None}
    rows[3]["answer"] = float("-inf")
    trainer = make_trainer(tmp_path, train_dataset=rows)
    with pytest.raises(ConfigError, match=r"row 3 .*column 'answer' contains an infinite"):
        trainer.write_rows()


def test_non_json_row_is_reported(tmp_path: Path) -> None:
    rows = PromptRows.read([{"prompt": "a"}, {"prompt": "b", "image": object()}], "train_dataset")
    with pytest.raises(ConfigError, match="row 1 contains a value that JSON does not support"):
        rows.write(tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


def test_completions_are_available_only_in_a_rollout_function(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(UserError, match="call it in rollout_func"):
        generate_rollout_completions(trainer, ["a"])
    with pytest.raises(AttributeError, match="GRPOTrainer has no 'accelerator' here"):
        _ = trainer.accelerator


def make_step(number: int, reward: float) -> Step:
    values = {
        TrainMetric.LOSS: 1.0,
        TrainMetric.REWARD_MEAN: reward,
        TrainMetric.LEARNING_RATE: 0.5 / number,
        TrainMetric.NUM_EPISODES: 4,
        TrainMetric.NUM_TOKENS_GENERATED: 40,
        TrainMetric.NUM_EPISODES_TRUNCATED: 1,
        TrainMetric.NUM_TOKENS_IN_BATCH: 100,
    }
    return Step(number, values, {"prompts": {"reward_term.r": reward}}, (), None)


def test_saved_model_does_not_replace_the_configuration_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, run_folder = tmp_path / "checkpoint", tmp_path / "run"
    for folder, text in ((checkpoint / "model", "model"), (run_folder, "run")):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(text)
    monkeypatch.setattr(trl_trainer, "find_newest_checkpoint", lambda folder: checkpoint)
    trainer = make_trainer(tmp_path)
    assert trainer.save_model() == run_folder / "model"
    assert capsys.readouterr().err == ""
    assert trainer.save_model(run_folder) == run_folder / "model"
    assert f"the model is saved to '{run_folder / 'model'}'" in capsys.readouterr().err
    assert trainer.save_model(tmp_path / "copy") == tmp_path / "copy"
    configs = [folder / "config.json" for folder in (run_folder / "model", tmp_path / "copy")]
    assert [path.read_text() for path in configs] == ["model", "model"]
    assert (run_folder / "config.json").read_text() == "run"


def test_log_history_contains_means_since_the_previous_entry() -> None:
    state, args = TrainerState(), GRPOConfig(logging_steps=4, logging_first_step=True)
    batches = Batches(num_groups=2, num_minibatches=2, num_steps=5, num_prompts=8)
    for number in range(1, 6):
        state.add(make_step(number, float(number)), args, batches)
    result = state.finish(2.0)
    assert [entry["step"] for entry in state.log_history] == [2, 4, 8, 10]
    assert [entry["reward"] for entry in state.log_history] == [1.0, 2.0, 3.5, 5.0]
    entry = state.log_history[-1]
    assert (entry["rewards/r/mean"], entry["completions/mean_length"]) == (5.0, 10.0)
    assert (entry["epoch"], entry["num_tokens"], entry["learning_rate"]) == (1.25, 500, 0.1)
    assert (result.global_step, result.training_loss) == (10, 1.0)
