"""`ludus env play`: a person plays an environment in the terminal.

Standard input may also be a script, in which each line is one answer. The end of input quits.
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

from ludus.env.text.terminal import format_notice
from ludus.proto.errors import ActionError, ExecutionError, InvalidCallError, ToolError
from ludus.proto.paths import expand_home
from ludus.services.cli.console import get_stdout, print_line
from ludus.services.cli.env_targets import connect_client
from ludus.services.cli.options import Options, TargetOrAddress, TokenEnv, parse_options

if TYPE_CHECKING:
    from ludus.env.client import EnvClient, Session
    from ludus.env.recording.format import EpisodeWriter
    from ludus.env.types import EnvironmentDescription, StepResult

_MAX_LISTED_ANSWERS = 40
_HELP = "  :new starts another episode, :state prints the state, :quit quits"
_TOOLS_HELP = "  :tools lists the tools, :call NAME {...} calls a tool"
_MAX_SHOWN_CHARS = 4000


class _QuitError(Exception):
    """The player has quit."""


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
    recording: Annotated[
        Path | None,
        typer.Option(
            "--record", help="File (.jsonl) to append the episodes to.", callback=expand_home
        ),
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
        writer = None
        if recording:
            target = "" if "://" in location else location
            writer = EpisodeWriter(recording, client.describe(), target, environment_options)
        terminal_play = _TerminalPlay(client, get_stdout(), writer)
        try:
            terminal_play.play(seed)
        except (_QuitError, KeyboardInterrupt):
            terminal_play.finish()


class _TerminalPlay:
    """The episodes that a person plays in the terminal."""

    def __init__(self, client: EnvClient, console: Console, writer: EpisodeWriter | None) -> None:
        self._client = client
        self._console = console
        self._writer = writer
        self._description: EnvironmentDescription = client.describe()
        self._episode_returns: list[float] = []

    def play(self, first_seed: int | None) -> None:
        """Play episodes until the player quits."""
        self._print(f"{self._description.name}: {self._description.description}", "bold")
        self._print(self._make_help(), "dim")
        for episode_index in itertools.count():
            seed = secrets.randbits(31) if first_seed is None else first_seed + episode_index
            self._play_episode(seed)
            answer = self._read_line("another episode? [Y/n] ").strip().lower()
            if answer in ("n", "no", ":quit", ":q"):
                raise _QuitError

    def finish(self) -> None:
        """Record the unfinished episode, and print the totals."""
        if self._writer is not None:
            self._writer.end_episode("the player quit")
        self._print("")
        if self._episode_returns:
            num_episodes, total = len(self._episode_returns), sum(self._episode_returns)
            episodes_text = _format_count(num_episodes, "episode")
            self._print(f"{episodes_text}, return {total:g}, mean {total / num_episodes:.3f}")

    def _play_episode(self, seed: int) -> None:
        session, result = self._client.open(seed=seed)
        self._print(f"-- episode {len(self._episode_returns) + 1}, seed {seed}", "cyan")
        if self._writer is not None:
            self._writer.begin_episode(seed, result)
        episode_return = 0.0
        self._show_result(result)
        with session:
            while not result.done:
                next_result = self._read_turn(session, result)
                if next_result is None:
                    break
                result = next_result
                episode_return += result.reward or 0.0
                self._print(f"reward {result.reward or 0.0:g}, score {episode_return:g}", "dim")
        if result.done:
            end_reason = "terminated" if result.terminated else "truncated"
            steps_text = _format_count(result.step_index, "step")
            verdict = {True: ", success", False: ", no success", None: ""}[result.success]
            line = f"-- {end_reason} after {steps_text}, return {episode_return:g}{verdict}"
            self._print(line, "cyan")
            self._episode_returns.append(episode_return)
        if self._writer is not None:
            self._writer.end_episode(end_reason if result.done else "the player quit")

    def _read_turn(self, session: Session, result: StepResult) -> StepResult | None:
        """Return the result of the player's next turn, and show it; None if the player gives up.

        A turn is an accepted answer, or a tool call that pays a reward or ends the episode.
        """
        while True:
            line = self._read_line("> ").strip()
            if line in (":quit", ":q"):
                raise _QuitError
            if line == ":new":
                return None
            next_result = None
            if line.partition(" ")[0] == ":call":
                next_result = self._try_call(session, line, result)
            elif line == ":state":
                self._print(json.dumps(session.state(), indent=2))
            elif line in (":tools", ":help", "?"):
                self._show_help(line, result)
            elif line:
                next_result = self._try_step(session, line, result)
            if next_result is not None:
                return next_result

    def _try_call(self, session: Session, line: str, result: StepResult) -> StepResult | None:
        """Call a tool for the player and show its result.

        Return the new result of the episode; None if the call is refused, or neither pays a reward
        nor ends the episode.
        """
        _, tool_name, arguments_json = [*line.split(maxsplit=2), "", ""][:3]
        try:
            arguments = _parse_arguments(arguments_json)
            tool_result = session.call_tool(tool_name, arguments)
        except (ToolError, InvalidCallError, ExecutionError) as error:
            self._print(format_notice("refused", error), "yellow")
            self._show_tools()
            return None
        self._print(json.dumps(tool_result.content, indent=2)[:_MAX_SHOWN_CHARS])
        if self._writer is not None:
            self._writer.add_tool_call(tool_name, arguments, tool_result)
        has_effect = tool_result.reward is not None or tool_result.done
        return tool_result.update(result) if has_effect else None

    def _show_help(self, line: str, result: StepResult) -> None:
        if line == ":tools":
            self._show_tools()
            return
        self._print(self._make_help())
        self._show_legal_answers(result)

    def _make_help(self) -> str:
        return f"{_HELP}\n{_TOOLS_HELP}" if self._description.tools else _HELP

    def _show_tools(self) -> None:
        for tool in self._description.tools:
            fields_json = json.dumps(tool.input_schema.get("properties", {}))
            self._print(f"tool {tool.name}: {tool.description} {fields_json}", "green")
        if not self._description.tools:
            self._print("this environment has no tools", "dim")

    def _try_step(self, session: Session, line: str, result: StepResult) -> StepResult | None:
        """Take a step with the player's answer and show its result; None if it is refused."""
        action = _parse_answer(line, self._description.action_schema, result.text is not None)
        try:
            if isinstance(action, str):
                next_result = session.step(text=action)
            else:
                next_result = session.step(action)
        except (ActionError, InvalidCallError, ExecutionError) as error:
            self._print(format_notice("refused", error), "yellow")
            self._show_legal_answers(result)
            return None
        if self._writer is not None:
            self._writer.add_step(action, next_result)
        self._show_result(next_result)
        return next_result

    def _show_result(self, result: StepResult) -> None:
        if result.text is not None:
            for message in result.text.messages:
                self._print(message["content"])
        else:
            self._print(json.dumps(result.observation, indent=2)[:_MAX_SHOWN_CHARS])
        if not result.done:
            self._show_legal_answers(result)

    def _show_legal_answers(self, result: StepResult) -> None:
        legal_answers = result.text.legal_answers if result.text is not None else ()
        answers = legal_answers or result.observation.get("legal_actions")
        if answers:
            num_hidden = len(answers) - _MAX_LISTED_ANSWERS
            suffix = f" and {num_hidden} more" if num_hidden > 0 else ""
            listed_answers = ", ".join(map(str, answers[:_MAX_LISTED_ANSWERS]))
            self._print(f"legal: {listed_answers}{suffix}", "green")
        elif result.text is None:
            fields = self._description.action_schema.get("properties", {})
            self._print(f"action: {json.dumps(fields)[:500]}", "green")

    def _read_line(self, prompt: str) -> str:
        if sys.stdin.isatty():
            try:
                return input(prompt)
            except EOFError:
                raise _QuitError from None
        line = sys.stdin.readline()
        if not line:
            raise _QuitError
        self._print(f"{prompt}{line.rstrip()}")
        return line

    def _print(self, message: str, style: str | None = None) -> None:
        print_line(self._console, message, style)


def _parse_answer(line: str, schema: dict[str, Any], has_text: bool) -> dict[str, Any] | str:
    """Parse a line as an action: a JSON object, a text, or the value of the only field.

    With a text renderer, a JSON object without the fields of an action is a text, because the
    renderer may ask for one.
    """
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = line
    required_fields = schema.get("required", [])
    if isinstance(answer, dict) and (not has_text or answer.keys() >= set(required_fields)):
        return answer
    return line if has_text or len(required_fields) != 1 else {required_fields[0]: answer}


def _parse_arguments(arguments_json: str) -> dict[str, Any]:
    try:
        arguments = json.loads(arguments_json or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidCallError(f":call NAME needs a JSON object, got {arguments_json!r}")
    return arguments


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
