"""Tests that a reward function that needs a missing data column is refused before the run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Resume
from ludus.trainer.driver.checks import check_server_columns, check_start
from ludus.trainer.rollout.rewards.arguments import check_columns
from ludus.trainer.setup.environments import start_local_servers
from prompts_env import write_rows


def require_solution(completions, solution):
    """Return zero rewards; require the column `solution`."""
    return [0.0 for _ in completions]


def require_completion(completion):
    """Return no rewards; require an argument whose name has no plural."""
    return []


def accept_columns(completions, level=1, **columns):
    """Return zero rewards; accept any columns."""
    return [0.0 for _ in completions]


def make_function_path(name: str) -> str:
    return f"{__name__}:{name}"


def make_run(folder: Path, **columns: list[str]) -> LanguageModelRun:
    path = write_rows({"prompt": ["a", "b"], **columns}, folder / "rows.jsonl")
    return LanguageModelRun.model_validate(
        {
            "name": "run",
            "output_dir": str(folder / "runs"),
            "environment": {
                "package": "prompts_env",
                "options": {"path": str(path)},
                "rewards": [{"function": f"{__name__}:require_solution"}],
            },
        }
    )


def test_missing_column_is_reported_with_available_columns() -> None:
    columns = ["prompt", "answer"]
    with pytest.raises(ConfigError) as error_info:
        check_columns([make_function_path("require_solution")], columns, "environment")
    assert str(error_info.value) == (
        f"environment.rewards: function '{__name__}:require_solution' requires 'solution', and the "
        "data has the columns prompt, answer; give its argument the name of one, or a default"
    )
    with pytest.raises(ConfigError, match="did you mean 'solutions'"):
        check_columns([make_function_path("require_solution")], ["solutions"], "environment")
    with pytest.raises(ConfigError, match="did you mean 'completions'"):
        check_columns([make_function_path("require_completion")], columns, "environment")


def test_arguments_with_defaults_and_keyword_arguments_need_no_column() -> None:
    check_columns([make_function_path("accept_columns")], ["prompt"], "environment")
    check_columns([make_function_path("require_solution")], ["prompt", "solution"], "environment")


def test_column_hidden_by_a_built_in_argument_is_logged(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        check_columns(
            [make_function_path("accept_columns")], ["prompt", "seed", "status"], "environment"
        )
    assert "the trainer's argument seed, status" in caplog.text


def test_run_check_finds_a_missing_column(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requires 'solution', and the data has the columns"):
        check_start(make_run(tmp_path), Resume.NEVER)
    check_start(make_run(tmp_path, solution=["1", "2"]), Resume.NEVER)


@pytest.mark.slow
async def test_missing_column_is_found_from_the_server_description(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with (
        start_local_servers(run, tmp_path) as servers,
        pytest.raises(ConfigError, match="requires 'solution'"),
    ):
        await check_server_columns(run, servers)
