"""`setup_forge_training` and the trainer it returns, over `ludus.trainer.Trainer`.

trainer = await setup_forge_training("blackjack.yaml")
results = await trainer.run(steps=100)        # again: it goes on
await trainer.shutdown()
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypedDict

import torch

from ludus.proto.config import LanguageModelRun, load_run_config
from ludus.proto.errors import ConfigError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import EvalReport, Resume, Summary
from ludus.trainer.compat.forge.configuration import load_forge_config
from ludus.trainer.compat.forge.functions import NO_FUNCTIONS, Functions
from ludus.trainer.compat.forge.mapping import OWN_SECTION, run_tree
from ludus.trainer.compat.forge.policy import ForgePolicy
from ludus.trainer.compat.forge.server import with_comparisons
from ludus.trainer.driver.loops.steps import Step
from ludus.trainer.driver.trainer import Trainer

_TOML = ".toml"
_NAME = "forge"
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
"""What the name of a run cannot have."""
_MAX_NAME = 40
_NUM_TOLD, _MAX_TURNS, _MAX_SHOWN = 20, 6, 60


Configuration: TypeAlias = LanguageModelRun | Mapping[str, Any] | Path | str
"""Forge's, as a YAML file or a mapping; or a run of Ludus, as a LanguageModelRun or a TOML file."""


class Results(TypedDict):
    """What `run` returns; each list has one entry per step of that call."""

    iterations: list[int]
    """Steps trained so far."""
    win_rates: list[float]
    """Share of the games played since the step before that the environment calls a success: what
    the reward makes of a draw is no win. Where none was, that of the step before; not a number
    where the environment does not say."""
    losses: list[float]
    rewards: list[float]
    """Mean reward of the same games, as it is learned from."""
    run_dir: str
    """The run's folder."""


class GRPOTrainer:
    """A run under way: trained in parts, asked, judged and ended."""

    def __init__(self, trainer: Trainer, stack: AsyncExitStack) -> None:
        """`stack` ends the trainer; see `setup_forge_training`."""
        self._trainer = trainer
        self._stack = stack
        self.summary: Summary | None = None
        """What the run came to, once its last step is trained."""

    @property
    def run_config(self) -> LanguageModelRun:
        """What the configuration came to."""
        return self._trainer.run

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self._trainer.folder

    @property
    def policy(self) -> ForgePolicy:
        """The policy with its newest weights."""
        return ForgePolicy(self._trainer.policy)

    async def run(
        self, steps: int | None = None, *, on_step: Callable[[Step], None] | None = None
    ) -> Results:
        """What so many more steps of training came to.

        Schedules follow the steps of the file, not those of a call: run(70) twice is run(140).
        With the file's last step the run is judged, and `summary` has what it came to.

        Args:
            steps: None is all that are left.
            on_step: called after each; None writes a line to standard output now and then.

        Raises:
            ConfigError: more steps than are left.
            LudusError: what ended the run.
        """
        left = self.run_config.training.num_steps - self._trainer.num_steps_trained
        steps = left if steps is None else steps
        if not 1 <= steps <= left:
            raise ConfigError(
                f"steps expected 1 to {left}, got {steps}: the run has "
                f"{self.run_config.training.num_steps} steps, by which its schedules go, and "
                f"{self._trainer.num_steps_trained} are trained; raise trainer.training.steps"
            )
        on_step = on_step or _Told(steps)
        done: list[Step] = []
        async with aclosing(self._trainer.steps()) as trained:
            async for step in trained:
                done.append(step)
                on_step(step)
                if len(done) == steps:
                    break
        if steps == left:
            self.summary = await self._trainer.train()
        return _results(done, self.run_dir)

    async def evaluate(self, num_games: int | None = None) -> dict[str, EvalReport]:
        """By environment: the policy as it is now, beside the fixed policies on the same seeds."""
        return await self._trainer.evaluate(num_games)

    async def save(self) -> Path:
        """The folder of a checkpoint of now."""
        return await self._trainer.save()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, traceback)

    async def shutdown(self) -> None:
        """End all processes of the run; what has not trained its last step leaves a checkpoint."""
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
    """The trainer, when servers, learner and generators are there and hold the first weights.

    Args:
        config: Forge's configuration, as a YAML file or a mapping; or a run of Ludus, as a
            LanguageModelRun or a TOML file.
        overrides: each "section.key=value", in the words of `config`.
        reward: `evaluate_response(prompt, response, game_reward)`, or what has it; takes the
            place of the environment's own return.
        compute_advantages: `compute(group)`, or what has it; each episode of the group has its
            `reward`.
        render: (observation, first) -> messages; with `parse`, replaces the environment's text.
        parse: (text, observation) -> action.
        resume: "always" continues from the newest checkpoint, "auto" where there is one.
        overwrite: replaces the run of that name. Unless the configuration names the run, it
            gets a name that is free.

    Raises:
        UserError: what cannot work as it is configured.
    """
    run = await run_of(
        config,
        overrides,
        resume=Resume(resume),
        overwrite=overwrite,
        functions=Functions(reward, compute_advantages, render, parse),
    )
    trainer = Trainer(run, resume=resume, overwrite=overwrite)
    stack = AsyncExitStack()
    await stack.enter_async_context(trainer)
    return GRPOTrainer(trainer, stack)


async def run_of(
    config: Configuration,
    overrides: Sequence[str] = (),
    *,
    resume: Resume = Resume.NEVER,
    overwrite: bool = False,
    functions: Functions = NO_FUNCTIONS,
) -> LanguageModelRun:
    """The run that a configuration of Forge's comes to; see `setup_forge_training`.

    Raises:
        UserError: what cannot work as it is configured.
    """
    keeps_name = overwrite or resume != Resume.NEVER
    tree = await _run_tree(config, overrides, keeps_name=keeps_name)
    return Trainer(_with(tree, functions)).run


async def _run_tree(
    config: Configuration,
    overrides: Sequence[str],
    *,
    keeps_name: bool,
) -> dict[str, Any]:
    """The sections of the run."""
    if isinstance(config, LanguageModelRun):
        return Trainer(config, overrides=overrides).run.model_dump(mode="json")
    if isinstance(config, (str, Path)) and Path(config).suffix == _TOML:
        return load_run_config(Path(config), overrides).model_dump(mode="json")
    cfg = load_forge_config(config, overrides)
    name = _NAME if isinstance(config, Mapping) else _name_of(Path(config))
    mapped = run_tree(cfg, name=name, has_gpu=torch.cuda.is_available())
    _tell_unused(mapped.unused)
    tree = mapped.tree
    if not keeps_name and "name" not in (cfg.get(OWN_SECTION) or {}):
        tree["name"] = _free_name(name, Path(tree.get("output_dir", "runs")))
    if "environment" in tree:
        game = (cfg.get("blackjack_env") or {}).get("game_name")
        tree["environments"] = await with_comparisons(tree.pop("environment"), game)
    return tree


def _tell_unused(keys: Sequence[str]) -> None:
    if keys:
        sys.stderr.write(
            "warning: these keys of Forge's configuration mean nothing here, and are not honoured: "
            f"{', '.join(keys)}\n"
        )


def _name_of(file: Path) -> str:
    """The name of a run of that file."""
    return _NO_NAME.sub("-", file.stem).lstrip("._-")[:_MAX_NAME] or _NAME


def _free_name(name: str, folder: Path) -> str:
    """The name, with a number where there is such a run."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(one for one in names if not (folder / one).exists())


def _with(tree: dict[str, Any], functions: Functions) -> dict[str, Any]:
    """The sections with the functions in them, in every environment."""
    for section in tree.get("environments", {}).values():
        section |= functions.of_environment
    if functions.of_algorithm:
        tree["algorithm"] = {**tree.get("algorithm", {}), **functions.of_algorithm}
    return tree


def _results(steps: Sequence[Step], run_dir: Path) -> Results:
    def values(metric: TrainMetric) -> list[float]:
        found = (step.values.get(metric) for step in steps)
        return list(itertools.accumulate(found, _or_before, initial=math.nan))[1:]

    return Results(
        iterations=[step.number for step in steps],
        win_rates=values(TrainMetric.WIN_RATE),
        losses=values(TrainMetric.LOSS),
        rewards=values(TrainMetric.REWARD_MEAN),
        run_dir=str(run_dir),
    )


def _or_before(before: float, value: float | None) -> float:
    """The value, or the one before where games of one batch have ended with those of another."""
    return before if value is None else value


class _Told:
    """Writes some of the steps to standard output, with one game word for word."""

    def __init__(self, num_steps: int) -> None:
        self._every = max(1, num_steps // _NUM_TOLD)
        self._num_seen = 0
        self._values: dict[str, float] = {}
        """The newest of each."""

    def __call__(self, step: Step) -> None:
        self._values |= step.values
        self._num_seen += 1
        if (self._num_seen - 1) % self._every:
            return
        values = self._values
        line = (
            f"step {step.number:>4}  wins {values.get(TrainMetric.WIN_RATE, math.nan):6.1%}  "
            f"reward {values.get(TrainMetric.REWARD_MEAN, math.nan):+.3f}  "
            f"loss {values.get(TrainMetric.LOSS, math.nan):+.4f}"
        )
        sys.stdout.write(f"{line}{_game(step)}\n")
        sys.stdout.flush()


def _game(step: Step) -> str:
    """One of the games that the step learned from, in a line; empty where there is none."""
    if not step.transcripts:
        return ""
    game = step.transcripts[0]
    turns = [
        f"{' '.join(turn.shown[-1].text.split())[:_MAX_SHOWN] if turn.shown else ''} "
        f"-> {' '.join(turn.answer.split())[:_MAX_SHOWN]}"
        for turn in game.turns[:_MAX_TURNS]
    ]
    return f"  [{'; '.join(turns)}: {game.episode_return:+g}]" if turns else ""
