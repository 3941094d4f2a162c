"""`ludus env play`: a person plays an environment in the terminal.

Standard input may be a script: each line is one answer, and the end of input quits.
"""

from __future__ import annotations

import itertools
import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ludus.proto.errors import ActionError, ExecutionError, InvalidCallError, ToolError
from ludus.services.cli.console import print_line, results_console
from ludus.services.cli.env_targets import connect_client
from ludus.services.cli.options import Options, TargetOrAddress, TokenEnv, parse_options

if TYPE_CHECKING:
    from ludus.env.client import EnvClient, Session
    from ludus.env.recording.format import EpisodeWriter
    from ludus.env.types import EnvironmentDescription, StepResult

_SEED_BITS = 31
_MAX_LISTED = 40
_HELP = "  :new starts another episode, :state prints the state, :quit quits"
_TOOLS_HELP = "  :tools lists the tools, :call NAME {...} calls a tool"
_MAX_SHOWN_CHARS = 4000


class _QuitError(Exception):
    """The player quits."""


def play(
    location: TargetOrAddress,
    options: Options = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of the first episode; each later episode adds 1. Default: random seeds.",
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="File (.jsonl) to append the episodes to.")
    ] = None,
    token_env: TokenEnv = "LUDUS_ENV_TOKEN",
) -> None:
    """Play an environment yourself: answer with text, a number or JSON, or call a tool.

    Example: `ludus env play openspiel_env --option game=blackjack --seed 7`

    Example: `ludus env play gymnasium:FrozenLake-v1 --record games.jsonl`
    """
    from ludus.env.recording.format import EpisodeWriter

    environment_options = parse_options(options or ())
    with connect_client(location, environment_options, token_env) as client:
        target = "" if "://" in location else location
        writer = (
            EpisodeWriter(record, client.describe(), target, environment_options)
            if record
            else None
        )
        play_session = _PlaySession(client, results_console(), writer)
        try:
            play_session.play(seed)
        except (_QuitError, KeyboardInterrupt):
            play_session.quit()


class _PlaySession:
    """A person's play in the terminal: episodes, answers and score."""

    def __init__(self, client: EnvClient, console: Console, writer: EpisodeWriter | None) -> None:
        self._client = client
        self._console = console
        self._writer = writer
        self._description: EnvironmentDescription = client.describe()
        self._returns: list[float] = []

    def play(self, first_seed: int | None) -> None:
        """Play episodes until the player quits."""
        self._say(f"{self._description.name}: {self._description.description}", "bold")
        self._say(self._help(), "dim")
        for index in itertools.count():
            seed = secrets.randbits(_SEED_BITS) if first_seed is None else first_seed + index
            self._play_episode(seed)
            if self._ask("another episode? [Y/n] ").strip().lower() in ("n", "no", ":quit", ":q"):
                raise _QuitError

    def quit(self) -> None:
        """Print the totals, and record the unfinished episode."""
        if self._writer is not None:
            self._writer.end("the player quit")
        num_played = len(self._returns)
        self._say("")
        if num_played:
            total = sum(self._returns)
            count = _format_count(num_played, "episode")
            self._say(f"{count}, return {total:g}, mean {total / num_played:.3f}")

    def _play_episode(self, seed: int) -> None:
        session, result = self._client.open(seed=seed)
        self._say(f"-- episode {len(self._returns) + 1}, seed {seed}", "cyan")
        if self._writer is not None:
            self._writer.begin(seed, result)
        score = 0.0
        self._show(result)
        with session:
            while not result.done:
                next_result = self._read_turn(session, result)
                if next_result is None:
                    break
                result = next_result
                score += result.reward or 0.0
                self._show(result)
                self._say(f"reward {result.reward or 0.0:g}, score {score:g}", "dim")
        if result.done:
            end_reason = "terminated" if result.terminated else "truncated"
            num_steps = _format_count(result.step_index, "step")
            verdict = {True: ", success", False: ", no success", None: ""}[result.success]
            self._say(f"-- {end_reason} after {num_steps}, return {score:g}{verdict}", "cyan")
            self._returns.append(score)
        if self._writer is not None:
            self._writer.end(end_reason if result.done else "the player quit")

    def _read_turn(self, session: Session, result: StepResult) -> StepResult | None:
        """Return the result of the player's next legal answer, or None if the player gives up."""
        while True:
            line = self._ask("> ").strip()
            if line in (":quit", ":q"):
                raise _QuitError
            if line == ":new":
                return None
            if line == ":state":
                self._say(json.dumps(session.state(), indent=2))
            elif line == ":tools":
                self._show_tools()
            elif line.partition(" ")[0] == ":call":
                self._call(session, line)
            elif line in (":help", "?"):
                self._say(self._help())
                self._show_legal(result)
            elif line:
                next_result = self._step(session, line, result)
                if next_result is not None:
                    return next_result

    def _call(self, session: Session, line: str) -> None:
        """Call a tool and print its result; the episode continues."""
        _, name, arguments = [*line.split(maxsplit=2), "", ""][:3]
        try:
            returned = session.call_tool(name, _read_arguments(arguments))
        except (ToolError, InvalidCallError, ExecutionError) as error:
            self._say(f"refused: {error}", "yellow")
            self._show_tools()
        else:
            self._say(json.dumps(returned, indent=2)[:_MAX_SHOWN_CHARS])
            if self._writer is not None:
                self._say("the recording contains steps only, not this call", "yellow")

    def _help(self) -> str:
        return f"{_HELP}\n{_TOOLS_HELP}" if self._description.tools else _HELP

    def _show_tools(self) -> None:
        for tool in self._description.tools:
            fields = json.dumps(tool.input_schema.get("properties", {}))
            self._say(f"tool {tool.name}: {tool.description} {fields}", "green")
        if not self._description.tools:
            self._say("this environment has no tools", "dim")

    def _step(self, session: Session, line: str, result: StepResult) -> StepResult | None:
        """Return the result of a step, or None if the answer is refused."""
        action = _read_answer(line, self._description.action_schema, result.text is not None)
        try:
            if isinstance(action, str):
                next_result = session.step(text=action)
            else:
                next_result = session.step(action)
        except (ActionError, InvalidCallError, ExecutionError) as error:
            self._say(f"refused: {error}", "yellow")
            self._show_legal(result)
            return None
        if self._writer is not None:
            self._writer.add_step(action, next_result)
        return next_result

    def _show(self, result: StepResult) -> None:
        if result.text is not None:
            for message in result.text.messages:
                self._say(message["content"])
        else:
            self._say(json.dumps(result.observation, indent=2)[:_MAX_SHOWN_CHARS])
        if not result.done:
            self._show_legal(result)

    def _show_legal(self, result: StepResult) -> None:
        legal_answers = result.text.legal_answers if result.text is not None else ()
        legal = legal_answers or result.observation.get("legal_actions")
        if legal:
            suffix = f" and {len(legal) - _MAX_LISTED} more" if len(legal) > _MAX_LISTED else ""
            listed = ", ".join(str(answer) for answer in legal[:_MAX_LISTED])
            self._say(f"legal: {listed}{suffix}", "green")
        elif result.text is None:
            fields = self._description.action_schema.get("properties", {})
            self._say(f"action: {json.dumps(fields)[:500]}", "green")

    def _ask(self, prompt: str) -> str:
        if sys.stdin.isatty():
            try:
                return input(prompt)
            except EOFError:
                raise _QuitError from None
        line = sys.stdin.readline()
        if not line:
            raise _QuitError
        self._say(f"{prompt}{line.rstrip()}")
        return line

    def _say(self, text: str, style: str | None = None) -> None:
        print_line(self._console, text, style)


def _read_answer(line: str, schema: dict[str, Any], has_text: bool) -> dict[str, Any] | str:
    """Parse a line as an action: a JSON object, or text if the environment reads text."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        value = line
    if isinstance(value, dict):
        return value
    if has_text:
        return line
    names = schema.get("required", [])
    return {names[0]: value} if len(names) == 1 else line


def _read_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a tool call.

    Raises:
        InvalidCallError: the text is not a JSON object.
    """
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise InvalidCallError(f":call NAME needs a JSON object, got {text!r}")
    return value


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
