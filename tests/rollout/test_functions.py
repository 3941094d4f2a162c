"""Functions that a configuration names: imported by their own name, or given with one."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ludus.proto.errors import ConfigError
from ludus.trainer import Trainer
from ludus.trainer.actors.sending import check_given_functions
from ludus.trainer.core import functions
from ludus.trainer.core.functions import given_functions, import_object, name_of, take_functions


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that was given nothing."""
    monkeypatch.setattr(functions, "_given", {})
    yield


def closure(value: float) -> Callable[..., Any]:
    def brevity(**_: Any) -> float:
        return value

    return brevity


def test_what_can_be_imported_has_its_own_name() -> None:
    assert name_of(json.dumps) == "json:dumps"
    assert import_object("json:dumps", "environment.rewards") is json.dumps
    assert given_functions() == {}


def test_what_cannot_is_given_a_name_which_it_keeps() -> None:
    first, second = closure(1.0), closure(2.0)
    assert [name_of(one) for one in (first, second, first)] == [
        "given:brevity",
        "given:brevity_2",
        "given:brevity",
    ]
    assert import_object("given:brevity_2", "environment.rewards") is second


def test_another_process_knows_what_it_took_and_names_what_it_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, sent = name_of(closure(1.0)), given_functions()
    monkeypatch.setattr(functions, "_given", {})
    with pytest.raises(ConfigError, match=r"environment.parse = 'given:brevity': .* handed"):
        import_object(path, "environment.parse")
    take_functions(sent)
    assert import_object(path, "environment.parse")() == 1.0


def test_a_function_that_cannot_be_sent_is_refused_and_forgotten() -> None:
    lock = threading.Lock()
    name_of(lambda **_: lock)
    name_of(closure(1.0))
    with pytest.raises(ConfigError, match=r"function 'given:lambda' goes to .* '_thread\.lock'"):
        check_given_functions()
    assert list(given_functions()) == ["given:brevity"]
    check_given_functions()


def test_a_configuration_may_hold_functions_where_a_file_names_them() -> None:
    rewards = [{}, closure(1.0), {"function": closure(2.0), "weight": 0.5, "name": "other"}]
    run = Trainer(
        {
            "environment": {
                "package": "openspiel_env",
                "rewards": [*rewards, math.fsum],
                "render": closure(3.0),
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
