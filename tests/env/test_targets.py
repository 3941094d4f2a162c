"""Creation of environments from targets, and error messages for unknown targets."""

import json
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.env.catalogue.packages import list_installed_packages
from ludus.env.client import AsyncEnvClient
from ludus.env.serving.subprocess import LocalServer
from ludus.env.targets.targets import (
    TargetFactory,
    check_environment_options,
    environment_factory,
)
from ludus.proto.errors import ConfigError, NotFoundError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("target", "options", "name"),
    [
        ("openspiel_env", {"game": "catch"}, "openspiel_env"),
        ("openspiel_env:OpenSpielEnv", None, None),
        ("tests.env.counting_env:CountingEnv", {}, "counting"),
        ("gymnasium:FrozenLake-v1", {"is_slippery": False}, "gymnasium:FrozenLake-v1"),
    ],
)
def test_target_creates_the_environment(target, options, name) -> None:
    if name is None:  # the target is a client class
        with pytest.raises(ConfigError, match=r"'openspiel_env:OpenSpielEnv' must be a"):
            environment_factory(target, {})
        return
    factory = environment_factory(target, options)
    environment = factory()
    assert environment.name == name
    environment.close()
    assert (factory.target, factory.options) == (target, options)
    assert pickle.loads(pickle.dumps(factory)) == factory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "error_type", "message"),
    [
        ("openspeil_env", NotFoundError, "did you mean 'openspiel_env'?"),
        ("tests.env.counting_env:CountingEnf", NotFoundError, "did you mean 'CountingEnv'?"),
        ("no_such_module:Class", NotFoundError, "no module 'no_such_module'"),
        ("gymnasium:CartPoel-v1", NotFoundError, "did you mean 'CartPole-v1'?"),
        ("tests.env.counting_env:NUM_STEPS", ConfigError, "got int"),
        (
            "tests.env.counting_env:CountingRenderer",
            ConfigError,
            "must be a subclass of ludus.env.Environment",
        ),
        ("json", ConfigError, "'json' has no make_environment"),
        ("./my_env.py", NotFoundError, "give its module and class, my_env:Class, from its folder"),
        ("my_env.py:MyEnv", NotFoundError, "give its module and class, my_env:Class, from its"),
        ("openenv:tests.env.counting_env:NUM_STEPS", ConfigError, "got int"),
        (
            "openenv:tests.env.counting_env",
            ConfigError,
            "must have the form module:Class",
        ),
    ],
)
def test_unknown_target_error_contains_a_hint(target, error_type, message: str) -> None:
    with pytest.raises(error_type) as exc_info:
        environment_factory(target, {})
    assert message in str(exc_info.value)


def test_unsupported_environment_options_are_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot be made with \{'num': 3\}"):
        environment_factory("tests.env.counting_env:CountingEnv", {"num": 3})()


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function that writes a module to the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(name: str, code: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(code)
        return path

    return write


SIZED_ENV = """
from tests.env.counting_env import CountingEnv

class SizedEnv(CountingEnv):
    def __init__(self, size=1, colour="red"):
        super().__init__()
        open(f"{size}.txt")
"""


def test_unknown_option_of_a_custom_environment_has_a_hint(write_module) -> None:
    write_module("sized_env_a", SIZED_ENV)
    with pytest.raises(ConfigError, match=r"unknown option 'sise'; did you mean 'size'\?"):
        environment_factory("sized_env_a:SizedEnv", {"sise": 3})()
    with pytest.raises(ConfigError, match="unknown option 'zzz'; it has size, colour"):
        environment_factory("sized_env_a:SizedEnv", {"zzz": 3})()


def test_failing_constructor_is_reported_with_its_line(write_module) -> None:
    path = write_module("sized_env_b", SIZED_ENV)
    with pytest.raises(ConfigError, match=rf"FileNotFoundError: .*3\.txt.*'{path}', line 7\)"):
        check_environment_options("sized_env_b:SizedEnv", {"size": 3})


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        (
            "broken_env_a",
            "def make()\n    pass\n",
            r"SyntaxError: expected ':' \(.*a\.py', line 1\)",
        ),
        ("broken_env_b", "\nx = y\n", r"NameError: name 'y' is not defined \(.*b\.py', line 2\)"),
    ],
)
def test_module_that_cannot_be_imported_is_reported_with_its_line(
    write_module, name: str, code: str, message: str
) -> None:
    write_module(name, code)
    with pytest.raises(ConfigError, match=message):
        environment_factory(f"{name}:make", {})


def test_function_that_returns_no_environment_fails() -> None:
    factory = environment_factory("json:loads", {"s": "{}"})
    with pytest.raises(ConfigError, match=r"must make a ludus\.env\.Environment, got dict"):
        factory()


@pytest.mark.slow
def test_module_in_working_directory_is_found_locally_and_by_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "custom_rules.py").write_text(
        textwrap.dedent("""
            from tests.env.counting_env import CountingEnv

            def make(label="plain"):
                environment = CountingEnv()
                type(environment).version = label
                return environment
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path.parent) + ":" + str(ROOT))
    program = (
        "import sys; sys.path.remove('') if '' in sys.path else None\n"
        "from ludus.env.targets.targets import environment_factory\n"
        "print(environment_factory('custom_rules:make', {'label': 'custom'})().version)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.strip() == "custom"


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["inline", "pool", "process"])
async def test_every_isolation_supports_every_target_kind(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for target in ("gymnasium:FrozenLake-v1", "tests.env.counting_env:CountingEnv"):
        server = LocalServer(target, {}, max_sessions=2, isolation=isolation)
        try:
            async with await AsyncEnvClient.connect(server.start().grpc) as client:
                session, first_result = await client.open(seed=3)
                result = await session.step(text=first_result.text.legal_answers[0])
                assert result.step_index == 1
        finally:
            server.stop()


@pytest.mark.slow
def test_target_imports_no_unrelated_library() -> None:
    program = (
        "import sys, json\n"
        "from ludus.env.targets.targets import environment_factory\n"
        "environment_factory('tests.env.counting_env:CountingEnv', {})()\n"
        "print(json.dumps([m for m in ('gymnasium', 'openenv', 'pyspiel') if m in sys.modules]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    )
    assert json.loads(process.stdout) == []


@pytest.mark.slow
def test_installed_packages_are_listed() -> None:
    assert "openspiel_env" in [package.name for package in list_installed_packages()]
    assert TargetFactory("openspiel_env").options == {}
