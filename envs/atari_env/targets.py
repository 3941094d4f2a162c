"""The prefix `atari`: `atari:pong` is `atari_env` with `game = "pong"`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from ludus.env.catalogue.sources import CatalogueEntry, PackageTargets
from ludus.proto.errors import ConfigError

from .game_texts import has_own_text

_EMULATOR = "ale_py"
_ROM_FOLDER = "roms"


class AtariTargets(PackageTargets):
    """The games that ale-py contains."""

    package = "atari_env"
    option = "game"

    def list_environments(self) -> Iterator[CatalogueEntry]:
        """Yield the games by the files of ale-py, which is not imported.

        Raises:
            ConfigError: ale-py is not installed.
        """
        spec = importlib.util.find_spec(_EMULATOR)
        if spec is None:
            raise ConfigError(
                "the games need the Arcade Learning Environment, which is not installed;"
                " pip install 'ludus[atari]' (ale-py and its games are under the GPL-2.0)"
            )
        for folder in spec.submodule_search_locations or ():
            for path in sorted((Path(folder) / _ROM_FOLDER).glob("*.bin")):
                yield CatalogueEntry(
                    name=path.stem,
                    description=path.stem.replace("_", " ").title(),
                    family="atari",
                    text="readable" if has_own_text(path.stem) else "raw",
                )
