"""`ludus env list`: the catalogue of environments that can be named without writing code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ludus.proto.errors import NotFoundError, did_you_mean
from ludus.services.cli.console import (
    get_stderr,
    get_stdout,
    make_table,
    print_line,
    print_warning,
    write_json,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ludus.env.catalogue.sources import CatalogueEntry, TextLevel

_OTHER_TARGETS = "also: gymnasium:MODULE:ID, openenv:module:Class, openenv:module:app, module:Class"
_TEXT_LEVELS = ("readable", "raw", "none")


@dataclass(frozen=True, slots=True)
class _Filter:
    """Conditions that an entry must meet; "" and None set no condition."""

    words: Sequence[str]
    """Words in lower case that the target, description or family must contain."""
    family: str
    num_seats: int | None
    text: str

    @property
    def is_empty(self) -> bool:
        """True if every entry meets the conditions."""
        return not (self.words or self.family or self.num_seats or self.text)

    def accepts(self, entry: CatalogueEntry) -> bool:
        """Return True if an entry meets all conditions."""
        searched_text = f"{entry.target} {entry.description} {entry.family}".casefold()
        return (
            all(word in searched_text for word in self.words)
            and (not self.family or is_in_family(entry, self.family))
            and (not self.num_seats or entry.min_seats <= self.num_seats <= entry.max_seats)
            and (not self.text or entry.text == self.text)
        )


def is_in_family(entry: CatalogueEntry, family: str) -> bool:
    """Return True if an entry belongs to a family or to a part of the family."""
    return entry.family == family or entry.family.startswith(f"{family}/")


def _check_text_level(level: str) -> str:
    if level and level not in _TEXT_LEVELS:
        raise typer.BadParameter(f"must be one of {', '.join(_TEXT_LEVELS)}, got '{level}'")
    return level


_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TEXT]...",
        help="Words that the target, the description or the family must contain.",
        show_default=False,
    ),
]
_Family = Annotated[str, typer.Option(help="Family, for example gymnasium or gymnasium/toy_text.")]
_NumSeats = Annotated[
    int | None,
    typer.Option("--seats", min=1, help="Number of players, including the environment's own."),
]
_TextOption = Annotated[
    str,
    typer.Option(
        "--text",
        metavar="LEVEL",
        callback=_check_text_level,
        help="Text for language models: readable (written for the environment), raw (numbers "
        "or strings of a library) or none.",
    ),
]


def list_environments(
    text: _Words = None,
    family: _Family = "",
    num_seats: _NumSeats = None,
    text_level: _TextOption = "",
    prints_json: Annotated[
        bool, typer.Option("--json", help="Print the entries as JSON, not as a table.")
    ] = False,
) -> None:
    """List environments: the families with their sizes, or the entries that match.

    `ludus env show TARGET` describes an entry. Packages add entries with an entry point.

    Example: `ludus env list`

    Example: `ludus env list poker --seats 2`

    Example: `ludus env list --family gymnasium --text readable --json`
    """
    from ludus.env.catalogue.listing import read_catalogue

    catalogue = read_catalogue()
    for note in catalogue.notes:
        print_warning(get_stderr(), note)
    _require_family(family, catalogue.entries)
    words = [word.casefold() for argument in text or () for word in argument.split()]
    entry_filter = _Filter(words, family, num_seats, text_level)
    entries = [entry for entry in catalogue.entries if entry_filter.accepts(entry)]
    if prints_json:
        write_json(json.dumps([_to_json(entry) for entry in entries], indent=2))
        return
    if not entries and not entry_filter.is_empty:
        raise NotFoundError(_explain_no_entry(words, catalogue.entries))
    console = get_stdout()
    if not entries:
        print_line(console, "no environment package is installed; try: pip install 'ludus[envs]'")
    elif entry_filter.is_empty:
        console.print(_make_family_table(entries))
        print_line(
            console,
            f"{len(entries)} environments; `ludus env list TEXT` searches them, and"
            " `ludus env show TARGET` describes one",
        )
    else:
        console.print(_make_entry_table(entries))
    print_line(console, _OTHER_TARGETS, "dim")


def _require_family(family: str, entries: Sequence[CatalogueEntry]) -> None:
    if family and not any(is_in_family(entry, family) for entry in entries):
        families = sorted({part for entry in entries for part in _list_families(entry)})
        hint = did_you_mean(family, families) or f"choose one of {', '.join(families)}"
        raise NotFoundError(f"no environment is in the family '{family}'; {hint}")


def _list_families(entry: CatalogueEntry) -> Iterator[str]:
    yield entry.family
    yield entry.family.partition("/")[0]


def _explain_no_entry(words: Sequence[str], entries: Sequence[CatalogueEntry]) -> str:
    from ludus.env.catalogue.listing import suggest_targets

    hint = suggest_targets("_".join(words), entries) if words else ""
    for word in [] if hint else words:
        texts = (f"{entry.target} {entry.description}".casefold() for entry in entries)
        hint = did_you_mean(word, {part for text in texts for part in re.findall(r"[^\W_]+", text)})
    return f"no environment matches; {hint or '`ludus env list` prints the families'}"


def _to_json(entry: CatalogueEntry) -> dict[str, str | int]:
    fields = asdict(entry)
    del fields["name"], fields["prefix"]
    return {"target": entry.target, **fields}


def _make_family_table(entries: Sequence[CatalogueEntry]) -> Table:
    number_columns = ("environments", "readable text")
    table = make_table(
        "family", *number_columns, "for example", "needs", number_columns=number_columns
    )
    table.columns[0].no_wrap = table.columns[-2].no_wrap = True
    for family in dict.fromkeys(entry.family for entry in entries):
        members = [entry for entry in entries if entry.family == family]
        readable = [entry for entry in members if entry.text == "readable"]
        table.add_row(
            Text(family),
            str(len(members)),
            str(len(readable)),
            Text((readable or members)[0].target),
            Text(", ".join(dict.fromkeys(e.install_command for e in members if e.install_command))),
        )
    return table


def _make_entry_table(entries: Sequence[CatalogueEntry]) -> Table:
    has_needs = any(entry.install_command for entry in entries)
    table = make_table("target", "description", "seats", "text", *["needs"] * has_needs)
    for entry in entries:
        needs = [Text(entry.install_command)] if has_needs else []
        table.add_row(
            Text(entry.target),
            Text(entry.description),
            format_seats(entry),
            Text(format_text_level(entry.text)),
            *needs,
        )
    return table


def format_seats(entry: CatalogueEntry) -> str:
    """Return the number of players, for example "2" or "2 to 10"."""
    if entry.min_seats == entry.max_seats:
        return str(entry.min_seats)
    return f"{entry.min_seats} to {entry.max_seats}"


def format_text_level(level: TextLevel) -> str:
    """Return the kind of text for language models as a word or two."""
    return "no text" if level == "none" else level
