"""Warnings about steps that teach little, with what to change.

    most episodes of an environment end with an invalid action    the format of the answers
    no episode of an environment with tools calls a tool          the prompt, the model
    zero-variance groups are replaced up to the limit             the reward, the tasks
    no group of a step has variance                               the same

Each warning is shown once for each environment, or once for the run. Metrics count the steps.
"""

from __future__ import annotations

import logging

from ludus.env.text.terminal import clean_for_terminal
from ludus.proto.config import LanguageModelRun
from ludus.proto.runs import Transcript
from ludus.trainer.core.output import warn_user
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.data.buffer import TakenBatch
from ludus.trainer.data.counts import RolloutCounts, sum_counts
from ludus.trainer.rollout.runner import episode_limits

_log = logging.getLogger(__name__)

_MIN_INVALID_SHARE = 0.5
_MAX_EXAMPLE_CHARS = 120
_VARIANCE_ADVICE = (
    "use easier or harder tasks, add a reward term that gives partial credit, or raise "
    "rollout.group_size or rollout.temperature"
)


class StepWarnings:
    """The warnings of a run about the batches that it trains on."""

    def __init__(self, run: LanguageModelRun) -> None:
        self._run = run
        self._shown: set[tuple[str, str]] = set()
        """Pairs of a kind of warning and an environment; '' is the whole run."""
        self._num_without_tool_calls = dict.fromkeys(run.environments, 0)
        """Number of scored episodes without a tool call, by environment."""

    def observe(self, step: int, batch: TakenBatch) -> None:
        """Warn the user if the batch of a step teaches little."""
        transcripts = [text for group in batch.groups for text in group.transcripts]
        for name, counts in batch.counts.items():
            # Groups of an environment that the run no longer has may remain after a resume.
            if name in self._run.environments:
                self._check_invalid_actions(step, name, counts, transcripts)
                self._check_tool_calls(step, name, counts)
        self._check_variance(step, batch)

    def _check_invalid_actions(
        self, step: int, name: str, counts: RolloutCounts, transcripts: list[Transcript]
    ) -> None:
        num_finished = counts.num_scored
        if not num_finished or counts.num_invalid < _MIN_INVALID_SHARE * num_finished:
            return
        reward = episode_limits(self._run, name).known_invalid_action_reward
        self._warn_once(
            "invalid",
            name,
            f"step {step}: {counts.num_invalid / num_finished:.0%} of the episodes of environment "
            f"'{name}' end with an invalid action{_describe_example(name, transcripts)}; if this "
            "does not fall, describe the format with an example in the prompt "
            f"({self._run.environment_section(name)}.render and parse, or its options), fine-tune "
            "the model on valid answers first with `ludus sft`, or lower "
            f"rollout.invalid_action_reward = {reward:g}, which must be less than the lowest "
            "return",
        )

    def _check_tool_calls(self, step: int, name: str, counts: RolloutCounts) -> None:
        if not self._run.environments[name].tools:
            return
        self._num_without_tool_calls[name] += counts.num_scored
        if counts.num_tool_calls:
            self._shown.add(("tools", name))
        elif self._num_without_tool_calls[name]:
            self._warn_once(
                "tools",
                name,
                f"step {step}: none of {self._num_without_tool_calls[name]} episodes of "
                f"environment '{name}' called a tool, although tools = true; ask for tool calls "
                "in the prompt, use a model that was trained to call tools, fine-tune the model "
                "on conversations with tool calls with `ludus sft`, or set tools = false",
            )

    def _check_variance(self, step: int, batch: TakenBatch) -> None:
        counts = sum_counts(batch.counts.values())
        algorithm, num_groups = self._run.algorithm, len(batch.groups)
        if algorithm.zero_variance_groups != "replace":
            return
        if not batch.has_variance:
            _log.warning("step %d: all %d groups have equal rewards", step, num_groups)
            self._warn_once(
                "no variance",
                "",
                f"step {step}: all {num_groups} groups have equal rewards within each group, so "
                f"the step learns nothing from the rewards; {_VARIANCE_ADVICE}",
            )
        elif counts.num_kept_groups:
            self._warn_once(
                "limit",
                "",
                f"step {step}: {counts.num_replaced_groups} groups of equal rewards were replaced, "
                f"and {counts.num_kept_groups} were kept, because algorithm.max_group_batches = "
                f"{algorithm.max_group_batches} limits the groups of a step; {_VARIANCE_ADVICE}",
            )

    def _warn_once(self, kind: str, environment: str, message: str) -> None:
        if (kind, environment) not in self._shown:
            self._shown.add((kind, environment))
            warn_user(message)


def _describe_example(environment: str, transcripts: list[Transcript]) -> str:
    """Return an invalid answer among the transcripts as a phrase; '' if there is none."""
    answers = (
        transcript.turns[-1].answer
        for transcript in transcripts
        if transcript.environment == environment
        and transcript.status == RolloutStatus.INVALID_ACTION
        and transcript.turns
    )
    answer = next(answers, None)
    if answer is None:
        return ""
    excerpt = clean_for_terminal(answer[:_MAX_EXAMPLE_CHARS])
    return f", for example '{excerpt}{'...' if len(answer) > _MAX_EXAMPLE_CHARS else ''}'"
