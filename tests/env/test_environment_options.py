"""Options of an environment, given as arguments, variables or JSON to its server program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from pydantic import Field

from ludus.env.options import EnvironmentOptions, JsonOption, format_option_table
from ludus.env.serving import application
from ludus.env.serving.application import ServerApplication
from ludus.proto.errors import ConfigError


class CoinOptions(EnvironmentOptions):
    """Options of an environment that flips a coin."""

    variable_suffixes: ClassVar[Mapping[str, str]] = {"bias": "coin_bias"}

    num_flips: int = Field(10, ge=1)
    """Number of flips in an episode."""
    bias: float = Field(0.5, ge=0, le=1)
    """Probability of heads."""
    sides: tuple[str, ...] = Field(("heads", "tails"), strict=False)
    """Names of the sides."""
    is_shown: bool = False
    """Show the result."""
    extra: JsonOption = Field(default_factory=dict)
    """Further settings as a JSON object."""


def build_coin(**options: Any) -> CoinOptions:
    """Return the options instead of an environment."""
    return CoinOptions.parse(options)


@pytest.fixture
def parse_options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that parses arguments and variables into options."""
    calls: list[tuple[Any, dict[str, Any], int]] = []
    monkeypatch.setattr(application, "run_server", lambda *call: calls.append(call))

    def parse_with_program(*arguments: str, **variables: str) -> tuple[Any, dict[str, Any]]:
        with monkeypatch.context() as context:
            for name, value in variables.items():
                context.setenv(name, value)
            ServerApplication(build_coin, CoinOptions, 8123).main(list(arguments))
        factory, server_options, port = calls.pop()
        assert port == 8123
        return factory(), server_options

    return parse_with_program


def test_flags_override_json_and_json_overrides_variables(parse_options: Any) -> None:
    variables = {
        "COIN_NUM_FLIPS": "1",
        "COIN_COIN_BIAS": "0.1",
        "COIN_OPTIONS": '{"is_shown": true}',
    }
    assert parse_options(**variables)[0] == CoinOptions(num_flips=1, bias=0.1, is_shown=True)
    arguments = ("--options", '{"num_flips": 2, "bias": 0.2}', "--bias", "0.3")
    options, _ = parse_options(*arguments, **variables)
    assert options == CoinOptions(num_flips=2, bias=0.3, is_shown=True)


def test_lists_switches_and_objects_are_parsed(parse_options: Any) -> None:
    arguments = ("--sides", "a", "b", "--is-shown", "--extra", '{"weight": 3}')
    options, _ = parse_options(*arguments, "--max-sessions", "2")
    assert options == CoinOptions(sides=("a", "b"), is_shown=True, extra={"weight": 3})
    assert parse_options(COIN_SIDES="x y")[0].sides == ("x", "y")
    assert parse_options("--no-is-shown", COIN_IS_SHOWN="true")[0].is_shown is False


def test_server_options_are_separate(parse_options: Any) -> None:
    assert parse_options("--port", "9")[1] == {"port": "9"}
    assert parse_options(MAX_CONCURRENT_ENVS="3")[1] == {"max_sessions": "3"}
    assert parse_options("--max-sessions", "4", MAX_CONCURRENT_ENVS="3")[1] == {"max_sessions": "4"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-flips", "many"], "num_flips: expected a valid integer, got 'many'"),
        (["--num-flips", "0"], "num_flips: expected at least 1, got '0'"),
        (["--options", "[]"], "--options must be a JSON object, got '[]'"),
        (["--options", '{"num_flip": 1}'], "unknown option 'num_flip'; did you mean 'num_flips'?"),
        (["--extra", "{"], "extra: expected a JSON object, got '{'"),
    ],
)
def test_invalid_values_exit_with_2(
    parse_options: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_options(*arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"num_flips": "3"}, {"num_flips": True}, {"bias": 2}])
def test_python_options_of_a_wrong_type_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        CoinOptions.parse(options)


def test_option_table_lists_every_option() -> None:
    lines = format_option_table(CoinOptions).splitlines()
    assert lines[2] == "| `num_flips` | `COIN_NUM_FLIPS` | `10` | Number of flips in an episode. |"
    assert lines[4] == "| `sides` | `COIN_SIDES` | `heads tails` | Names of the sides. |"
    assert len(lines) == 7
