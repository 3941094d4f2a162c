"""Prefixes of third-party packages, which are installed into a temporary folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COIN_GAMES = """
from ludus.env import Action, Environment, Observation, State, Transition
from ludus.env.catalogue.sources import CatalogueEntry, TargetSource
from ludus.proto.errors import ActionParseError, NotFoundError, did_you_mean

SIZES = {"small": 3, "large": 30}

class Call(Action):
    word: str

class View(Observation):
    num_left: int

class Text:
    def render(self, observation, *, first):
        return [{"role": "user", "content": f"{observation.num_left} coins left"}]
    def parse(self, text, observation):
        if text not in ("heads", "tails"):
            raise ActionParseError("expected heads or tails")
        return Call(word=text)
    def legal_answers(self, observation):
        return ["heads", "tails"]

class Coins(Environment[Call, View, State]):
    action_type, observation_type = Call, View
    name = "coins"
    text_renderer = Text()
    def __init__(self, num_coins: int, bias: float = 0.5):
        self.num_coins = num_coins
    def reset(self, *, seed=None):
        return Transition(View(num_left=self.num_coins))
    def step(self, action):
        return Transition(View(num_left=0), reward=1.0, terminated=True)
    @property
    def state(self):
        return State()

class CoinGames(TargetSource):
    def make_builder(self, name):
        if name not in SIZES:
            hint = did_you_mean(name, SIZES)
            raise NotFoundError(f"there is no coin game '{name}'; {hint}")
        def build(bias: float = 0.5):
            return Coins(SIZES[name], bias)
        return build
    def list_environments(self):
        for name, num_coins in SIZES.items():
            yield CatalogueEntry(name, f"{num_coins} coins", "coins", "readable")
"""

HIDE_MODULES = """
import os
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_visible(name, path=None, target=None):
    is_hidden = name in os.environ["HIDDEN_MODULES"].split()
    return None if is_hidden else find_spec(name, path, target)

PathFinder.find_spec = find_visible
"""


class Installation:
    """A folder of installed packages, and an empty folder in which commands run."""

    def __init__(self, root: Path) -> None:
        self.site, self.folder = root / "site", root / "empty"
        for folder in (self.site, self.folder):
            folder.mkdir()

    def install(self, package: str, code: str, entry_points: str) -> None:
        """Write a module and the metadata that pip would write."""
        (self.site / f"{package}.py").write_text(textwrap.dedent(code))
        metadata = self.site / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(f"[ludus.targets]\n{entry_points}\n")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `ludus`."""
        path = os.pathsep.join([str(self.site), os.environ.get("PYTHONPATH", "")])
        code = "from ludus.services.cli.app import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "120", **variables},
            capture_output=True,
            text=True,
        )


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """Return an installation with a third-party package that declares the prefix `coins`."""
    installation = Installation(tmp_path)
    installation.install("coin_games", COIN_GAMES, "coins = coin_games:CoinGames")
    return installation


def test_package_adds_its_prefix_to_every_command(installation: Installation) -> None:
    result = installation.run("env", "list", "--family", "coins", "--json")
    entries = json.loads(result.stdout)
    assert {entry["target"]: entry["description"] for entry in entries} == {
        "coins:large": "30 coins",
        "coins:small": "3 coins",
    }
    shown = installation.run("env", "show", "coins:small", "--option", "bias=0.1")
    assert "3 coins left" in shown.stdout, shown.stderr
    assert "heads, tails" in shown.stdout
    assert ["bias", "number", "0.5"] in [line.split() for line in shown.stdout.splitlines()]
    played = installation.run("env", "bench", "coins:large", "--episodes", "5")
    assert ["random", "5"] in [line.split()[:2] for line in played.stdout.splitlines()]


def test_wrong_name_of_a_third_party_prefix_is_explained(installation: Installation) -> None:
    wrong_name = installation.run("env", "show", "coins:smal")
    assert "there is no coin game 'smal'; did you mean 'small'?" in wrong_name.stderr
    wrong_prefix = installation.run("env", "show", "coin:small")
    assert "did you mean 'coins:small'" in wrong_prefix.stderr
    assert wrong_name.returncode == wrong_prefix.returncode == 2


def test_broken_package_takes_nothing_else_from_the_list(installation: Installation) -> None:
    installation.install("bad_games", "raise RuntimeError('no licence')", "bad = bad_games:Games")
    installation.install("odd_games", "Games = dict", "odd = odd_games:Games")
    result = installation.run("env", "list", "coins", "--json")
    assert len(json.loads(result.stdout)) == 2
    assert "prefix 'bad' of the package bad_games cannot be loaded" in result.stderr
    assert "no licence" in result.stderr
    assert "'odd' of the package odd_games must name" in result.stderr
    shown = installation.run("env", "show", "bad:game")
    assert shown.returncode == 2
    assert "no licence" in shown.stderr


def test_prefix_of_two_packages_is_refused(installation: Installation) -> None:
    installation.install("more_coins", COIN_GAMES, "coins = more_coins:CoinGames")
    result = installation.run("env", "show", "coins:small")
    assert result.returncode == 2
    assert "coin_games and more_coins both declare the prefix 'coins'" in result.stderr


def test_id_whose_module_is_not_imported_gets_the_form_that_works(
    installation: Installation,
) -> None:
    result = installation.run("env", "show", "gymnasium:ALE/Pong-v5")
    assert result.returncode == 2
    assert "use the target gymnasium:ale_py:ALE/Pong-v5" in result.stderr
    working_form = ("env", "show", "gymnasium:ale_py:ALE/Pong-v5", "--option", "obs_type=ram")
    assert "NOOP, FIRE, RIGHT, LEFT" in installation.run(*working_form).stdout
    result = installation.run("env", "show", "gymnasium:BabyAI-GoToObj-v0")
    assert "gymnasium:minigrid:BabyAI-GoToObj-v0" in result.stderr


def test_missing_library_is_named_with_the_command_that_installs_it(
    installation: Installation,
) -> None:
    (installation.site / "sitecustomize.py").write_text(HIDE_MODULES)
    result = installation.run("env", "list", HIDDEN_MODULES="gymnasium ale_py")
    assert result.returncode == 0, result.stderr
    assert "openspiel" in result.stdout
    warnings = " ".join(result.stderr.split())
    assert "which is not installed; pip install 'ludus[gymnasium]'" in warnings
    assert "pip install 'ludus[atari]'" in warnings
    listed = installation.run(
        "env", "list", "--family", "gymnasium/box2d", "--json", HIDDEN_MODULES="Box2D"
    )
    commands = {entry["install_command"] for entry in json.loads(listed.stdout)}
    assert commands == {"pip install 'gymnasium[box2d]'"}
