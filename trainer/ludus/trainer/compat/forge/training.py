"""`setup_forge_training` and the trainer it returns, over `ludus.trainer.Trainer`."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, Self, TypeAlias, TypedDict

import torch

from ludus.env import Message
from ludus.env.text.terminal import clean_for_terminal
from ludus.proto.config import LanguageModelRun, RunConfig, load_run_config
from ludus.proto.errors import ConfigError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import EvalReport, Resume, Summary
from ludus.trainer.compat.checks import make_run_name, rename_in_errors
from ludus.trainer.compat.forge.configuration import LUDUS_SECTION, load_forge_config
from ludus.trainer.compat.forge.data_models.completion import Completion, translate_sampling
from ludus.trainer.compat.forge.functions import NO_FUNCTIONS, CustomFunctions
from ludus.trainer.compat.forge.mapping import MappedConfig, map_config
from ludus.trainer.compat.forge.server import add_baselines
from ludus.trainer.core.output import warn_user
from ludus.trainer.driver.loops.steps import Step
from ludus.trainer.driver.policy import Policy
from ludus.trainer.driver.trainer import Trainer

_TOML_SUFFIX = ".toml"
_DEFAULT_RUN_NAME = "forge"
_NUM_PRINTED_STEPS, _MAX_PRINTED_TURNS, _MAX_PRINTED_CHARS = 20, 6, 60

Configuration: TypeAlias = LanguageModelRun | Mapping[str, Any] | Path | str
"""A Forge configuration (YAML, mapping) or a run of Ludus (LanguageModelRun, TOML)."""


class Results(TypedDict):
    """Return value of `run`; each list has one entry per step of the call."""

    iterations: list[int]
    """Numbers of the trained steps."""
    win_rates: list[float]
    """Share of episodes since the previous step that the environment reports as a success. A step
    without finished episodes repeats the previous value; NaN if the environment reports none."""
    losses: list[float]
    rewards: list[float]
    """Mean training reward of the same episodes."""
    run_dir: str
    """Path of the run folder."""


class ForgePolicy:
    """The policy with the weights of the rollout workers."""

    def __init__(self, policy: Policy) -> None:
        self.generate = GenerateEndpoint(policy)


class GenerateEndpoint:
    """The endpoint `policy.generate(...)`, and Forge's `policy.generate.route(...)`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def __call__(
        self, prompt: str | Sequence[Message], *, sampling_params: Mapping[str, Any] | None = None
    ) -> list[Completion]:
        """Return completions of a user message or of a conversation.

        Args:
            sampling_params: n, temperature, top_p, max_tokens and seed. Default: the settings of
                rollouts, and one completion.

        Raises:
            ConfigError: a parameter is unknown, or the prompt leaves no room for a completion.
        """
        return await self._complete(self._policy.encode_prompt(prompt), sampling_params)

    async def route(
        self, prompt: str, *, sampling_params: Mapping[str, Any] | None = None
    ) -> list[Completion]:
        """Return completions of a text to which the chat template has already been applied."""
        return await self._complete(self._policy.tokenizer.encode(prompt), sampling_params)

    async def _complete(
        self, prompt_ids: list[int], sampling_params: Mapping[str, Any] | None
    ) -> list[Completion]:
        options = translate_sampling(sampling_params or {})
        samples = await self._policy.complete(prompt_ids, **options)
        prompt = self._policy.tokenizer.tokenizer.decode(prompt_ids)
        return [
            Completion.convert(prompt, sample.text, prompt_ids, sample.completion)
            for sample in samples
        ]


class GRPOTrainer:
    """A started run. It can be trained in several calls, sampled from and evaluated."""

    def __init__(self, trainer: Trainer, stack: AsyncExitStack) -> None:
        """Wrap a started trainer, which `stack` closes; see `setup_forge_training`."""
        self._trainer = trainer
        self._stack = stack
        self.summary: Summary | None = None
        """Final results of the run, after its last step."""

    @property
    def run_config(self) -> LanguageModelRun:
        """Configuration of the run."""
        return self._trainer.run

    @property
    def run_dir(self) -> Path:
        """Path of the run folder."""
        return self._trainer.folder

    @property
    def policy(self) -> ForgePolicy:
        """The policy with its latest weights."""
        return ForgePolicy(self._trainer.policy)

    async def run(
        self, steps: int | None = None, *, on_step: Callable[[Step], None] | None = None
    ) -> Results:
        """Train further steps and return their results.

        Schedules follow the number of steps in the file, so run(70) twice equals run(140). After
        the last step of the file, the policy is evaluated and `summary` is set.

        Args:
            steps: the number of steps; None trains all remaining steps.
            on_step: function that is called after each step; None prints some of the steps.

        Raises:
            ConfigError: fewer steps remain.
            LudusError: the run failed.
        """
        num_remaining = self.run_config.training.num_steps - self._trainer.num_steps_trained
        steps = num_remaining if steps is None else steps
        if num_remaining == 0:
            raise ConfigError(
                f"all {self.run_config.training.num_steps} steps are trained; raise "
                "trainer.training.steps"
            )
        if not 1 <= steps <= num_remaining:
            raise ConfigError(
                f"steps must be between 1 and {num_remaining}, the number of remaining steps, got "
                f"{steps}; raise trainer.training.steps"
            )
        on_step = on_step or _StepPrinter(steps)
        trained_steps: list[Step] = []
        async with aclosing(self._trainer.steps()) as all_steps:
            async for step in all_steps:
                trained_steps.append(step)
                on_step(step)
                if len(trained_steps) == steps:
                    break
        if steps == num_remaining:
            self.summary = await self._trainer.train()
        return _make_results(trained_steps, self.run_dir)

    async def evaluate(self, num_games: int | None = None) -> dict[str, EvalReport]:
        """Evaluate the current policy and the baselines on the same seeds, by environment."""
        return await self._trainer.evaluate(num_games)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error_details: Any) -> None:
        await self._stack.__aexit__(*error_details)

    async def shutdown(self) -> None:
        """Stop all processes of the run; an unfinished run writes a checkpoint."""
        await self._stack.aclose()


async def setup_forge_training(
    config: Configuration,
    overrides: Sequence[str] = (),
    *,
    reward: Any = None,
    compute_advantages: Any = None,
    render: Callable[..., Any] | None = None,
    parse: Callable[..., Any] | None = None,
    resume: Resume | str = Resume.NEVER,
    overwrite: bool = False,
) -> GRPOTrainer:
    """Start servers, learner and engines, and return the trainer.

    Args:
        config: a Forge configuration (YAML file or mapping) or a run of Ludus (LanguageModelRun or
            TOML file).
        overrides: "section.key=value" strings, with the keys of `config`.
        reward: `evaluate_response(prompt, response, game_reward)`, or an object with this method;
            replaces the environment's return.
        compute_advantages: `compute(group)`, or an object with this method; each episode of the
            group has a `reward`.
        render: (observation, first) -> messages; with `parse`, replaces the environment's text.
        parse: (text, observation) -> action.
        resume: "always" resumes from the latest checkpoint, "auto" if there is one.
        overwrite: replaces the run of the same name. Otherwise, a run that the configuration does
            not name gets an unused name.

    Raises:
        UserError: the configuration is invalid.
    """
    run = await load_forge_run(
        config,
        overrides,
        resume=Resume(resume),
        overwrite=overwrite,
        functions=CustomFunctions(reward, compute_advantages, render, parse),
    )
    trainer = Trainer(run, resume=resume, overwrite=overwrite)
    stack = AsyncExitStack()
    await stack.enter_async_context(trainer)
    return GRPOTrainer(trainer, stack)


async def load_forge_run(
    config: Configuration,
    overrides: Sequence[str] = (),
    *,
    resume: Resume = Resume.NEVER,
    overwrite: bool = False,
    functions: CustomFunctions = NO_FUNCTIONS,
) -> LanguageModelRun:
    """Return the run for a configuration; see `setup_forge_training`."""
    keeps_name = overwrite or resume != Resume.NEVER
    mapped_config = await _map_any_config(config, overrides, keeps_name=keeps_name)
    functions.add_to(mapped_config.sections)
    with rename_in_errors(mapped_config.key_by_setting):
        return Trainer(mapped_config.sections).run


async def _map_any_config(
    config: Configuration, overrides: Sequence[str], *, keeps_name: bool
) -> MappedConfig:
    if isinstance(config, LanguageModelRun):
        run: RunConfig = Trainer(config, overrides=overrides).run
        return MappedConfig(run.model_dump(mode="json"), (), {})
    if isinstance(config, (str, Path)) and Path(config).suffix == _TOML_SUFFIX:
        run = load_run_config(Path(config), overrides)
        return MappedConfig(run.model_dump(mode="json"), (), {})
    forge_config = load_forge_config(config, overrides)
    file_name = _DEFAULT_RUN_NAME if isinstance(config, Mapping) else Path(config).stem
    name = make_run_name(file_name, _DEFAULT_RUN_NAME)
    mapped_config = map_config(forge_config, name=name, has_gpu=torch.cuda.is_available())
    if mapped_config.unused_keys:
        warn_user(f"these Forge keys have no effect: {', '.join(mapped_config.unused_keys)}")
    sections = mapped_config.sections
    if not keeps_name and "name" not in (forge_config.get(LUDUS_SECTION) or {}):
        sections["name"] = _find_free_name(name, Path(sections.get("output_dir", "runs")))
    if "environment" in sections:
        game = (forge_config.get("blackjack_env") or {}).get("game_name")
        sections["environments"] = await add_baselines(sections.pop("environment"), game)
    return mapped_config


def _find_free_name(name: str, folder: Path) -> str:
    """Return the name, with a number appended if such a run exists."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in names if not (folder / candidate).exists())


def _make_results(steps: Sequence[Step], run_dir: Path) -> Results:
    def collect_values(metric: TrainMetric) -> list[float]:
        series = (step.values.get(metric) for step in steps)
        return list(itertools.accumulate(series, _fill_gap, initial=math.nan))[1:]

    return Results(
        iterations=[step.number for step in steps],
        win_rates=collect_values(TrainMetric.WIN_RATE),
        losses=collect_values(TrainMetric.LOSS),
        rewards=collect_values(TrainMetric.REWARD_MEAN),
        run_dir=str(run_dir),
    )


def _fill_gap(previous_value: float, value: float | None) -> float:
    """Return the value, or the previous value if no episode ended in the step."""
    return previous_value if value is None else value


class _StepPrinter:
    """Prints some of the steps to standard output, each with one episode."""

    def __init__(self, num_steps: int) -> None:
        self._print_interval = max(1, num_steps // _NUM_PRINTED_STEPS)
        self._num_steps_seen = 0
        self._values: dict[str, float] = dict.fromkeys(
            (TrainMetric.WIN_RATE, TrainMetric.REWARD_MEAN, TrainMetric.LOSS), math.nan
        )
        """Latest value of each metric."""

    def __call__(self, step: Step) -> None:
        self._values |= step.values
        if self._num_steps_seen % self._print_interval == 0:
            sys.stdout.write(
                f"step {step.number:>4}  wins {self._values[TrainMetric.WIN_RATE]:6.1%}  "
                f"reward {self._values[TrainMetric.REWARD_MEAN]:+.3f}  "
                f"loss {self._values[TrainMetric.LOSS]:+.4f}"
                f"{clean_for_terminal(_format_episode(step))}\n"
            )
            sys.stdout.flush()
        self._num_steps_seen += 1


def _format_episode(step: Step) -> str:
    """Format one training episode of the step as a line; empty if there is no transcript."""
    if not step.transcripts:
        return ""
    transcript = step.transcripts[0]
    turns = [
        f"{_shorten(turn.shown[-1].text) if turn.shown else ''} -> {_shorten(turn.answer)}"
        for turn in transcript.turns[:_MAX_PRINTED_TURNS]
    ]
    return f"  [{'; '.join(turns)}: {transcript.episode_return:+g}]" if turns else ""


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_MAX_PRINTED_CHARS]
