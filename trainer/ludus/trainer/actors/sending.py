"""Functions of a program, looked at before they travel to the run's processes by value."""

from __future__ import annotations

from ray import cloudpickle

from ludus.proto.errors import ConfigError
from ludus.trainer.core.functions import registered_functions, unregister_function


def check_given_functions() -> None:
    """Check that all functions that this process was given can be sent.

    Raises:
        ConfigError: one cannot. It is forgotten, so that a notebook's next run is asked anew.
    """
    for path, function in registered_functions().items():
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # what pickles raises classes of its own
            unregister_function(path)
            raise ConfigError(
                f"function '{path}' goes to the run's processes by value, and cannot: {error}; "
                "make what it refers to within the function, or import the function from a module"
            ) from error
