"""Write the option tables of the environments' READMEs from their option models, or check them.

python dev/option_tables.py            write the tables
python dev/option_tables.py --check    exit with 1 if a table is stale
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ludus.env.options import EnvironmentOptions, format_option_table, list_options

ROOT = Path(__file__).parents[1]
TABLE_PATTERN = re.compile(r"(<!-- options -->\n).*?(<!-- /options -->)", re.DOTALL)


def find_option_models() -> Iterator[tuple[Path, type[EnvironmentOptions]]]:
    """Yield the README and the option model of every environment in the repository."""
    for readme in sorted(ROOT.glob("envs/*_env/README.md")):
        module = importlib.import_module(f"{readme.parent.name}.options")
        for _, model in inspect.getmembers(module, inspect.isclass):
            if issubclass(model, EnvironmentOptions) and model.__module__ == module.__name__:
                yield readme, model


def render_readme(text: str, options_type: type[EnvironmentOptions]) -> str:
    """Return the text of a README with a current option table."""
    table = f"{format_option_table(options_type)}\n"
    return TABLE_PATTERN.sub(lambda match: match[1] + table + match[2], text)


def main() -> None:
    """Write or check the table of every README."""
    for readme, options_type in find_option_models():
        text = readme.read_text(encoding="utf-8")
        if list_options(options_type) and not TABLE_PATTERN.search(text):
            sys.exit(f"error: {readme} has no <!-- options --> section")
        updated_text = render_readme(text, options_type)
        if "--check" not in sys.argv:
            readme.write_text(updated_text, encoding="utf-8")
        elif updated_text != text:
            sys.exit(f"error: {readme} is stale; run dev/option_tables.py")


if __name__ == "__main__":
    main()
