"""The prefix `reasoning_gym`: `reasoning_gym:gcd` is `reasoning_gym_env` with `dataset = "gcd"`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ludus.env.catalogue.sources import CatalogueEntry, PackageTargets
from ludus.env.environment import Builder
from ludus.env.options import Option

from .generators import list_field_options, load_library
from .names import read_categories, require_name


class ReasoningGymTargets(PackageTargets):
    """The generators of reasoning-gym."""

    package = "reasoning_gym_env"
    option = "dataset"

    def make_builder(self, name: str) -> Builder:
        """Return a function that makes the environment of a generator from options.

        Raises:
            NotFoundError: The generator does not exist.
            ConfigError: reasoning-gym is not installed.
        """
        require_name(name)
        load_library()
        return super().make_builder(name)

    def list_environments(self) -> Iterator[CatalogueEntry]:
        """Yield the generators by the files of reasoning-gym, which is not imported.

        Raises:
            ConfigError: reasoning-gym is not installed.
        """
        for name, category in read_categories().items():
            yield CatalogueEntry(
                name=name,
                description=name.replace("_", " ").capitalize(),
                family=f"reasoning_gym/{category}",
                text="readable",
            )

    def list_options(self, name: str) -> Sequence[Option]:
        """Return the fields of the generator's configuration, then the package's options."""
        options = [option for option in super().list_options(name) if option.name != "config"]
        return [*list_field_options(name), *options]
