"""The report page: one self-contained file, in light and dark mode."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from ludus.proto.errors import ConfigError
from ludus.proto.runs import REPORT_FILE
from ludus.services.report import headline, sections
from ludus.services.report.markup import Markup, element, join
from ludus.services.report.run_files import RunFiles, load_run_files


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the report to `output`, by default into the run folder; return its path.

    Raises:
        NotFoundError: the folder contains no run.
        ConfigError: the file cannot be written.
    """
    page = render_report(load_run_files(run_dir))
    return write_atomically(output or run_dir / REPORT_FILE, page)


def render_report(run: RunFiles) -> str:
    """Render the page of a run, which may be unfinished."""
    return "<!doctype html>\n" + element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
            element("title", f"{run.name} · Ludus"),
            element("style", style_sheet("style.css"), style_sheet("page.css")),
        ),
        element("body", element("main", *_content(run))),
        lang="en",
    )


def style_sheet(name: str) -> Markup:
    """Read a style sheet of this package, which contains nothing to escape."""
    return Markup("\n" + files(__package__).joinpath(name).read_text(encoding="utf-8"))


def write_atomically(path: Path, content: str) -> Path:
    """Write a file atomically and return its path.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write '{path}': {error.strerror}; choose another path with --output"
        ) from None
    return path


def _content(run: RunFiles) -> list[Markup | None]:
    return [
        headline.render_header(run),
        headline.render_notices(run),
        headline.render_key_figures(run),
        sections.render_learning(run),
        sections.render_learned_policy(run),
        sections.render_policies(run),
        sections.render_training(run),
        sections.render_transcripts(run),
        sections.render_details(run),
        join(element("footer", "Written by “ludus report” from the files in the run folder.")),
    ]
