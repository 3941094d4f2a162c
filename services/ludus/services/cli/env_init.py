"""`ludus env init`: a new environment that works, to be changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.services.cli.console import results_console, say


def init(
    name: Annotated[str, typer.Argument(help="Lower-case words, for example grid_maze.")],
    output_dir: Annotated[Path, typer.Option(help="Where its folder is made.")] = Path(),
) -> None:
    """Write a new environment: a folder NAME_env that can be played, served and trained on.

    Example: `ludus env init grid_maze`
    """
    from ludus.env.targets.scaffolding import write_environment

    written = write_environment(name, output_dir)
    folder = min((path.parent for path in written), key=lambda path: len(path.parts))
    console = results_console()
    for path in written:
        say(console, str(path))
    package = folder.name
    say(console, "")
    say(console, f"pip install -e {folder}")
    say(console, f"ludus env check {package}")
    say(console, f"ludus env play {package}")
    say(console, f"ludus env bench {package}")
    say(console, f"ludus train {folder / 'train.toml'}")
    say(console, f"ludus env serve {package} --port 8000")
