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
RULE_INTRODUCED = "5e24f43ca749"
MAX_LENGTH = 72
_NOT_A_VERB = re.compile(
    r"(The|A|An|Each|Every|All|Any|No|That|What|Where|Who|Whoever|When|How|This|These|Its|Of|In|On"
    r"|For|From|With|By|As|At|To|Two|Three|Some|[A-Z]\w*(?:ed|ing|ness|tion))\b"
)


def subject_problem(subject: str) -> str | None:
    """Return the reason why a commit subject breaks the rule, or None."""
    if len(subject) > MAX_LENGTH:
        return f"has {len(subject)} characters; at most {MAX_LENGTH} are allowed"
    if subject.endswith("."):
        return "ends with a full stop"
    if not subject[:1].isupper():
        return "does not start with a capital letter"
    if _NOT_A_VERB.match(subject):
        return "does not start with a verb in the imperative"
    return None


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def new_commits() -> str:
    """Return the revision range of the commits to which the rule applies."""
    result = subprocess.run(
        ["git", "cat-file", "-e", f"{RULE_INTRODUCED}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    return f"{RULE_INTRODUCED}..HEAD" if result.returncode == 0 else "-1"


def main() -> int:
    """Print each subject that breaks the rule; the exit status is 1 if there is one."""
    revisions = sys.argv[1:] or [new_commits()]
    failed = False
    for line in _git("log", "--no-merges", "--format=%h %s", *revisions).splitlines():
        commit, _, subject = line.partition(" ")
        if problem := subject_problem(subject):
            failed = True
            print(f"commit {commit} {problem}: {subject}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
