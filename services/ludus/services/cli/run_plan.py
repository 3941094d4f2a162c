"""The plan of a run on one screen, with which `ludus train --dry-run` ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ludus.proto.config import (
    LanguageModelRun,
    ModelCritic,
    NetworkRun,
    PpoConfig,
    RunConfig,
    TinyModel,
)
from ludus.proto.memory_plan import MemoryPlan, MemoryUse
from ludus.proto.runs import MAX_MEASURED_STEP_S, ModelSize
from ludus.services.display import describe_environment, format_policy_name
from ludus.services.numbers import format_compact, format_duration, format_memory, format_size

_BYTES_PER_NUMBER = 4
"""The numbers in a checkpoint are float32, whatever the type of the learner's computation."""
_NUM_STATES = 3
"""Additional numbers per trained parameter in a checkpoint: two moments of Adam, and a second copy
of the weights."""


def list_plan_lines(
    run: RunConfig,
    size: ModelSize | None,
    memory_plan: MemoryPlan | None,
    step_s: float | None,
) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each line of a run's plan.

    Args:
        size: size of a pretrained model; None if it is unknown.
        memory_plan: memory of a language-model run; None if it is unknown.
        step_s: measured seconds of a training step; None if no step was measured.
    """
    for name, environment in run.environments.items():
        title = "environment" if len(run.environments) == 1 else name
        yield title, describe_environment(environment)
    if isinstance(run, NetworkRun):
        yield "training", _describe_network_training(run)
    else:
        yield "model", _describe_model(run, size)
        yield from _describe_training(run)
    yield "step time", _describe_step_time(run, step_s)
    yield from _describe_evaluation(run)
    yield "checkpoints", _describe_checkpoints(run, size)
    for use in memory_plan.uses if memory_plan else ():
        yield use.owner, _describe_memory(use)
    yield "folder", str(Path(run.output_dir) / run.name)


def _describe_model(run: LanguageModelRun, size: ModelSize | None) -> str:
    model = run.model
    if isinstance(model, TinyModel):
        return f"a new model of {model.num_layers} layers, width {model.width}"
    if size is None:
        return model.path
    text = f"{model.path} · {format_compact(size.num_parameters)} parameters"
    if size.num_trained < size.num_parameters:
        text += f", of which LoRA trains {format_compact(size.num_trained)}"
    return f"{text} · computed in {run.learner.dtype}"


def _describe_training(run: LanguageModelRun) -> Iterator[tuple[str, str]]:
    training, rollout = run.training, run.rollout
    num_episodes = training.groups_per_step * rollout.group_size
    step_text = (
        f"{training.groups_per_step:,} groups of {rollout.group_size:,} episodes per step = "
        f"{num_episodes:,}"
    )
    if training.num_epochs is not None:
        yield "training", f"{training.num_epochs:g} passes over the tasks · {step_text}"
    else:
        total = training.num_steps * num_episodes
        yield "training", f"{training.num_steps:,} steps · {step_text} · {total:,} in all"
    environments = run.environments.values()
    max_turns = max(environment.max_turns or rollout.max_turns for environment in environments)
    max_completion_tokens = max(
        environment.max_completion_tokens or rollout.max_completion_tokens
        for environment in environments
    )
    max_tokens = max(environment.max_tokens or rollout.max_tokens for environment in environments)
    yield (
        "episodes",
        f"at most {_count(max_turns, 'turn')} of at most {max_completion_tokens:,} tokens, at most "
        f"{max_tokens:,} tokens with prompts",
    )
    num_sessions = min(
        rollout.num_workers * rollout.num_groups_in_flight * rollout.group_size,
        (training.max_staleness + 1) * num_episodes,
    )
    yield (
        "sampling",
        f"{_count(rollout.num_workers, 'worker')}, at most {num_sessions:,} episodes at a time · "
        f"{run.generator.kind} engine",
    )


def _describe_network_training(run: NetworkRun) -> str:
    ppo, num_steps = run.ppo, run.training.num_steps
    num_env_steps = ppo.num_environments * ppo.steps_per_environment
    return (
        f"at most {num_steps:,} steps of classic PPO · {ppo.num_environments} environments, "
        f"{ppo.steps_per_environment:,} steps in each = {num_env_steps:,} per step · "
        f"{num_steps * num_env_steps:,} in all"
    )


def _describe_step_time(run: RunConfig, step_s: float | None) -> str:
    if step_s is not None:
        text = f"{1000 * step_s:.0f} ms" if step_s < 0.1 else format_duration(step_s)
        return f"{text}, measured on this machine with the initial networks"
    if isinstance(run, LanguageModelRun):
        return "not measured: it depends on the lengths of the episodes, which only a run shows"
    if run.environment.kind == "remote":
        return "not measured: the environment is on a server"
    return f"not measured: a step may take longer than {format_duration(MAX_MEASURED_STEP_S)}"


def _describe_evaluation(run: RunConfig) -> Iterator[tuple[str, str]]:
    evaluation = run.eval
    text = f"{evaluation.num_games:,} episodes at the end"
    if evaluation.num_games_during:
        text += (
            f", {evaluation.num_games_during:,} at the start and every "
            f"{evaluation.every_steps:,} steps"
        )
    if len(run.environments) > 1:
        text += ", in each environment"
    if isinstance(run, LanguageModelRun) and run.eval.max_games_per_task is not None:
        text += ", fewer if the environment has few tasks"
    yield "evaluation", f"{text} · temperature {evaluation.temperature:g}"
    names = {name for environment in run.environments.values() for name in environment.baselines}
    if names:
        yield "compared", f"with {', '.join(map(format_policy_name, sorted(names)))}"


def _describe_checkpoints(run: RunConfig, size: ModelSize | None) -> str:
    training = run.training
    text = f"every {training.checkpoint_every_steps:,} steps"
    if training.checkpoint_every_s is not None:
        text += f" and about every {format_duration(training.checkpoint_every_s)}"
    has_best = run.eval.num_games_during > 0
    text += f" · the last {training.keep_checkpoints}{' and the best' if has_best else ''} are kept"
    if size is None:
        return text
    num_bytes = _measure_state(size)
    max_checkpoints = training.keep_checkpoints + has_best + 1
    needed_text = format_size(max_checkpoints * num_bytes)
    return (
        f"{text} · {format_size(num_bytes)} each, {needed_text} while one is written"
        f"{_describe_critic(run)}"
    )


def _describe_memory(use: MemoryUse) -> str:
    """Describe a need of memory by its largest parts, and how it could be less if needed."""
    parts = sorted(use.parts, key=lambda part: -part.num_bytes)
    text = f"at most {format_memory(use.num_bytes)}"
    if use.num_available_bytes is not None:
        text += f" of {format_memory(use.num_available_bytes)}"
    text += f" of {use.memory_kind}"
    if not use.fits:
        text += f", which may not fit: {use.remedy}"
    return f"{text} · {', '.join(f'{part.name} {format_memory(part.num_bytes)}' for part in parts)}"


def _describe_critic(run: RunConfig) -> str:
    algorithm = run.algorithm if isinstance(run, LanguageModelRun) else None
    has_critic = isinstance(algorithm, PpoConfig) and isinstance(algorithm.critic, ModelCritic)
    return ", more with the critic" if has_critic else ""


def _measure_state(size: ModelSize) -> int:
    """Return the bytes of a model in a checkpoint."""
    num_adapters = size.num_trained if size.num_trained < size.num_parameters else 0
    num_numbers = size.num_parameters + num_adapters + _NUM_STATES * size.num_trained
    return _BYTES_PER_NUMBER * num_numbers


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}s"
