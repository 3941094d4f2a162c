"""Options of environments, and messages about invalid values."""

from ludus.env.options.model import (
    EnvironmentOptions,
    JsonOption,
    Option,
    list_options,
    option_table,
    variable_name,
)
from ludus.env.options.validation import explain

__all__ = [
    "EnvironmentOptions",
    "JsonOption",
    "Option",
    "explain",
    "list_options",
    "option_table",
    "variable_name",
]
