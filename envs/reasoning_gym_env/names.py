"""Names of the generators, read from the files of reasoning-gym, which is not imported.

reasoning_gym/arithmetic/chain_sum.py: DATASET_NAME = "chain_sum" --> ("chain_sum", "arithmetic")
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from ludus.proto.errors import ConfigError, NotFoundError, did_you_mean

INSTALL_COMMAND = "pip install 'ludus[reasoning-gym]'"
COMPOSITE = "composite"
"""Generator that draws from several others."""
_LIBRARY = "reasoning_gym"
_NAME_PATTERN = re.compile(r'^DATASET_NAME = "(\w+)"|^register_dataset\(\s*"(\w+)"', re.MULTILINE)


@functools.cache
def read_categories() -> Mapping[str, str]:
    """Return the category of each generator by its name, for example "arithmetic".

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None:
        raise ConfigError(f"reasoning-gym is not installed; {INSTALL_COMMAND}")
    categories = {}
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts
            for match in _NAME_PATTERN.finditer(path.read_text(encoding="utf-8")):
                categories[match[1] or match[2]] = parts[0] if len(parts) > 1 else "mixtures"
    return categories


def require_name(name: str) -> None:
    """Check that a generator exists.

    Raises:
        NotFoundError: The generator does not exist; the message suggests a similar name.
        ConfigError: reasoning-gym is not installed.
    """
    names = read_categories()
    if name not in names:
        hint = did_you_mean(name, names) or "`ludus env list reasoning_gym` prints all names"
        raise NotFoundError(f"reasoning-gym has no generator '{name}'; {hint}")
