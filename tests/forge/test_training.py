"""`load_forge_run` and `GRPOTrainer.run` with a fake trainer."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun, make_run_config
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Resume
from ludus.trainer.compat.checks import make_run_name
from ludus.trainer.compat.forge import GRPOTrainer
from ludus.trainer.compat.forge.server import add_baselines
from ludus.trainer.compat.forge.training import load_forge_run
from ludus.trainer.driver.loops.steps import Step
from tests.forge.tutorial_config import tutorial_config
from tests.openspiel.test_server import RunningServer, run_server_program

GRPC_ADDRESS_OVERRIDE = "blackjack_env.server_url=grpc://localhost:1"
"""Override with a server address that is not used before the run starts."""


class FakeTrainer:
    """A fake trainer that only counts steps. No episode ends in the third step."""

    def __init__(self, num_steps: int) -> None:
        self.run = make_run_config({"training": {"num_steps": num_steps}})
        self.folder = Path("runs/run")
        self.num_steps_trained = 0
        self.num_train_calls = 0

    async def steps(self) -> AsyncGenerator[Step, None]:
        while self.num_steps_trained < self.run.training.num_steps:
            self.num_steps_trained += 1
            step_number = self.num_steps_trained
            values: dict[str, float] = {"loss": -step_number}
            if step_number != 3:
                values |= {"win_rate": step_number / 10, "reward_mean": step_number / 100}
            yield Step(step_number, values, {}, (), None)

    async def train(self) -> str:
        self.num_train_calls += 1
        return "summary"


def make_trainer(num_steps: int) -> tuple[Any, GRPOTrainer]:
    fake_trainer: Any = FakeTrainer(num_steps)
    return fake_trainer, GRPOTrainer(fake_trainer, AsyncExitStack())


async def test_repeated_run_continues_and_returns_one_value_per_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_trainer, trainer = make_trainer(5)
    results = await trainer.run(steps=3)
    assert results["iterations"] == [1, 2, 3]
    assert results["losses"] == [-1, -2, -3]
    assert results["win_rates"] == [0.1, 0.2, 0.2], "step 3 did not repeat the win rate"
    assert results["rewards"] == [0.01, 0.02, 0.02]
    assert (results["run_dir"], trainer.summary, fake_trainer.num_train_calls) == (
        "runs/run",
        None,
        0,
    )
    assert "step    1  wins  10.0%" in capsys.readouterr().out
    step_numbers: list[int] = []
    second_results = await trainer.run(on_step=lambda step: step_numbers.append(step.number))
    assert second_results["iterations"] == step_numbers == [4, 5]
    assert (trainer.summary, fake_trainer.num_train_calls) == ("summary", 1)
    assert capsys.readouterr().out == ""


async def test_win_rate_is_nan_when_no_episode_reports_success() -> None:
    fake_trainer, trainer = make_trainer(3)
    fake_trainer.num_steps_trained = 2
    assert math.isnan((await trainer.run())["win_rates"][0])


@pytest.mark.parametrize("steps", [0, 6])
async def test_number_of_steps_outside_the_configured_range_is_refused(steps: int) -> None:
    _, trainer = make_trainer(5)
    with pytest.raises(ConfigError, match=f"steps must be between 1 and 5, .* got {steps}"):
        await trainer.run(steps=steps)


async def test_ludus_run_configuration_is_not_changed(tmp_path: Path) -> None:
    run = LanguageModelRun(name="mine")
    assert await load_forge_run(run) == run
    assert (await load_forge_run(run, ["training.num_steps=7"])).training.num_steps == 7
    path = tmp_path / "mine.toml"
    path.write_text('name = "file"\n[training]\nnum_steps = 3\n')
    assert (await load_forge_run(path)).name == "file"


async def test_a_run_without_a_name_gets_an_unused_name(tmp_path: Path) -> None:
    config = tutorial_config()
    overrides = [GRPC_ADDRESS_OVERRIDE, f"ludus.output_dir={tmp_path}"]
    assert (await load_forge_run(config, overrides)).name == "forge"
    for name in ("forge", "forge-2"):
        (tmp_path / name).mkdir()
    assert (await load_forge_run(config, overrides)).name == "forge-3"
    assert (await load_forge_run(config, [*overrides, "ludus.name=mine"])).name == "mine"
    assert (await load_forge_run(config, overrides, overwrite=True)).name == "forge"
    assert (await load_forge_run(config, overrides, resume=Resume.ALWAYS)).name == "forge"


async def test_keys_without_effect_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    await load_forge_run(tutorial_config(), [GRPC_ADDRESS_OVERRIDE])
    error_output = capsys.readouterr().err
    assert "have no effect: metric_logging.wandb.group" in error_output
    assert "actors.compute_advantages.mesh_name" in error_output


@pytest.mark.slow
async def test_missing_server_is_reported_with_the_address() -> None:
    with pytest.raises(ConfigError, match=r"no environment responds at 'http://localhost:1'"):
        await add_baselines({"kind": "remote", "address": "http://localhost:1"}, None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server_program(
        tmp_path_factory.mktemp("server"), OPENSPIEL_GAME="tic_tac_toe"
    ) as server:
        yield server


@pytest.mark.slow
async def test_baselines_come_from_the_server(
    server: RunningServer,
) -> None:
    section = {"kind": "remote", "address": server.http_address}
    environments = await add_baselines(dict(section), "tic_tac_toe")
    assert environments["tic_tac_toe"]["baselines"] == ["random", "minimax"]
    assert environments["tic_tac_toe"]["optimal_policy"] == "minimax"
    environments = await add_baselines({**section, "baselines": ["random"]}, None)
    assert environments["tic_tac_toe"]["baselines"] == ["random"]
    with pytest.raises(ConfigError, match=r"game_name = 'blackjack', but .* serves 'tic_tac_toe'"):
        await add_baselines(dict(section), "blackjack")


@pytest.mark.parametrize(
    "file_name", ["_grpo.yaml", "a" * 90 + ".yaml", "my file (2).yaml", "...yaml"]
)
def test_every_file_name_gives_a_valid_run_name(file_name: str) -> None:
    assert LanguageModelRun(name=make_run_name(Path(file_name).stem, "forge")).name
