"""Environment packages by name: modules that end in `_env` and have `make_environment`."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from functools import partial

from ludus.env.environment import Environment
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, NotFoundError


def installed_packages() -> list[str]:
    """The names of the environment packages that can be imported here."""
    return sorted({m.name for m in pkgutil.iter_modules() if m.name.endswith("_env") and m.ispkg})


def environment_factory(package: str, options: JsonObject) -> Callable[[], Environment]:
    """What makes one environment of an installed package, built with `options`.

    Raises:
        NotFoundError: no such package.
        ConfigError: it is no environment package.
    """
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise ConfigError(
                f"environment package '{package}' needs '{error.name}', which is not installed"
            ) from error
        known = installed_packages()
        close = difflib.get_close_matches(package, known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"installed: {', '.join(known) or '-'}"
        raise NotFoundError(f"no environment package '{package}'; {hint}") from None
    make: Callable[..., Environment] | None = getattr(module, "make_environment", None)
    if make is None:
        raise ConfigError(
            f"'{package}' has no make_environment(**options); name an environment package"
        )
    return partial(_make, package, make, options)


def _make(package: str, make: Callable[..., Environment], options: JsonObject) -> Environment:
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(
            f"environment package '{package}' cannot be built with {options}: {error}"
        ) from error
