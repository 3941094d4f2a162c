"""The prefix `openspiel`: `openspiel:chess` is `openspiel_env` with `game = "chess"`."""

from __future__ import annotations

from collections.abc import Iterator

from ludus.env.catalogue.sources import CatalogueEntry, PackageTargets


class OpenSpielTargets(PackageTargets):
    """The games of OpenSpiel that can be played without parameters."""

    package = "openspiel_env"
    option = "game"

    def list_environments(self) -> Iterator[CatalogueEntry]:
        """Yield the registered games that the environment can play.

        Games written in Python are left out, because their import takes longer than the listing.
        """
        # The other users of this module do not need OpenSpiel.
        from .games import list_playable_games
        from .text import has_own_text

        for game_type in list_playable_games():
            yield CatalogueEntry(
                name=game_type.short_name,
                description=game_type.long_name,
                family="openspiel",
                text="readable" if has_own_text(game_type.short_name) else "raw",
                min_seats=game_type.min_num_players,
                max_seats=game_type.max_num_players,
            )
