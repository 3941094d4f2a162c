"""Hooks of the documentation site: links that leave `docs/`, and the pages outside it.

mkdocs checks links between pages of `docs/`. Pages also link to files of the repository, which the
site does not contain: such a link becomes the file's path, and a file that does not exist fails
the build. So does a broken link in a Markdown file outside `docs/`.
"""

from __future__ import annotations

import logging
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```\w+) +\w+$", re.MULTILINE)
"""Start of a code block with a name for tests, which the renderer of the site does not support."""
_log = logging.getLogger("mkdocs.site_hooks")


def on_pre_build(config: Any) -> None:
    """Check the links of the Markdown files outside `docs/`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    file_list = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in file_list.splitlines():
        path = ROOT / name
        if not path.is_file() or path.is_relative_to(config["docs_dir"]):
            continue
        for _, target, _ in _LINK.findall(path.read_text(encoding="utf-8")):
            if "://" not in target and not (path.parent / target).exists():
                _log.warning("%s links to '%s', which does not exist", name, target)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace links to files outside `docs/` by their paths, and remove names of code blocks."""
    docs = Path(config["docs_dir"])
    source = docs / page.file.src_uri

    def replace_link(match: re.Match[str]) -> str:
        text, target, _ = match.groups()
        path = (source.parent / target).resolve()
        if "://" in target or target.startswith("mailto:") or path.is_relative_to(docs):
            return match.group()
        if not path.exists():
            _log.warning("%s links to '%s', which does not exist", page.file.src_uri, target)
        name = path.relative_to(ROOT).as_posix()
        return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"

    return _LINK.sub(replace_link, _FENCE.sub(r"\1", markdown))
