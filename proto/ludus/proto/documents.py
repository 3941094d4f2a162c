"""Configuration documents in TOML, YAML or JSON, parsed with limits.

A short document can have a huge meaning, such as a YAML file whose aliases repeat each other, and a
deeply nested document exceeds the recursion limit of parsers and of everything after them. So the
size, the depth and the number of values are limited before a parser builds the values.

This module does not import the configuration, so it loads fast.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_TEXT_BYTES = 1_048_576
"""Maximum size of a TOML or YAML document, whose parsers are slow."""
MAX_JSON_BYTES = 16_777_216
MAX_DEPTH = 64
"""Maximum number of sections and lists inside each other."""
MAX_VALUES = 200_000
"""Maximum number of keys and values, with a repeated alias counted each time."""
_MAX_INTEGER_BITS = 128
"""Maximum size of an integer. Fields have smaller limits, and their errors name the field."""
_MAX_YAML_NUMBER_CHARS = 400
_YAML_PREFIX = "tag:yaml.org,2002:"
_YAML_NUMBER_TAGS = {f"{_YAML_PREFIX}{name}" for name in ("int", "float")}
_YAML_TAGS_WITHOUT_JSON = {f"{_YAML_PREFIX}{name}" for name in ("binary", "omap", "pairs", "set")}
"""Tags of values that a configuration cannot contain, because JSON has no such values."""
_TOML_KEY = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.){0,200}+"|'[^'\n]*+')"""
_LONG_TOML_KEY = re.compile(
    rf"""(?<![\w.'"-]){_TOML_KEY}(?:[ \t]*+\.[ \t]*+{_TOML_KEY}){{{MAX_DEPTH}}}"""
)
"""A dotted key with too many parts, for which tomllib needs quadratic time."""


_SURROGATE = re.compile("[\ud800-\udfff]")


class DocumentError(ValueError):
    """A text that is not a document of its format."""


class DocumentLimitError(DocumentError):
    """A document that exceeds a limit; the message contains no part of the document."""


def read_document(path: Path) -> Any:
    """Read and parse a file whose suffix is .toml, .yaml, .yml or .json.

    Raises:
        DocumentError: the file is not a document of its format, or exceeds a limit.
        OSError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in _PARSERS:
        raise DocumentError(f"expected a .toml, .yaml or .json file, got '{suffix}'")
    max_bytes = MAX_JSON_BYTES if suffix == ".json" else MAX_TEXT_BYTES
    return _PARSERS[suffix](_read_text(path, max_bytes))


def read_toml(path: Path) -> dict[str, Any]:
    """Read and parse a TOML file with any suffix; see `read_document`."""
    return parse_toml(_read_text(path, MAX_TEXT_BYTES))


def read_yaml(path: Path) -> Any:
    """Read and parse a YAML file with any suffix; see `read_document`."""
    return parse_yaml(_read_text(path, MAX_TEXT_BYTES))


def _read_text(path: Path, max_bytes: int) -> str:
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DocumentLimitError(f"it has more than {max_bytes:,} bytes; shorten it")
    try:
        return content.decode("utf-8-sig")  # some editors begin files with a byte-order mark
    except UnicodeDecodeError as error:
        raise DocumentError(str(error)) from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        DocumentError: the text is not TOML, or exceeds a limit.
    """
    if _LONG_TOML_KEY.search(text):
        raise _make_depth_error()
    try:
        tree: dict[str, Any] = _parse(tomllib.loads, text, tomllib.TOMLDecodeError)
    except DocumentError as error:
        if str(error).startswith("Invalid value"):
            raise DocumentError(f"{error}; text must be in quotes") from error
        raise
    check_limits(tree)
    return tree


def parse_json(text: str) -> Any:
    """Parse a JSON document.

    Raises:
        DocumentError: the text is not JSON, or exceeds a limit.
    """
    tree = _parse(json.loads, text, json.JSONDecodeError)
    check_limits(tree)
    return tree


def parse_yaml(text: str) -> Any:
    """Parse a YAML document. Aliases may repeat values, but not contain themselves.

    Raises:
        DocumentError: the text is not YAML, or exceeds a limit.
    """
    documents = parse_yaml_documents(text)
    if len(documents) > 1:
        raise DocumentError(f"it must contain one YAML document, got {len(documents)}")
    return documents[0] if documents else None


def parse_yaml_documents(text: str) -> list[Any]:
    """Parse all YAML documents of a text; see `parse_yaml`."""
    import yaml

    class Loader(yaml.CSafeLoader):
        """A loader that refuses long numbers, for which PyYAML needs quadratic time."""

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            if node.tag in _YAML_TAGS_WITHOUT_JSON:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the tag {node.tag} is not supported", node.start_mark
                )
            is_number = node.tag in _YAML_NUMBER_TAGS
            if is_number and len(str(node.value)) > _MAX_YAML_NUMBER_CHARS:
                raise _make_number_error()
            return super().construct_object(node, deep)

    try:
        _check_yaml_events(yaml.parse(text, Loader))
    except yaml.YAMLError as error:
        raise DocumentError(str(error)) from error
    documents: list[Any] = _parse(
        lambda text: list(yaml.load_all(text, Loader)), text, yaml.YAMLError
    )
    for document in documents:
        check_limits(document)
    return documents


def check_limits(tree: object) -> None:
    """Check the depth, the number of values, the integers and the texts of a parsed document.

    Raises:
        DocumentLimitError: the document exceeds a limit.
    """
    levels: list[Iterator[object]] = [iter((tree,))]
    num_values = 0
    while levels:
        for value in levels[-1]:
            num_values += 1 + (len(value) if isinstance(value, Mapping) else 0)
            if num_values > MAX_VALUES:
                raise _make_count_error()
            _check_scalar(value)
            children = _iterate_children(value)
            if children is not None:
                levels.append(children)
                break
        else:
            levels.pop()
        if len(levels) > MAX_DEPTH + 1:
            raise _make_depth_error()


def _check_scalar(value: object) -> None:
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise _make_number_error()
    if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
        problem = "a text in it contains half of a character (U+D800 to U+DFFF); correct it"
        raise DocumentLimitError(problem)


def _iterate_children(value: object) -> Iterator[object] | None:
    if isinstance(value, Mapping):
        for key in value:
            _check_scalar(key)
        return iter(value.values())
    return iter(value) if isinstance(value, list | tuple) else None


def _parse(parse: Callable[[str], Any], text: str, error_type: type[Exception]) -> Any:
    try:
        return parse(text)
    except DocumentError:
        raise
    except RecursionError:
        raise _make_depth_error() from None
    except error_type as error:
        raise DocumentError(str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        # Parsers raise these for long numbers, dates that do not exist, and wrong YAML tags.
        problem = "a number, date or tagged value in it is not valid; correct it"
        raise DocumentLimitError(problem) from error


@dataclass(slots=True)
class _YamlSize:
    """The size of a part of a YAML document, with its aliases expanded."""

    anchor: str | None = None
    num_values: int = 1
    depth: int = 0

    def add(self, child: _YamlSize) -> None:
        """Add the size of a child."""
        self.num_values += child.num_values
        self.depth = max(self.depth, child.depth + 1)


def _check_yaml_events(events: Iterator[Any]) -> None:
    """Check the limits while the document is read, before any value is built.

    libyaml needs quadratic time for deep nesting, and PyYAML's composer has no recursion limit.
    """
    import yaml

    sizes_by_anchor: dict[str, _YamlSize] = {}
    open_parts = [_YamlSize()]
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_parts.append(_YamlSize(event.anchor))
            if len(open_parts) > MAX_DEPTH + 1:
                raise _make_depth_error()
            continue
        if isinstance(event, yaml.AliasEvent):
            if any(part.anchor == event.anchor for part in open_parts):
                raise DocumentLimitError("a YAML alias in it contains itself; remove the alias")
            size = sizes_by_anchor.get(str(event.anchor), _YamlSize())
        elif isinstance(event, yaml.CollectionEndEvent):
            size = open_parts.pop()
        elif isinstance(event, yaml.ScalarEvent):
            size = _YamlSize(event.anchor)
        else:
            continue
        if size.anchor is not None:
            sizes_by_anchor[size.anchor] = size
        open_parts[-1].add(size)
        _check_yaml_size(open_parts)


def _check_yaml_size(open_parts: Sequence[_YamlSize]) -> None:
    if len(open_parts) - 1 + open_parts[-1].depth > MAX_DEPTH + 1:
        raise _make_depth_error()
    if open_parts[-1].num_values > MAX_VALUES:
        raise _make_count_error()


def _make_depth_error() -> DocumentLimitError:
    return DocumentLimitError(f"it is nested deeper than {MAX_DEPTH} levels; remove levels")


def _make_count_error() -> DocumentLimitError:
    return DocumentLimitError(f"it has more than {MAX_VALUES:,} keys and values; remove some")


def _make_number_error() -> DocumentLimitError:
    return DocumentLimitError("a number in it is too long; shorten it")


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": parse_toml,
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
    ".json": parse_json,
}
