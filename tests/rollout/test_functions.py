"""Tests of functions in configurations: imported by path or registered by name."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.proto.errors import ConfigError
from ludus.trainer import Trainer
from ludus.trainer.actors.cluster import check_sendable_functions
from ludus.trainer.core.functions import (
    copy_registered_functions,
    get_or_register_path,
    import_callable,
    register_functions,
    unregister_function,
)


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    """Clear the registry before each test and restore it afterwards."""
    previous_functions = copy_registered_functions()
    clear_registry()
    yield
    clear_registry()
    register_functions(previous_functions)


def clear_registry() -> None:
    for path in copy_registered_functions():
        unregister_function(path)


def make_reward_function(reward: float) -> Callable[..., Any]:
    def brevity(**_: Any) -> float:
        return reward

    return brevity


def test_importable_function_is_named_by_import_path() -> None:
    assert get_or_register_path(json.dumps) == "json:dumps"
    assert import_callable("json:dumps", "environment.rewards") is json.dumps
    assert copy_registered_functions() == {}


@pytest.mark.parametrize(
    ("code", "path", "message"),
    [
        (
            "def score(): ...",
            "my_rules:scroe",
            r"'my_rules' has no callable 'scroe'; did you mean 'sc",
        ),
        ("def score(): ...", "my_rules:x", r"has no callable 'x'; see '.*my_rules\.py'"),
        (
            "",
            "my_ruls:score",
            r"no module 'my_ruls' in the working folder '.*'.*; did you mean 'my_rules'",
        ),
        (
            "",
            "no_module_x.y:f",
            r"no module 'no_module_x' in .*start in the folder that contains it",
        ),
        (
            "def score()",
            "my_rules:score",
            r"SyntaxError: expected ':' \('.*my_rules\.py', line 1\)",
        ),
        (
            "\nx = y",
            "my_rules:score",
            r"NameError: .*'y' is not defined \('.*my_rules\.py', line 2\)",
        ),
        ("import no_module_y", "my_rules:score", r"cannot import 'my_rules': .*'no_module_y'"),
    ],
)
def test_function_that_cannot_be_imported_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, path: str, message: str
) -> None:
    (tmp_path / "my_rules.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    with pytest.raises(ConfigError, match=rf"^environment\.rewards = '{path}': .*{message}"):
        import_callable(path, "environment.rewards")


def test_local_function_gets_a_unique_stable_name() -> None:
    first_function, second_function = make_reward_function(1.0), make_reward_function(2.0)
    functions = (first_function, second_function, first_function)
    assert [get_or_register_path(function) for function in functions] == [
        "given:brevity",
        "given:brevity_2",
        "given:brevity",
    ]
    assert import_callable("given:brevity_2", "environment.rewards") is second_function


def test_other_process_finds_only_registered_functions() -> None:
    path, sent_functions = (
        get_or_register_path(make_reward_function(1.0)),
        copy_registered_functions(),
    )
    clear_registry()
    with pytest.raises(ConfigError, match=r"environment.parse = 'given:brevity': .* passed"):
        import_callable(path, "environment.parse")
    register_functions(sent_functions)
    assert import_callable(path, "environment.parse")() == 1.0


def test_unserializable_function_is_rejected_and_unregistered() -> None:
    lock = threading.Lock()
    get_or_register_path(lambda **_: lock)
    get_or_register_path(make_reward_function(1.0))
    with pytest.raises(ConfigError, match=r"'given:lambda' cannot be sent .* '_thread\.lock'"):
        check_sendable_functions()
    assert list(copy_registered_functions()) == ["given:brevity"]
    check_sendable_functions()


def test_configuration_accepts_functions_instead_of_paths() -> None:
    rewards = [
        {},
        make_reward_function(1.0),
        {"function": make_reward_function(2.0), "weight": 0.5, "name": "other"},
    ]
    run = Trainer(
        {
            "environment": {
                "package": "openspiel_env",
                "rewards": [*rewards, math.fsum],
                "render": make_reward_function(3.0),
                "parse": json.loads,
            }
        },
        overrides=["training.num_steps=7"],
    ).run
    [environment] = run.environments.values()
    assert [(term.function, term.weight, term.name) for term in environment.rewards] == [
        (None, 1.0, None),
        ("given:brevity", 1.0, "brevity"),
        ("given:brevity_2", 0.5, "other"),
        ("math:fsum", 1.0, "fsum"),
    ]
    assert (environment.render, environment.parse) == ("given:brevity_3", "json:loads")
    assert run.training.num_steps == 7
