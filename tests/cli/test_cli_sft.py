"""`ludus sft`, which fine-tunes a model on a file of conversations."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ludus.proto.config import LanguageModelRun
from ludus.proto.runs import SftSummary
from ludus.trainer.driver.checks import check_models, resolve_config
from tests.cli.commands import RunCli
from tests.learner.tiny_policy import make_policy_folder
from tests.sft.chats import make_rule_rows, write_rows

pytestmark = pytest.mark.slow


def test_fine_tuning_writes_a_run_folder_and_a_model(ludus: RunCli, tmp_path: Path) -> None:
    model_path = make_policy_folder(tmp_path / "base", num_layers=1)
    data_path = write_rows(tmp_path / "chats.jsonl", make_rule_rows(40))
    (tmp_path / "tune.toml").write_text(
        f'kind = "sft"\nname = "tuned"\nmodel = {{path = "{model_path}"}}\n'
        f'data = {{path = "{data_path}", max_tokens = 64}}\n'
        "[training]\nbatch_size = 8\nnum_steps = 8\n"
        "[learner]\nlearning_rate = 1e-2\nnum_ranks = 2\n"
        "[validation]\nsize = 0.2\nevery_steps = 4\n"
    )
    outcome = ludus("sft", "tune.toml")
    assert outcome.code == 0, outcome.err
    assert "validation loss" in outcome.err and "conversations" in outcome.err
    run_dir = tmp_path / "runs/tuned"
    summary = SftSummary.model_validate_json((run_dir / "summary.json").read_bytes())
    assert summary.start_loss is not None and summary.best_loss is not None
    assert summary.best_loss < summary.start_loss - 1
    assert (summary.num_train, summary.num_validation, summary.num_steps) == (32, 8, 8)
    report = (run_dir / "report.html").read_text(encoding="utf-8")
    ET.fromstring(report.removeprefix("<!doctype html>\n"))
    assert "Validation loss" in report and "Over conversations trained" in report
    assert "not finished" not in report
    AutoModelForCausalLM.from_pretrained(run_dir / "model")
    model = {"kind": "pretrained", "path": "runs/tuned"}
    check_models(resolve_config(LanguageModelRun.model_validate({"model": model})))
