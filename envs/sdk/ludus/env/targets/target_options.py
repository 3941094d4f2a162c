"""The options of any target, with their types and defaults."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.env.catalogue.importing import load_object
from ludus.env.catalogue.packages import find_options_type
from ludus.env.catalogue.registry import find_source
from ludus.env.options import Option, list_options, list_parameters


def list_target_options(target: str) -> Sequence[Option]:
    """Return the options of a target that exists; empty if they are not declared.

    A package declares them in its module `options`; a class or function by its parameters.
    """
    prefix, _, name = target.partition(":")
    source = find_source(prefix) if name else None
    if source is not None:
        return source.list_options(name)
    if name:
        return list_parameters(load_object(target, target))
    options_type = find_options_type(target)
    return list_options(options_type) if options_type is not None else []
