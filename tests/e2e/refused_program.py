"""Runs the trainer's command several times in one process.

Reads {name: arguments} as JSON, writes {name: [exit code, standard error]} as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from ludus.trainer.__main__ import main


def ended(arguments: list[str]) -> tuple[int, str]:
    """The exit code of the command and what it wrote to standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        return main(arguments), errors.getvalue()


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    json.dump({name: ended(arguments) for name, arguments in commands.items()}, sys.stdout)
