"""Errors keep their code across wires and processes."""

from __future__ import annotations

import pickle

import pytest

from ludus.proto.errors import ErrorCode, ExecutionError, SessionLostError, error_from_wire


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_comes_back_from_the_wire_with_its_code(code: ErrorCode) -> None:
    error = error_from_wire(code.value, "why")
    assert (error.code, error.message) == (code, "why")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_an_error_survives_pickling(code: ErrorCode) -> None:
    error = error_from_wire(code.value, "why")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.code, str(copy)) == (type(error), code, "why")


def test_an_unknown_code_is_an_execution_error_that_names_it() -> None:
    error = error_from_wire("TEAPOT", "short and stout")
    assert isinstance(error, ExecutionError)
    assert "TEAPOT" in str(error)


def test_openenv_session_errors_mean_that_the_session_is_lost() -> None:
    assert isinstance(error_from_wire("SESSION_ERROR", "gone"), SessionLostError)
