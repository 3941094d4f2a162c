"""Check of functions before they are sent to the run's processes by value."""

from __future__ import annotations

from ray import cloudpickle

from ludus.proto.errors import ConfigError
from ludus.trainer.core.functions import registered_functions, unregister_function


def check_sendable_functions() -> None:
    """Check that all registered functions can be sent.

    Raises:
        ConfigError: a function cannot be sent. It is unregistered, so that the next run of a
            notebook can register a new one.
    """
    for path, function in registered_functions().items():
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # pickling raises any class
            unregister_function(path)
            raise ConfigError(
                f"function '{path}' cannot be sent to the run's processes: {error}; create the "
                "objects that it refers to inside the function, or import the function from a "
                "module"
            ) from error
