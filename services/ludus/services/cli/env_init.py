"""`ludus env init`: a new, working environment package to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.services.cli.console import print_line, results_console


def init(
    name: Annotated[str, typer.Argument(help="Name in lower case, for example grid_maze.")],
    output_dir: Annotated[Path, typer.Option(help="Folder to create the package in.")] = Path(),
) -> None:
    """Create an environment package, NAME_env, that can be played, served and trained on.

    Example: `ludus env init grid_maze`
    """
    from ludus.env.targets.scaffolding import write_environment

    written_paths = write_environment(name, output_dir)
    folder = min((path.parent for path in written_paths), key=lambda path: len(path.parts))
    console = results_console()
    for path in written_paths:
        print_line(console, str(path))
    package = folder.name
    print_line(console, "")
    print_line(console, f"pip install -e {folder}")
    print_line(console, f"ludus env check {package}")
    print_line(console, f"ludus env play {package}")
    print_line(console, f"ludus env bench {package}")
    print_line(console, f"ludus train {folder / 'train.toml'}")
    print_line(console, f"ludus env serve {package} --port 8000")
