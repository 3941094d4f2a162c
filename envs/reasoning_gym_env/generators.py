"""Generators of reasoning-gym. Only this module imports the library.

Generators use the global random generators of Python and NumPy, print to the standard output, and
evaluate some answers as code. A lock therefore protects the calls, global generators get a seed
and then their old state, and answers that are no plain expressions get 0 without a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import random
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ludus.env.options import Option, describe_type, explain_errors, format_default
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, did_you_mean

from .names import COMPOSITE, INSTALL_COMMAND, require_name

NUM_TASKS = 1 << 31
"""Number of different tasks of a generator."""
_OWN_FIELDS = frozenset({"seed", "size"})
"""Fields of every configuration that the environment sets."""
_HASH_DEPENDENT = frozenset(
    {
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Generators whose tasks depend on the order of sets, and so on Python's hash seed."""
_PYTHON_ANSWERS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Generators that evaluate answers as Python."""
_SYMPY_ANSWERS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
"""Generators that evaluate answers as SymPy expressions."""
_CODE_PATTERN = re.compile(r"__|\w\s*\(|\.\s*[^\W\d]|\*\s*\*|\b(?:lambda|for|if)\b")
"""Parts of Python code that do not occur in lists and texts."""
_UNSAFE_SYMPY_PATTERN = re.compile(r"__|\.\s*[^\W\d]|[\[\]{}'\"`@:;\\]|(?:\*\*|\^)\s*\(?-?\d{3,}")
"""Parts that do not occur in sums, products and integrals, and powers that take too long."""
_TOWER_PATTERN = re.compile(r"(?:\*\*|\^)[^+\-/,=]*(?:\*\*|\^)")
"""A power in an exponent."""
_SOLUTION_KEYS = ("possible_answer", "example_answer", "example_correct_answer")
"""Keys of the metadata that contain a solution if a generator has no single answer."""
_lock = threading.RLock()


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A question and its solution."""

    question: str
    dataset: str
    """Generator of the question, also in a mixture."""
    solution: str | None
    """A solution; None if the generator knows none."""
    entry: Mapping[str, Any]
    """The generator's own description of the task, for its score."""


class TaskGenerator:
    """A source of tasks: a generator with its configuration.

    Args:
        name: Name of the generator.
        fields: Values of fields of its configuration, as JSON.

    Raises:
        NotFoundError: The generator does not exist.
        ConfigError: reasoning-gym is not installed, a field is invalid, or tasks cannot be
            repeated in other processes.
    """

    def __init__(self, name: str, fields: JsonObject) -> None:
        dataset_type, config_type = _find_types(name)
        _require_fixed_hashes(name)
        self._name = name
        values = _convert_fields(name, config_type, fields)
        try:
            with _isolated_calls(0):
                self._config = config_type(**values, seed=0, size=1)
                self._dataset = dataset_type(self._config)
        except Exception as error:  # third-party code
            raise ConfigError(
                f"reasoning-gym cannot make '{name}' with {fields}: {error}; correct the options"
            ) from error

    def make_task(self, number: int) -> Task:
        """Return a task; equal numbers give equal tasks."""
        with _isolated_calls(number):
            try:
                entry = self._dataset[number]
            except IndexError:
                # A few generators make all tasks of their configured size in advance.
                config = dataclasses.replace(self._config, seed=number)
                entry = type(self._dataset)(config)[0]
                self._dataset = type(self._dataset)(config)
        dataset = str(entry["metadata"].get("source_dataset", self._name))
        return Task(entry["question"], dataset, _find_solution(entry), entry)

    def score(self, answer: str, task: Task) -> float:
        """Return the library's score of an answer, from 0 to 1; 0 for an answer that it refuses."""
        if not answer or not _is_safe(answer, task.dataset):
            return 0.0
        try:
            with _isolated_calls(0):
                score = float(self._dataset.score_answer(answer, dict(task.entry)))
        except Exception:  # noqa: BLE001 - the library's parsers raise errors of many types
            return 0.0
        return min(max(score, 0.0), 1.0) if score == score else 0.0


def list_field_options(name: str) -> list[Option]:
    """Return the fields of a generator's configuration as options.

    Raises:
        NotFoundError: The generator does not exist.
        ConfigError: reasoning-gym is not installed.
    """
    _, config_type = _find_types(name)
    annotations, descriptions = get_type_hints(config_type), _describe_fields(name)
    options = []
    for field in _list_fields(config_type):
        default = _find_default(field)
        options.append(
            Option(
                name=field.name,
                variable="",
                help=descriptions.get(field.name, ""),
                default=format_default(_to_text(default)),
                is_list=False,
                is_switch=False,
                type_text=describe_type(annotations[field.name]),
            )
        )
    return options


def load_library() -> Any:
    """Import reasoning-gym and return its registry. Processes forked later share the modules.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("reasoning_gym.composite")
            return importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        module = error.name or "reasoning_gym"
        raise ConfigError(
            f"reasoning-gym needs the module '{module}', which is not installed; {INSTALL_COMMAND}"
        ) from error


def _find_types(name: str) -> tuple[Any, Any]:
    """Return the classes of a generator and of its configuration."""
    require_name(name)
    factory = load_library()
    dataset_type, config_type = factory.DATASETS[name]
    return dataset_type, config_type


def _require_fixed_hashes(name: str) -> None:
    seed = os.environ.get("PYTHONHASHSEED", "")
    if name in _HASH_DEPENDENT and sys.flags.hash_randomization and not seed.isdigit():
        raise ConfigError(
            f"'{name}' makes different tasks in every process, because it depends on the order of "
            "Python's sets; set the environment variable PYTHONHASHSEED=0 before you start Ludus"
        )


@contextlib.contextmanager
def _isolated_calls(seed: int) -> Iterator[None]:
    """Seed the global random generators and hide output; restore both afterwards."""
    with _lock:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _list_fields(config_type: Any) -> list[dataclasses.Field[Any]]:
    fields = dataclasses.fields(config_type)
    return [field for field in fields if field.init and field.name not in _OWN_FIELDS]


def _find_default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _to_text(value: Any) -> Any:
    """Return a default as a value that an option can have, or as text."""
    if isinstance(value, bool | int | float | str | None):
        return value
    return TypeAdapter(Any).dump_json(value, fallback=str).decode()


def _describe_fields(name: str) -> dict[str, str]:
    """Return the descriptions in the generator's curriculum, by field."""
    curricula = load_library().CURRICULA
    descriptions: dict[str, str] = {}
    if name not in curricula:
        return descriptions
    for attribute in curricula[name]().attributes.values():
        text = str(attribute.description or "").strip()
        for key in ("field_name", "lower_field_name", "upper_field_name"):
            if hasattr(attribute, key) and text:
                descriptions[getattr(attribute, key)] = text
    return descriptions


def _convert_fields(name: str, config_type: Any, fields: JsonObject) -> dict[str, Any]:
    """Return the fields with the types that the configuration declares.

    Raises:
        ConfigError: A field is unknown or has the wrong type.
    """
    names = [field.name for field in _list_fields(config_type)]
    annotations, values = get_type_hints(config_type), {}
    for field, value in fields.items():
        if field not in names:
            hint = did_you_mean(field, names) or f"it has {', '.join(names)}"
            raise ConfigError(f"'{name}' has no option '{field}'; {hint}")
        complete_value = _complete_mixture(value) if name == COMPOSITE else value
        try:
            adapter = TypeAdapter(_accept_any_length(annotations[field]))
            values[field] = adapter.validate_python(complete_value)
        except ValidationError as error:
            raise ConfigError(f"{field}: {explain_errors(error)}") from None
    if name == COMPOSITE:
        for spec in values.get("datasets") or ():
            spec.config = _convert_fields(spec.name, _find_types(spec.name)[1], spec.config)
            _require_fixed_hashes(spec.name)
    return values


def _complete_mixture(value: Any) -> Any:
    """Add the defaults of a mixture's parts: weight 1 and the generator's own configuration."""
    if not isinstance(value, list):
        return value
    return [
        {"weight": 1.0, "config": {}, **part} if isinstance(part, dict) else part for part in value
    ]


def _accept_any_length(annotation: Any) -> Any:
    """Return an annotation whose tuples may have any length; some declare only one item."""
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple and len(arguments) == 1:
        return tuple.__class_getitem__((*arguments, ...))
    return annotation


def _find_solution(entry: Mapping[str, Any]) -> str | None:
    """Return the answer of a task, or otherwise a solution in its metadata."""
    if entry["answer"] is not None:
        return str(entry["answer"])
    metadata = entry["metadata"]
    solutions = (metadata[key] for key in _SOLUTION_KEYS if metadata.get(key) is not None)
    solution = next(solutions, None)
    if solution is None or isinstance(solution, str):
        return solution
    return TypeAdapter(Any).dump_json(solution).decode()


def _is_safe(answer: str, dataset: str) -> bool:
    """Return False if the library would run an answer as code that is no plain expression."""
    if dataset in _PYTHON_ANSWERS:
        return _CODE_PATTERN.search(answer) is None
    if dataset in _SYMPY_ANSWERS:
        return not (_UNSAFE_SYMPY_PATTERN.search(answer) or _TOWER_PATTERN.search(answer))
    return True
