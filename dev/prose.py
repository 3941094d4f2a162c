"""Find English and names that break the rules in AGENTS.md.

    python dev/prose.py [PATH ...]        findings, one per line: file:line: rule: text
    python dev/prose.py --count [PATH ...]

Rules:

    opening      a docstring or comment opens with a What/Why/How/Where clause or a preposition
    verb         a function's docstring opens with a noun instead of a verb
    word         prose contains a banned word
    name         an identifier is banned
    class        two public classes of the repository share a name
    underscore   two functions of a package differ by a leading underscore only
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCTION = ("proto", "envs", "services", "trainer")
"""Folders whose classes, functions and docstrings users and colleagues read as an interface."""

OPENING = re.compile(
    r"(What|Why|How|Where|Of|With|That|Its|Whether|Whoever|Whose|Which|Before|On|Beside|Nothing"
    r"|Nobody|Somebody|One that|One of|Those|Theirs|Ours|As many)\b"
)
NOUN_OPENING = re.compile(
    r"(The|A|An|Each|Every|Everything|All|Any|Both|No|None|Another|Its|This|These|Some|Two|Three"
    r"|How|True|False|Names?|Texts?|Seconds|Bytes|Numbers?)\b(?! is (?:called|run|used))"
)
BANNED_WORDS: dict[str, str] = {
    r"whoever|nobody|somebody|whosever": "name the component",
    r"anew": "again, from the start",
    r"go(?:es)? on|going on|went on": "continue, resume",
    r"of (?:its|their|one's|our|your|his|her) own": "own, separate, custom",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"commonest|likelier|unlikelier|unlikeliest|likeliest": "most common, more likely",
    r"as many|equally many|just as many": "the same number of",
    r"any more": "no longer",
    r"shall": "must, will",
    r"beside": "next to, in addition to, compared with",
    r"told|was said|is said|are said|were said": "shown, reported, given",
    r"for ever": "forever, indefinitely",
    r"stands? still|stood still": "is paused",
    r"it came to|they came to|came to nothing|came to be": "name the result",
    r"in the place of|in its place|in their place": "instead of",
    r"once more": "again",
    r"by itself|by themselves": "alone, automatically",
    r"look(?:s|ed)? at all": "check",
    r"unheard|in spite of|of no account|thereby|therein|thereof|whereby|wherein": "plain words",
    r"kin": "related",
}
BANNED_NAMES = frozenset(
    """
    one own of at mine theirs ours none nothing nobody there apart before after aside found known
    left said told asked held begun taken wanted given dealt most least more less others another
    everything anything whole beside within without already away around here why how what who whom
    whose which where anew once place places
    """.split()  # noqa: SIM905
)
BANNED_NAME_PARTS = re.compile(
    r"^_*(of|why|what|how|whoever|told|said|asked)_|_(of|where|said|told|asked|anew|apart|beside)$"
    r"|^_*(go_on|in_words|told_as|way_on)$"
)
PAST_PARTICIPLE = re.compile(
    r"^_*(?!feed|embed|need|seed|proceed|exceed|succeed|shed|bed|round|sound|speed|bound)"
    r"[a-z]+(ed|ilt|ound|oken|osen|riven|awn|itten)$"
)
MIN_WORDS_OF_MESSAGE = 3
EXCEPTIONS: dict[str, str] = {
    "docs/glossary.md: word: 'told' (shown, reported, given)": "names the word to avoid",
    "docs/glossary.md: word: 'go on' (continue, resume)": "names the word to avoid",
    "envs/math_env/models.py: name: left": "a field of the observation that clients read",
    "envs/uno_env/models.py: name: others": "a field of the observation that clients read",
    "tests/house/test_prose.py: word: 'anew' (again, from the start)": "an input of the test",
    "tests/house/test_prose.py: word: 'nobody' (name the component)": "an input of the test",
    "trainer/ludus/trainer/compat/forge/training.py: class: GRPOTrainer": "a name of Forge",
    "trainer/ludus/trainer/compat/trl/trainer.py: class: GRPOTrainer": "a name of TRL",
}
"""Findings that stay, as "path: rule: text", each with its reason."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place that breaks a rule."""

    path: str
    line: int
    rule: str
    text: str

    @property
    def key(self) -> str:
        """The finding without its line, as `EXCEPTIONS` names it."""
        return f"{self.path}: {self.rule}: {self.text}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


_WORDS = [
    (re.compile(rf"\b(?:{words})\b", re.IGNORECASE), advice)
    for words, advice in BANNED_WORDS.items()
]


def find_words(path: str, line: int, text: str) -> Iterator[Finding]:
    """Yield a finding for each banned word in prose that starts at `line`."""
    for pattern, advice in _WORDS:
        for match in pattern.finditer(text):
            offset = text.count("\n", 0, match.start())
            yield Finding(path, line + offset, "word", f"{match.group().lower()!r} ({advice})")


def find_in_markdown(path: str, text: str) -> Iterator[Finding]:
    """Yield findings in a Markdown file, outside code blocks and inline code."""
    prose = re.sub(r"^```.*?^```", _blank_out, text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", _blank_out, prose)
    yield from find_words(path, 1, prose)


def _blank_out(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


class PythonFile:
    """The prose and the names of one Python file."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self._text = text
        self._tree = ast.parse(text)
        self._docstrings: set[int] = set()
        self._is_production = path.split("/")[0] in PRODUCTION

    def findings(self) -> Iterator[Finding]:
        """Yield every finding of the rules that look at one file alone."""
        yield from self._check_docstrings()
        yield from self._check_comments()
        yield from self._check_messages()
        yield from self._check_names()

    def _check_docstrings(self) -> Iterator[Finding]:
        for owner in ast.walk(self._tree):
            body = getattr(owner, "body", None)
            if not isinstance(body, list):
                continue
            for index, node in enumerate(body):
                if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                    continue
                if not isinstance(node.value.value, str):
                    continue
                self._docstrings.add(id(node.value))
                text = node.value.value
                yield from find_words(self.path, node.lineno, text)
                opening = text.strip().split("\n")[0]
                if OPENING.match(opening):
                    yield Finding(self.path, node.lineno, "opening", opening)
                elif (
                    index == 0
                    and self._is_production
                    and _needs_verb(owner)
                    and NOUN_OPENING.match(opening)
                ):
                    yield Finding(self.path, node.lineno, "verb", opening)

    def _check_comments(self) -> Iterator[Finding]:
        previous = -2
        for token in tokenize.generate_tokens(io.StringIO(self._text).readline):
            if token.type != tokenize.COMMENT:
                continue
            line, text = token.start[0], token.string.lstrip("#: ")
            yield from find_words(self.path, line, text)
            if line != previous + 1 and OPENING.match(text):
                yield Finding(self.path, line, "opening", text)
            previous = line

    def _check_messages(self) -> Iterator[Finding]:
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Constant) or id(node) in self._docstrings:
                continue
            if isinstance(node.value, str) and len(node.value.split()) >= MIN_WORDS_OF_MESSAGE:
                yield from find_words(self.path, node.lineno, node.value)

    def _check_names(self) -> Iterator[Finding]:
        seen_names: set[str] = set()
        for name, line, is_function in _iterate_names(self._tree):
            if name in seen_names:
                continue
            seen_names.add(name)
            bare_name = name.strip("_")
            if (
                bare_name in BANNED_NAMES
                or BANNED_NAME_PARTS.search(name)
                or (is_function and PAST_PARTICIPLE.match(name))
            ):
                yield Finding(self.path, line, "name", name)

    def list_public_classes(self) -> Iterator[tuple[str, int]]:
        """Yield the name and line of each public class at the top of the module."""
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, node.lineno

    def list_functions(self) -> Iterator[tuple[str, int]]:
        """Yield the name and line of each function at the top of the module."""
        for node in self._tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, node.lineno


def _needs_verb(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    return not decorators & {"property", "cached_property", "setter", "computed_field"}


def _iterate_names(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Yield each name that a file binds, its line, and whether it is a function or method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, _needs_verb(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.lineno, False
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno, False


def list_tracked_files(paths: Iterable[str] = ()) -> list[str]:
    """Return the hand-written Python and Markdown files under `paths`, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    file_list = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [
        name
        for name in file_list.split("\n")
        if name.endswith((".py", ".md")) and "_pb2" not in name and (ROOT / name).exists()
    ]


def find_shared_classes(files: Iterable[PythonFile]) -> Iterator[Finding]:
    """Yield a finding for each public class that shares its name with another public class."""
    classes_by_name: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for file in files:
        for name, line in file.list_public_classes():
            classes_by_name[name].append((file.path, line))
    for name, locations in classes_by_name.items():
        for path, line in locations if len(locations) > 1 else ():
            yield Finding(path, line, "class", name)


def find_underscore_twins(files: Iterable[PythonFile]) -> Iterator[Finding]:
    """Yield a finding for each private function with the name of a public one of its package."""
    packages: dict[Path, dict[str, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for name, line in file.list_functions():
            packages[Path(file.path).parent][name].append((file.path, line))
    for list_functions in packages.values():
        for name, definitions in list_functions.items():
            if name.startswith("_") and name.lstrip("_") in list_functions:
                for path, line in definitions:
                    yield Finding(path, line, "underscore", name)


def find_all(paths: Iterable[str] = ()) -> list[Finding]:
    """Return every finding under `paths`, exceptions left out."""
    findings: list[Finding] = []
    production: list[PythonFile] = []
    for path in list_tracked_files(paths):
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".md"):
            findings += find_in_markdown(path, text)
            continue
        if path == "dev/prose.py":
            continue
        file = PythonFile(path, text)
        findings += file.findings()
        if path.split("/")[0] in PRODUCTION:
            production.append(file)
    findings += find_shared_classes(production)
    findings += find_underscore_twins(production)
    return sorted(finding for finding in findings if finding.key not in EXCEPTIONS)


def main() -> int:
    """Print the findings or their counts; the exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description="Find prose and names that break the rules.")
    parser.add_argument("paths", nargs="*", help="Files or folders to check. Default: all.")
    parser.add_argument("--count", action="store_true", help="Print the number per rule only.")
    options = parser.parse_args()
    findings = find_all(options.paths)
    if options.count:
        for rule, count in sorted(Counter(finding.rule for finding in findings).items()):
            print(f"{rule:12}{count}")
    else:
        print("\n".join(map(str, findings)))
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
