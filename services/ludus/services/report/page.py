"""The report page: one file that needs nothing else, in light and dark."""

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
    """The path of the report, written into the run's folder or to `output`.

    Raises:
        NotFoundError: the folder holds no run.
        ConfigError: the file cannot be written.
    """
    page = render_report(load_run_files(run_dir))
    return write_whole(output or run_dir / REPORT_FILE, page)


def render_report(run: RunFiles) -> str:
    """The page of a run, however far it came."""
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
    """A style sheet of this package; none of them holds a character that needs escaping."""
    return Markup("\n" + files(__package__).joinpath(name).read_text(encoding="utf-8"))


def write_whole(path: Path, content: str) -> Path:
    """The path, once the file stands there as a whole: never half-written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write '{path}': {error.strerror}; choose another place with --output"
        ) from None
    return path


def _content(run: RunFiles) -> list[Markup | None]:
    return [
        headline.header(run),
        headline.notices(run),
        headline.headline(run),
        sections.learning(run),
        sections.learned_policy(run),
        sections.policies(run),
        sections.training(run),
        sections.said(run),
        sections.details(run),
        join(element("footer", "Made by “ludus report” from the files of the run's folder.")),
    ]
