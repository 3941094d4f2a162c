"""`ludus init`: copies an example's configuration, for the user to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import expand_home
from ludus.services.cli.console import get_stdout, make_table, print_line
from ludus.services.cli.examples import extract_description, find_laptop_config, require_examples


def init(
    example: Annotated[str, typer.Argument(help="Name of the example. Default: list all.")] = "",
    output_dir: Annotated[
        Path, typer.Option(help="Folder to write to.", callback=expand_home)
    ] = Path(),
) -> None:
    """Copy an example's configuration to NAME.toml, and its data and code to the same folder.

    Example: `ludus init blackjack && ludus train blackjack.toml`
    """
    examples = _find_examples()
    console = get_stdout()
    if not example:
        table = make_table("example", "description")
        for name, config in examples.items():
            table.add_row(name, extract_description(config.read_text(encoding="utf-8")))
        console.print(table)
        return
    if example not in examples:
        raise NotFoundError(f"no example is named '{example}'; choose one of {', '.join(examples)}")
    paths = _copy_example(example, examples[example], output_dir)
    command = "train-reward" if example == "reward_model" else "train"
    for line in (*paths, "", f"ludus {command} {paths[0]}"):
        print_line(console, str(line))


def _find_examples() -> dict[str, Path]:
    """Return the configuration of each packaged example, by the example's name."""
    configs = {folder.name: find_laptop_config(folder) for folder in require_examples()}
    return {name: config for name, config in configs.items() if config is not None}


def _copy_example(name: str, config: Path, output_dir: Path) -> list[Path]:
    """Copy a configuration and the files that it uses; return the new paths, configuration first.

    Raises:
        ConfigError: a file to be written exists.
    """
    config_text = config.read_text(encoding="utf-8")
    used_files = [
        path
        for path in sorted(config.parent.iterdir())
        if path.suffix in (".jsonl", ".py") and path.stem in re.findall(r"\w+", config_text)
    ]
    config_text = re.sub(rf"examples/{name}/{config.name}", f"{name}.toml", config_text)
    config_text = re.sub(rf"examples[./]{name}[./]", "", config_text)
    config_text = re.sub(r'(?m)^name = ".*"', f'name = "{name}"', config_text, count=1)
    texts = {output_dir / f"{name}.toml": config_text}
    texts |= {output_dir / path.name: path.read_text(encoding="utf-8") for path in used_files}
    for path in texts:
        if path.exists():
            raise ConfigError(f"'{path}' exists; remove it, or set --output-dir to another folder")
    output_dir.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)
