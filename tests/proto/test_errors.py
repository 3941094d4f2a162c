"""Tests that errors keep their codes when they are sent or pickled."""

from __future__ import annotations

import pickle

import pytest

from ludus.proto.errors import ErrorCode, ExecutionError, SessionLostError, make_wire_error


@pytest.mark.parametrize("code", list(ErrorCode))
def test_code_and_message_are_preserved_over_the_wire(code: ErrorCode) -> None:
    error = make_wire_error(code.value, "a reason")
    assert (error.code, error.message) == (code, "a reason")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_error_survives_pickling(code: ErrorCode) -> None:
    error = make_wire_error(code.value, "a reason")
    error_copy = pickle.loads(pickle.dumps(error))
    assert (type(error_copy), error_copy.code, str(error_copy)) == (type(error), code, "a reason")


def test_unknown_code_becomes_an_execution_error() -> None:
    error = make_wire_error("TEAPOT", "short and stout")
    assert isinstance(error, ExecutionError)
    assert "TEAPOT" in str(error)


def test_openenv_session_error_becomes_a_session_lost_error() -> None:
    assert isinstance(make_wire_error("SESSION_ERROR", "gone"), SessionLostError)
