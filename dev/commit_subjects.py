"""Check the subjects of new commits: imperative, at most 72 characters, no full stop.

    python dev/commit_subjects.py [REVISION_RANGE]

The default range starts where the rule was introduced. A clone without that commit checks the
latest commit only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULE_COMMIT = "5e24f43ca749"
MAX_LENGTH = 72
_NON_VERB_PATTERN = re.compile(
    r"(The|A|An|Each|Every|All|Any|No|That|What|Where|Who|Whoever|When|How|This|These|Its|Of|In|On"
    r"|For|From|With|By|As|At|To|Two|Three|Some|[A-Z]\w*(?:ed|ing|ness|tion))\b"
)
_VERB_PATTERN = re.compile(r"(Bring|Ping)\b")
"""Verbs that end like nouns."""


def find_problem(subject: str) -> str | None:
    """Return the reason why a commit subject breaks the rule, or None."""
    if len(subject) > MAX_LENGTH:
        return f"has {len(subject)} characters; at most {MAX_LENGTH} are allowed"
    if subject.endswith("."):
        return "ends with a full stop"
    if not subject[:1].isupper():
        return "does not start with a capital letter"
    if _NON_VERB_PATTERN.match(subject) and not _VERB_PATTERN.match(subject):
        return "does not start with a verb in the imperative"
    return None


def choose_revisions() -> str:
    """Return the revision range of the commits to which the rule applies."""
    result = subprocess.run(
        ["git", "cat-file", "-e", f"{RULE_COMMIT}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    return f"{RULE_COMMIT}..HEAD" if result.returncode == 0 else "-1"


def main() -> int:
    """Print each subject that breaks the rule; the exit status is 1 if there is one."""
    revisions = sys.argv[1:] or [choose_revisions()]
    has_problem = False
    command = ["git", "log", "--no-merges", "--format=%h %s", *revisions]
    history = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line in history.splitlines():
        commit, _, subject = line.partition(" ")
        if problem := find_problem(subject):
            has_problem = True
            print(f"commit {commit} {problem}: {subject}")
    return int(has_problem)


if __name__ == "__main__":
    raise SystemExit(main())
