from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ludus.env.targets.targets import environment_factory
from ludus.env.types import ToolResult
from ludus.proto.config import LanguageModelRun, load_run_config
from ludus.proto.errors import EpisodeStateError
from tests.cli.commands import RunCli

pytestmark = pytest.mark.slow

PACKAGE_FILES = {
    "README.md",
    "__init__.py",
    "client.py",
    "models.py",
    "openenv.yaml",
    "options.py",
    "policies.py",
    "pyproject.toml",
    "server/Dockerfile",
    "server/__init__.py",
    "server/app.py",
    "server/grid_maze_environment.py",
    "tests/test_grid_maze.py",
    "train.toml",
}


def run_python(*command: str, cwd: Path, python_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(python_path)},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )


@pytest.fixture
def grid_maze(ludus: RunCli, tmp_path: Path) -> Path:
    """Run `ludus env init grid_maze`; return the new folder."""
    result = ludus("env", "init", "grid_maze")
    assert result.code == 0, result.err
    assert "ludus env check grid_maze_env" in result.out
    assert "ludus train grid_maze_env/train.toml" in result.out
    return tmp_path / "grid_maze_env"


def test_new_package_has_the_openenv_layout(grid_maze: Path) -> None:
    files = {str(path.relative_to(grid_maze)) for path in grid_maze.rglob("*") if path.is_file()}
    assert files == PACKAGE_FILES
    assert not [path for path in files if "__NAME__" in path]
    manifest = yaml.safe_load((grid_maze / "openenv.yaml").read_text())
    assert manifest["name"] == "grid_maze_env"
    assert manifest["app"] == "server.app:app"
    dockerfile = (grid_maze / "server" / "Dockerfile").read_text()
    assert "USER 10001" in dockerfile and "HEALTHCHECK" in dockerfile and '"8000"' in dockerfile
    for path in grid_maze.rglob("*"):
        if path.is_file():
            assert not any(token in path.read_text() for token in ("__NAME__", "__CLASS__"))


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--tools",)])
def test_new_package_passes_lint_tests_and_env_check(
    ludus: RunCli, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    assert ludus("env", "init", "grid_maze", *flags).code == 0
    grid_maze = tmp_path / "grid_maze_env"
    ruff = Path(sys.executable).parent / "ruff"
    for command in (("check",), ("format", "--check")):
        ruff_result = subprocess.run([ruff, *command, "."], cwd=grid_maze, capture_output=True)
        assert ruff_result.returncode == 0, ruff_result.stdout
    pytest_result = run_python(
        "-m", "pytest", "-q", "tests", cwd=grid_maze, python_path=grid_maze.parent
    )
    assert pytest_result.returncode == 0, pytest_result.stdout
    check_program = "import sys; sys.argv[1:] = ['env', 'check', 'grid_maze_env']\n"
    check_program += "from ludus.services.cli.app import main; main()"
    check_result = run_python(
        "-c", check_program, cwd=grid_maze.parent, python_path=grid_maze.parent
    )
    assert check_result.returncode == 0, check_result.stdout + check_result.stderr
    assert "broken" not in check_result.stdout


def test_a_package_with_tools_has_one_that_ends_the_episode(
    ludus: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ludus("env", "init", "tool_maze", "--tools").code == 0
    folder = tmp_path / "tool_maze_env"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.toml")} == {
        "pyproject.toml",
        "train.toml",
    }
    run = load_run_config(folder / "train.toml")
    assert isinstance(run, LanguageModelRun) and run.environments["tool_maze"].tools
    monkeypatch.syspath_prepend(tmp_path)
    environment = environment_factory("tool_maze_env", {})()
    assert [tool.name for tool in environment.tools] == ["compare", "submit"]
    secret = environment.reset(seed=3) and environment.state.secret
    assert environment.call_tool("compare", {"number": secret + 1}) == {"secret": "lower"}
    result = environment.call_tool("submit", {"number": secret})
    assert isinstance(result, ToolResult)
    assert (result.reward, result.done, result.success) == (1.0, True, True)
    with pytest.raises(EpisodeStateError):
        environment.step(environment.action_type(guess=secret))


@pytest.mark.long
def test_new_package_works_after_pip_install(grid_maze: Path, tmp_path: Path) -> None:
    site_folder = tmp_path / "site"
    install_arguments = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    install_result = run_python(
        *install_arguments, "--disable-pip-version-check",
        "--target", str(site_folder), str(grid_maze),
        cwd=tmp_path, python_path=tmp_path,
    )  # fmt: skip
    assert install_result.returncode == 0, install_result.stderr
    work_folder = tmp_path / "work"
    work_folder.mkdir()
    program = (
        "from ludus.env.catalogue.packages import list_installed_packages\n"
        "from ludus.env.targets.targets import environment_factory\n"
        "print(environment_factory('grid_maze_env', {'highest': 5})().options)\n"
        "print('grid_maze_env' in [package.name for package in list_installed_packages()])\n"
        "from grid_maze_env.server.app import app\n"
        "print(app.title)"
    )
    import_result = run_python("-c", program, cwd=work_folder, python_path=site_folder)
    assert import_result.returncode == 0, import_result.stderr
    assert import_result.stdout.splitlines() == [
        "{'highest': 5, 'max_tries': 3}",
        "True",
        "grid_maze_env",
    ]


def test_init_does_not_overwrite_existing_files(ludus: RunCli, grid_maze: Path) -> None:
    (grid_maze / "models.py").write_text("original text")
    result = ludus("env", "init", "grid_maze_env")
    assert result.code == 2
    assert "grid_maze_env' contains README.md" in result.err
    assert (grid_maze / "models.py").read_text() == "original text"


@pytest.mark.parametrize("name", ["Maze", "2048", "../up", "a-b", "class", "_x", "x" * 60, "é"])
def test_an_invalid_package_name_is_refused(ludus: RunCli, tmp_path: Path, name: str) -> None:
    result = ludus("env", "init", name)
    assert result.code == 2
    assert "use lower-case words" in result.err
    assert list(tmp_path.iterdir()) == []
