"""`ludus sft`, which fine-tunes a model on a file of conversations."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ludus.proto.runs import SftSummary
from ludus.services.numbers import format_compact
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
    check_dry_runs(ludus)
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
    check_use_of_the_model(ludus, summary)


def check_dry_runs(ludus: RunCli) -> None:
    """Check what dry runs of the fine-tuning print, and that they write nothing."""
    outcome = ludus("sft", "tune.toml", "--dry-run")
    assert outcome.out.startswith("32 training conversations, 8 held out, 8 steps\nready ")
    config = json.loads(ludus("sft", "tune.toml", "--dry-run", "--json").out)
    assert (config["name"], config["training"]["batch_size"]) == ("tuned", 8)
    assert not Path("runs").exists()


def check_use_of_the_model(ludus: RunCli, summary: SftSummary) -> None:
    """Check that the fine-tuned model can be listed, exported and trained."""
    listed_run = json.loads(ludus("runs", "--json").out)
    assert (listed_run["name"], listed_run["status"]) == ("tuned", "finished")
    assert (listed_run["step"], listed_run["num_steps"]) == (8, 8)
    result = {"metric": "loss", "value": summary.kept_loss, "ci95": None, "is_game": None}
    assert listed_run["result"] == result

    assert ludus("export", "tuned", "exported", "--dtype", "bfloat16").code == 0
    model = AutoModelForCausalLM.from_pretrained("exported", dtype="auto")
    kept_model = AutoModelForCausalLM.from_pretrained("runs/tuned/model", dtype=torch.bfloat16)
    kept_weights = kept_model.state_dict()
    assert all(torch.equal(weight, kept_weights[name]) for name, weight in model.named_parameters())
    card = Path("exported/README.md").read_text(encoding="utf-8")
    assert f"Validation loss {summary.kept_loss:.3f}, from {summary.start_loss:.3f}" in card

    options = ("--set", "model.kind=pretrained", "--set", "model.path=runs/tuned")
    outcome = ludus("train", "--dry-run", *options)
    assert outcome.code == 0, outcome.err
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"runs/tuned · {format_compact(num_parameters)} parameters" in outcome.out
