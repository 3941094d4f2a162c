"""Warnings about steps that teach little: shown once, with the reason and what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.proto.runs import Transcript, TranscriptTurn
from ludus.trainer.data.buffer import GroupSummary, TakenBatch
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.driver.loops.step_warnings import StepWarnings

GROUP = GroupSummary(index=0, environment="cards", staleness=0, num_scored=4)
VALID_COUNTS = RolloutCounts(num_groups=4, num_scored=16)
INVALID_COUNTS = replace(VALID_COUNTS, num_invalid=14)


def make_warnings(**sections: Any) -> StepWarnings:
    return StepWarnings(
        LanguageModelRun.model_validate({"environments": {"cards": {}}, **sections})
    )


def make_transcript(answer: str, status: str = "invalid_action") -> Transcript:
    return Transcript(
        step=1,
        environment="cards",
        group=0,
        episode=0,
        seed=3,
        policy_version=0,
        status=status,
        reward=-1.0,
        episode_return=-1.0,
        terms={},
        turns=(TranscriptTurn(shown=(), answer=answer, reward=-1.0),),
    )


def make_batch(counts: RolloutCounts, *groups: GroupSummary) -> TakenBatch:
    return TakenBatch(groups or (GROUP,), {"cards": counts}, num_waiting_groups=0)


def list_warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_mostly_invalid_answers_are_shown_once_with_an_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warnings = make_warnings(rollout={"invalid_action_reward": -2.0})
    transcripts = (make_transcript("HIT", "terminated"), make_transcript("I would\x1b[2J say hit"))
    batch = make_batch(INVALID_COUNTS, replace(GROUP, transcripts=transcripts))
    for step in (1, 2):
        warnings.observe(step, batch)
    [line] = list_warnings(capsys)
    assert line.startswith(
        "warning: step 1: 88% of the episodes of environment 'cards' end with an invalid action, "
        "for example 'I would\\x1b[2J say hit'; "
    )
    for remedy in ("prompt", "`ludus sft`", "rollout.invalid_action_reward = -2"):
        assert remedy in line


def test_example_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    transcripts = (make_transcript("ha\n" * 1000),)
    batch = make_batch(INVALID_COUNTS, replace(GROUP, transcripts=transcripts))
    make_warnings().observe(1, batch)
    [line] = list_warnings(capsys)
    assert "ha\\n" in line and "...'" in line
    assert len(line) < 700


def test_warning_without_a_transcript_has_no_example(capsys: pytest.CaptureFixture[str]) -> None:
    make_warnings().observe(1, make_batch(INVALID_COUNTS))
    [line] = list_warnings(capsys)
    assert "end with an invalid action; if this" in line


@pytest.mark.parametrize("num_invalid", [0, 7])
def test_few_invalid_answers_give_no_warning(
    capsys: pytest.CaptureFixture[str], num_invalid: int
) -> None:
    make_warnings().observe(1, make_batch(replace(VALID_COUNTS, num_invalid=num_invalid)))
    assert list_warnings(capsys) == []


@pytest.mark.parametrize(
    ("tools", "num_calls_by_step", "num_warnings"),
    [(True, [0, 0], 1), (True, [1, 0], 0), (False, [0, 0], 0)],
)
def test_run_without_tool_calls_is_shown_once(
    capsys: pytest.CaptureFixture[str], tools: bool, num_calls_by_step: list[int], num_warnings: int
) -> None:
    warnings = make_warnings(environments={"cards": {"tools": tools}})
    for step, num_calls in enumerate(num_calls_by_step, start=1):
        warnings.observe(step, make_batch(replace(VALID_COUNTS, num_tool_calls=num_calls)))
    lines = list_warnings(capsys)
    assert len(lines) == num_warnings
    assert all("none of 16 episodes of environment 'cards' called a tool" in line for line in lines)


def test_limit_of_replacements_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = make_warnings()
    counts = replace(VALID_COUNTS, num_replaced_groups=8, num_kept_groups=3)
    for step in (1, 2):
        warnings.observe(step, make_batch(counts))
    [line] = list_warnings(capsys)
    assert "8 groups of equal rewards were replaced, and 3 were kept" in line
    assert "algorithm.max_group_batches = 3" in line


def test_each_step_without_variance_is_logged_and_shown_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    warnings = make_warnings()
    batch = make_batch(VALID_COUNTS, replace(GROUP, has_variance=False))
    for step in (1, 2):
        warnings.observe(step, batch)
    [line] = list_warnings(capsys)
    assert "step 1: all 1 groups have equal rewards within each group" in line
    assert "step 2: all 1 groups have equal rewards" in caplog.messages


def test_run_that_keeps_groups_of_equal_rewards_is_not_warned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warnings = make_warnings(algorithm={"zero_variance_groups": "keep"})
    warnings.observe(1, make_batch(VALID_COUNTS, replace(GROUP, has_variance=False)))
    assert list_warnings(capsys) == []
