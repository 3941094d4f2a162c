"""A wrapper that reports environments of Gym's old interface in one sentence."""

from __future__ import annotations

import numbers
from typing import Any, SupportsFloat

import gymnasium

from ludus.proto.errors import ExecutionError

AnyGymnasiumEnv = gymnasium.Env[Any, Any]


class InterfaceCheck(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that checks the arguments and the results of `reset` and `step`."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return the first observation and the info.

        Raises:
            ExecutionError: the environment has another interface.
        """
        try:
            result: Any = self.env.reset(seed=seed, options=options)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise self._make_error("reset must accept seed and options", str(error)) from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise self._make_error("reset must return (observation, info)", _shorten(result))
        return result

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Return the result of an action.

        Raises:
            ExecutionError: the environment has another interface.
        """
        expectation = "step must return (observation, reward, terminated, truncated, info)"
        try:
            result: Any = self.env.step(action)
        except ValueError as error:  # a wrapper of Gymnasium cannot unpack the result
            if "values to unpack" not in str(error):
                raise
            raise self._make_error(expectation, str(error)) from error
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            raise self._make_error(expectation, _shorten(result))
        if not isinstance(result[1], numbers.Real) and not hasattr(result[1], "__float__"):
            raise self._make_error("the reward of step must be a number", _shorten(result[1]))
        return result

    def _make_error(self, expectation: str, problem: str) -> ExecutionError:
        name = type(self.unwrapped).__name__
        return ExecutionError(
            f"{name}: {expectation}, got {problem}; port the environment from Gym to Gymnasium, or "
            "wrap it with shimmy.GymV21CompatibilityV0"
        )


def _shorten(value: Any) -> str:
    return f"{value!r:.100}"
