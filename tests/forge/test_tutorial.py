"""Functions, notebook and server commands of the tutorial."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from ludus.proto.errors import ActionParseError, ConfigError
from ludus.trainer.models.load import load_tokenizer
from openspiel_env import OpenSpielAction, OpenSpielEnv, make_environment
from tests.learner.tiny_policy import make_policy_folder
from tests.openspiel.test_server import RunningServer, run_server_program

ROOT = Path(__file__).parents[2]
TUTORIAL_FOLDER = ROOT / "examples" / "tutorial"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server_program(
        tmp_path_factory.mktemp("server"), OPENSPIEL_GAME="blackjack"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def grpo_utils() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TUTORIAL_FOLDER))
    import grpo_utils

    yield grpo_utils
    sys.path.remove(str(TUTORIAL_FOLDER))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function_name", "min_rate", "max_rate"),
    [("play_random_policy", 0.226, 0.340), ("play_heuristic_policy", 0.347, 0.471)],
)
async def test_measured_baselines_match_the_computed_rates(
    grpo_utils: ModuleType,
    server: RunningServer,
    function_name: str,
    min_rate: float,
    max_rate: float,
) -> None:
    # The bounds are 28.28 % and 40.88 %, plus or minus four standard errors for 1,000 games.
    play = getattr(grpo_utils, function_name)
    stats = play(server.http_address, num_games=1000)
    assert stats["total_games"] == 1000 == stats["wins"] + stats["losses"] + stats["pushes"]
    assert min_rate < stats["win_rate"] == stats["wins"] / 1000 < max_rate
    lower_bound, upper_bound = stats["win_rate_ci95"]
    assert lower_bound < stats["win_rate"] < upper_bound
    assert play(server.http_address, num_games=100, seed=0)["total_games"] == 100


@pytest.mark.slow
def test_an_observation_is_printed_with_the_text_for_the_model(
    grpo_utils: ModuleType, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with OpenSpielEnv(base_url=server.http_address) as env:
        result = env.reset(seed=7)
    assert result.text is not None
    grpo_utils.show_openenv_observation(result.observation)
    printed_text = capsys.readouterr().out
    assert f"what a model sees: {result.text.messages[0]['content']}" in printed_text
    assert "info state: 189 numbers" in printed_text
    observation = result.observation.model_dump()
    assert grpo_utils.render(observation, first=True) == result.text.messages
    assert grpo_utils.parse("STAND", observation) == {"action_id": 1}


@pytest.mark.slow
def test_unknown_policy_is_refused_with_the_known_policies(
    grpo_utils: ModuleType, tmp_path: Path
) -> None:
    with (
        run_server_program(tmp_path, OPENSPIEL_GAME="catch") as server,
        pytest.raises(ConfigError, match="'catch' has no policy 'dealer_rule'; it has random, f"),
    ):
        grpo_utils.play_heuristic_policy(server.http_address)


def read_server_variables() -> list[dict[str, str]]:
    """Return the environment variables of each server command in the notebook."""
    cells = json.loads((TUTORIAL_FOLDER / "blackjack.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    commands = re.findall(
        r"(OPENSPIEL_GAME=[^`\n]*) python -m envs\.openspiel_env\.server\.app", text
    )
    return [dict(word.split("=", 1) for word in shlex.split(command)) for command in commands]


def test_the_notebook_has_a_command_for_each_game_of_the_tutorial() -> None:
    games = [variables["OPENSPIEL_GAME"] for variables in read_server_variables()]
    assert games == ["blackjack", "tic_tac_toe", "connect_four", "chess", "go"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables", read_server_variables()[2:], ids=lambda variables: variables["OPENSPIEL_GAME"]
)
def test_each_command_starts_a_server_that_renders_text(
    variables: dict[str, str], tmp_path: Path
) -> None:
    with (
        run_server_program(tmp_path, **variables) as server,
        OpenSpielEnv(base_url=server.http_address) as env,
    ):
        result = env.reset(seed=1)
        assert result.text is not None and result.text.messages[0]["content"]
        assert len(result.text.legal_answers) == len(result.observation.legal_actions)
        assert not env.step(OpenSpielAction(action_id=result.observation.legal_actions[0])).done


def test_reward_can_be_called_as_a_method(grpo_utils: ModuleType) -> None:
    evaluate_response = grpo_utils.BlackJackReward().evaluate_response
    assert [evaluate_response("prompt", "HIT", game_reward) for game_reward in (1, 0, -1)] == [
        2.0,
        0.5,
        -1.0,
    ]


async def test_reward_can_be_called_as_an_actor_endpoint(grpo_utils: ModuleType) -> None:
    actor = await grpo_utils.BlackJackReward.options(procs=1, num_replicas=1).as_service()
    arguments = {"prompt": "prompt", "response": "HIT", "game_reward": 0.0}
    assert await actor.evaluate_response.route(**arguments) == 0.5


def test_an_ambiguous_action_is_refused(grpo_utils: ModuleType) -> None:
    assert [grpo_utils.parse_action(text, [0, 1]) for text in ("hit", "I STAND.")] == [0, 1]
    for text in ("", "a hit or a stand?", "HIT, no, STAND", "standard", "fold"):
        with pytest.raises(ActionParseError, match="expected one of HIT, STAND"):
            grpo_utils.parse_action(text, [0, 1])
    with pytest.raises(ActionParseError, match="expected one of STAND, got"):
        grpo_utils.parse_action("HIT", [1])


def test_prompt_uses_the_chat_template_of_the_model(grpo_utils: ModuleType, tmp_path: Path) -> None:
    environment = make_environment(game="blackjack")
    observation = environment.reset(seed=7).observation
    tokenizer = load_tokenizer(make_policy_folder(tmp_path))
    prompt = grpo_utils.format_prompt(observation, tokenizer)
    assert prompt == f"<|user|>{grpo_utils.describe(observation)}<|end|><|assistant|>"


def test_the_notebook_has_outputs_and_no_errors() -> None:
    notebook = nbformat.read(TUTORIAL_FOLDER / "blackjack.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    text = "".join(output.get("text", "") for output in outputs)
    assert "gap from random to best closed" in text
