"""The model card of an exported model: origin, training, results, and how to load it."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from ludus.env.text.terminal import clean_for_terminal
from ludus.env.transports.address import parse_address
from ludus.proto.config import EnvironmentConfig, LanguageModelRun, PretrainedModel, SftRun
from ludus.proto.runs import SUMMARY_FILE, EnvironmentResult, PolicyResult, SftSummary, Summary
from ludus.proto.wording import choose_wording

CARD_FILE = "README.md"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

_USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # or the model's Hugging Face id
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
```

`vllm serve FOLDER` serves it with an OpenAI-compatible API.
"""


def write_card(run: LanguageModelRun | SftRun, run_folder: Path, step: int | None) -> str:
    """Return the text of a model card, in Markdown with a header for the Hugging Face Hub.

    Args:
        step: step of the weights; None for the model of a fine-tuning run.
    """
    parts = [_write_header(run), f"# {run.name}\n", _describe_training(run, step)]
    results = _write_results(run, run_folder, step)
    return "\n".join([*parts, *results, _USE])


def _write_header(run: LanguageModelRun | SftRun) -> str:
    method = "sft" if isinstance(run, SftRun) else "reinforcement-learning"
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    path = run.model.path if isinstance(run.model, PretrainedModel) else ""
    if _HUB_ID.fullmatch(path) and not Path(path).exists():
        lines.append(f"base_model: {path}")
    return "\n".join(["---", *lines, f"tags: [ludus, {method}]", "---", ""])


def _describe_training(run: LanguageModelRun | SftRun, step: int | None) -> str:
    model = "A model created for the run"
    if isinstance(run.model, PretrainedModel):
        model = _quote(run.model.path)
    if isinstance(run, SftRun):
        method, subject = "fine-tuned", f"the conversations in {_quote(run.data.path)}"
    else:
        method = f"trained with {run.algorithm.kind.upper()}"
        subject = ", ".join(map(_name_environment, run.environments.values()))
    step_text = "" if step is None else f" These are the weights of step {step}."
    return (
        f"{model}, {method} on {subject} with Ludus {version('ludus-trainer')}, seed {run.seed}."
        f"{step_text}\n"
    )


def _name_environment(environment: EnvironmentConfig) -> str:
    if environment.kind == "remote":
        return _quote(str(parse_address(environment.address)))  # without credentials
    return _quote(environment.package)


def _quote(text: str) -> str:
    """Return a text as code, so that Markdown and HTML in it have no effect."""
    text = clean_for_terminal(text).replace("`", "'").replace("|", "\\|")
    return f"`{text}`"


def _write_results(run: LanguageModelRun | SftRun, run_folder: Path, step: int | None) -> list[str]:
    """Return the section with the run's final results, if they are the results of these weights."""
    record_type = SftSummary if isinstance(run, SftRun) else Summary
    try:
        summary = record_type.model_validate_json((run_folder / SUMMARY_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return []
    if isinstance(summary, SftSummary):
        if summary.kept_loss is None or step is not None:
            return []
        start_text = "" if summary.start_loss is None else f", from {summary.start_loss:.3f}"
        return ["## Results\n", f"Validation loss {summary.kept_loss:.3f}{start_text}.\n"]
    if step != summary.num_steps:
        return []
    lines = ["| environment | measure | before | after |", "|---|---|---|---|"]
    lines += [row for result in summary.results.values() for row in _write_rows(result)]
    first_result = next(iter(summary.results.values()))
    note = (
        f"Measured on {first_result.report.policy.num_games:,} held-back episodes at temperature "
        f"{summary.eval_temperature:g}, with 95 % intervals.\n"
    )
    return ["## Results\n", *lines, "", note]


def _write_rows(result: EnvironmentResult) -> list[str]:
    policies = result.start, result.report.policy
    name = _quote(result.environment)
    rows = []
    if result.report.policy.win_rate is not None:
        rate = choose_wording(result.report.is_game).success_rate
        rows.append((name, rate, *map(_format_success, policies)))
    rows.append((name, "return", *map(_format_return, policies)))
    return [f"| {' | '.join(row)} |" for row in rows]


def _format_success(result: PolicyResult | None) -> str:
    if result is None or result.win_rate is None or result.win_rate_ci95 is None:
        return "–"
    low, high = result.win_rate_ci95
    return f"{result.win_rate:.1%} ({low:.1%} to {high:.1%})"


def _format_return(result: PolicyResult | None) -> str:
    if result is None:
        return "–"
    low, high = result.expected_return_ci95
    return f"{result.expected_return:.3f} ({low:.3f} to {high:.3f})"
