"""`ludus env show`: an environment as a language model and a person meet it.

TARGET --> environment in this process --> first prompt, legal answers, range of returns
       --> entry of the catalogue      --> family, seats
       --> packages                    --> options, fixed policies and their exact returns
       --> packaged examples           --> configurations with measured results
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ludus.proto.errors import ConfigError
from ludus.services.cli.console import get_stdout, make_table, print_line, write_json
from ludus.services.cli.examples import Example, find_target_examples
from ludus.services.cli.options import Options, Target, parse_options

if TYPE_CHECKING:
    from rich.console import Console

    from ludus.env.environment import AnyEnvironment
    from ludus.env.types import Message

_MAX_LISTED_ANSWERS = 40
_MAX_SHOWN_CHARS = 4000


@dataclass(frozen=True, slots=True)
class _OptionRow:
    """An option of an environment."""

    name: str
    type: str
    default: str
    help: str


@dataclass(frozen=True, slots=True)
class _Details:
    """All that the command prints about an environment."""

    target: str
    description: str = ""
    family: str = ""
    min_seats: int | None = None
    max_seats: int | None = None
    is_game: bool | None = None
    return_range: tuple[float, float] | None = None
    """Lowest and highest return, if the environment declares them."""
    num_tasks: int | None = None
    """Number of training tasks; None if every seed is a different task."""
    tools: list[str] = field(default_factory=list)
    problem: str = ""
    """Reason why the environment cannot be made without options; "" if it can."""
    prompt: list[Message] | None = None
    """Messages of the first observation with seed 0; None without a text renderer."""
    legal_answers: list[str] = field(default_factory=list)
    action_schema: dict[str, Any] | None = None
    options: list[_OptionRow] = field(default_factory=list)
    baselines: list[str] = field(default_factory=list)
    exact_returns: dict[str, float] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)


def show_environment(
    target: Target,
    options: Options = None,
    prints_json: Annotated[bool, typer.Option("--json", help="Print JSON, not text.")] = False,
) -> None:
    """Describe an environment: its first prompt, options, seats, baselines and examples.

    The prompt is that of seed 0. The returns of baselines are exact, if the package provides them;
    `ludus env bench` measures them. The results of examples are those of the learning proofs.

    Example: `ludus env show openspiel:tic_tac_toe`

    Example: `ludus env show gymnasium:FrozenLake-v1 --option is_slippery=false`
    """
    details = _collect_details(target, parse_options(options or ()))
    if prints_json:
        write_json(json.dumps(asdict(details), indent=2))
    else:
        _print_details(get_stdout(), details)


def _collect_details(target: str, options: dict[str, Any]) -> _Details:
    """Make the environment, read its first observation, and collect what is known about it.

    Raises:
        UserError: there is no such target, or it cannot be made with these options.
    """
    from ludus.env.catalogue.listing import find_catalogue_target
    from ludus.env.targets.target_options import list_target_options
    from ludus.env.targets.targets import check_environment_options, environment_factory

    environment_factory(target, options)  # finds a wrong name
    rows = [
        _OptionRow(option.name, option.type_text, option.default, option.help)
        for option in list_target_options(target)
    ]
    try:
        environment = check_environment_options(target, options)
    except ConfigError as error:
        if options or not rows:
            raise
        return replace(_describe_entry(target, target), options=rows, problem=str(error))
    try:
        catalogue_target = find_catalogue_target(target, environment.options)
        details = replace(_describe_entry(target, catalogue_target), options=rows)
        return _describe_environment(details, environment)
    finally:
        environment.close()


def _describe_entry(target: str, catalogue_target: str) -> _Details:
    """Return what the catalogue contains about a target, and its examples."""
    from ludus.env.catalogue.listing import find_entry

    entry = find_entry(catalogue_target)
    details = _Details(target, examples=find_target_examples(catalogue_target))
    if entry is None:
        return details
    return replace(
        details,
        description=entry.description,
        family=entry.family,
        min_seats=entry.min_seats,
        max_seats=entry.max_seats,
    )


def _describe_environment(details: _Details, environment: AnyEnvironment) -> _Details:
    from ludus.env.targets.policies import (
        compute_exact_returns,
        find_policies_function,
        load_policies,
    )

    function_path = find_policies_function(details.target)
    policies = load_policies(function_path, environment.options) if function_path else {}
    return_range, tasks = environment.return_range, environment.tasks
    renderer, observation = environment.text_renderer, environment.reset(seed=0).observation
    return replace(
        details,
        description=details.description or environment.description,
        is_game=environment.is_game,
        return_range=(return_range.lowest, return_range.highest) if return_range else None,
        num_tasks=tasks.num_tasks if tasks is not None else None,
        tools=[tool.name for tool in environment.tools],
        prompt=renderer.render(observation, first=True) if renderer is not None else None,
        legal_answers=renderer.legal_answers(observation) if renderer is not None else [],
        action_schema=environment.action_type.model_json_schema() if renderer is None else None,
        baselines=list(dict.fromkeys(("random", *policies))),
        exact_returns=compute_exact_returns(details.target, environment.options),
    )


def _print_details(console: Console, details: _Details) -> None:
    print_line(console, f"{details.target}: {details.description}", "bold")
    for name, value in _list_facts(details):
        print_line(console, f"{name}: {value}")
    _print_prompt(console, details)
    if details.options:
        _print_heading(console, "options (--option NAME=VALUE)")
        table = make_table("option", "values", "default", "")
        for row in details.options:
            table.add_row(*map(Text, (row.name, row.type, row.default, row.help)))
        console.print(table)
    _print_baselines(console, details)
    _print_examples(console, details)


def _list_facts(details: _Details) -> list[tuple[str, str]]:
    facts = []
    if details.family:
        facts.append(("family", details.family))
    if details.min_seats is not None:
        seats = (
            f"{details.min_seats}"
            if details.min_seats == details.max_seats
            else f"{details.min_seats} to {details.max_seats}"
        )
        facts.append(("seats", seats))
    if details.is_game is not None:
        facts.append(("episodes are", "won or lost" if details.is_game else "solved or not"))
    if details.return_range is not None:
        lowest, highest = details.return_range
        facts.append(("return", f"from {lowest:g} to {highest:g}"))
    if details.num_tasks is not None:
        facts.append(("tasks", f"{details.num_tasks:,}"))
    if details.tools:
        facts.append(("tools", ", ".join(details.tools)))
    return facts


def _print_prompt(console: Console, details: _Details) -> None:
    if details.problem:
        _print_heading(console, "needs options")
        print_line(console, details.problem)
        return
    _print_heading(console, "first prompt (seed 0)")
    if details.prompt is None:
        print_line(console, "none: there is no text, so language models cannot play")
        print_line(console, f"action: {json.dumps(details.action_schema)[:_MAX_SHOWN_CHARS]}")
        return
    for message in details.prompt:
        print_line(console, f"[{message['role']}]", "dim")
        print_line(console, message["content"][:_MAX_SHOWN_CHARS])
    answers = details.legal_answers
    if answers:
        num_hidden = len(answers) - _MAX_LISTED_ANSWERS
        suffix = f" and {num_hidden} more" if num_hidden > 0 else ""
        _print_heading(console, "legal answers")
        print_line(console, f"{', '.join(answers[:_MAX_LISTED_ANSWERS])}{suffix}")


def _print_baselines(console: Console, details: _Details) -> None:
    if not details.baselines:
        return
    _print_heading(console, f"baselines (ludus env bench {details.target})")
    table = make_table("policy", "exact return", number_columns=("exact return",))
    for name in dict.fromkeys((*details.baselines, *details.exact_returns)):
        exact_return = details.exact_returns.get(name)
        table.add_row(Text(name), "not known" if exact_return is None else f"{exact_return:.4f}")
    console.print(table)


def _print_examples(console: Console, details: _Details) -> None:
    _print_heading(console, "examples")
    if not details.examples:
        print_line(console, "none trains on it")
    for example in details.examples:
        command = f" ({example.copy_command})" if example.copy_command else ""
        print_line(console, f"{example.path}: {example.description}{command}")
        for result in example.results:
            print_line(console, f"  {result.describe()}")
        if not example.results:
            print_line(console, "  no learning proof measures its result")


def _print_heading(console: Console, text: str) -> None:
    print_line(console, "")
    print_line(console, text, "bold")
