"""`ludus init`: an example's configuration, copied for the user to change."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.services.cli.console import new_table, print_line, results_console

_PREFERRED = ("tiny.toml", "ppo.toml")
"""Configurations that train on a laptop; an example without one of them cannot be copied."""


def init(
    example: Annotated[str, typer.Argument(help="Name of the example. Default: list all.")] = "",
    output_dir: Annotated[Path, typer.Option(help="Folder to write to.")] = Path(),
) -> None:
    """Copy an example's configuration to NAME.toml, and its data and code to the same folder.

    Example: `ludus init blackjack && ludus train blackjack.toml`
    """
    examples = _find_examples()
    console = results_console()
    if not example:
        table = new_table("example", "description")
        for name, config in examples.items():
            table.add_row(name, _describe(config.read_text(encoding="utf-8")))
        console.print(table)
        return
    if example not in examples:
        raise NotFoundError(f"no example is named '{example}'; choose one of {', '.join(examples)}")
    written_paths = _copy_example(example, examples[example], output_dir)
    for path in written_paths:
        print_line(console, str(path))
    print_line(console, "")
    command = "train-reward" if example == "reward_model" else "train"
    print_line(console, f"ludus {command} {written_paths[0]}")


def _find_examples() -> dict[str, Path]:
    """Return the configuration of each packaged example, by the example's name."""
    spec = find_spec("ludus.examples")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    # An editable installation adds a placeholder that is not a folder.
    folders = [
        folder
        for location in locations
        if Path(location).is_dir()
        for folder in Path(location).iterdir()
    ]
    if not folders:
        raise NotFoundError("the examples are not installed; run: pip install ludus")
    configs: dict[str, Path] = {}
    for folder in sorted(folders):
        for config in (folder / name for name in _PREFERRED):
            if config.is_file():
                configs.setdefault(folder.name, config)
    return configs


def _describe(text: str) -> str:
    """Return the first sentence of the comment that opens a configuration."""
    comment = re.match(r"(?:#[^\n]*\n)+", text)
    words = re.sub(r"\n?# ?", " ", comment.group() if comment else "").split()
    return re.split(r"(?<=[.:]) ", " ".join(words), maxsplit=1)[0].rstrip(":")


def _copy_example(name: str, config: Path, output_dir: Path) -> list[Path]:
    """Write the configuration and the files it uses; return their paths, the configuration first.

    Raises:
        ConfigError: a file to be written exists.
    """
    text = config.read_text(encoding="utf-8")
    neighbors = [
        path
        for path in sorted(config.parent.iterdir())
        if path.suffix in (".jsonl", ".py") and path.stem in re.findall(r"\w+", text)
    ]
    text = re.sub(rf"examples/{name}/{config.name}", f"{name}.toml", text)
    text = re.sub(rf"examples[./]{name}[./]", "", text)
    text = re.sub(r'^name = ".*"', f'name = "{name}"', text, count=1, flags=re.MULTILINE)
    contents = {output_dir / f"{name}.toml": text}
    contents |= {output_dir / path.name: path.read_text(encoding="utf-8") for path in neighbors}
    for path in contents:
        if path.exists():
            raise ConfigError(f"'{path}' exists; remove it, or set --output-dir to another folder")
    output_dir.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        path.write_text(content, encoding="utf-8")
    return list(contents)
