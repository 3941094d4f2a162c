"""Launchers of the three kinds of agents, and the tasks and results of agents.

    AgentTask --program, service or function--> text or object --read_result--> AgentResult

A failure of an agent raises an AgentError. A service that cannot be reached raises an
InfrastructureError instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import httpx

from ludus.env import Message
from ludus.env.programs.client import ProgramHost
from ludus.env.programs.launcher import NOT_CONFINED
from ludus.env.sandbox.worker_resources import filter_variables
from ludus.proto.config import AgentConfig, CommandAgent, FunctionAgent, UrlAgent
from ludus.proto.errors import AgentError, ConfigError, UnavailableError
from ludus.proto.rewards import REWARD_RULE, is_valid_reward
from ludus.trainer.core.functions import import_callable
from ludus.trainer.data.failures import describe_error
from ludus.trainer.rollout.agents.endpoint.server import EndpointAccess
from ludus.trainer.rollout.agents.programs import find_program
from ludus.trainer.rollout.agents.proxies import exempt_loopback

_NUM_THREADS = 256
_MAX_VARIABLE_BYTES = 120_000
"""Maximum size of LUDUS_TASK in bytes. Linux limits a variable to 128 KiB."""
_PLACEHOLDER_PATTERN = re.compile(r"\{task\}|\{text\}")
"""Placeholders in the arguments of a program."""
_SANDBOX_ERROR = "the sandbox lacks"
MAX_QUOTED_CHARACTERS = 200


for _logger_name in ("httpx", "httpx2"):
    # These loggers write a line for every request that an agent in this process sends.
    logging.getLogger(_logger_name).setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of an agent in one episode, which is sent to the agent as JSON."""

    text: str
    """Content of all messages, joined."""
    messages: Sequence[Message]
    observation: Mapping[str, Any]
    info: Mapping[str, Any]
    """Info of the first result. For a data set, it contains the columns of the row."""
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result that an agent returns for an episode."""

    answer: str | None = None
    """Text that the environment parses as an action; None if there is none."""
    action: Any = None
    """Action that needs no parsing; None if there is none."""
    reward: float = 0.0
    """Additional reward that the agent assigns to the episode."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All other fields, for reward functions."""


AgentLauncher: TypeAlias = Callable[[AgentTask, EndpointAccess], Awaitable[Any]]
"""Function that runs the agent on an episode and returns its output.

Cancelling the call stops the agent.
"""


async def start_launcher(config: AgentConfig, stack: AsyncExitStack) -> AgentLauncher:
    """Return the launcher of the configured agent. `stack` closes the launcher's resources."""
    # Functions run in this process, and services may listen on this machine.
    exempt_loopback(os.environ)
    match config:
        case CommandAgent():
            host = await stack.enter_async_context(ProgramHost(config.sandbox))
            return ProgramLauncher(config, host).run
        case UrlAgent():
            token = os.environ.get(config.token_env)
            headers = {"authorization": f"Bearer {token}"} if token else {}
            client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=10.0),
                limits=httpx.Limits(max_connections=None),
            )
            return partial(_call_service, config.url, await stack.enter_async_context(client))
        case FunctionAgent():
            executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="agent")
            function = import_callable(config.function, "environment.agent.function")
            return partial(_call_function, config.function, function, executor)


class ProgramLauncher:
    """A launcher that starts a program for each episode."""

    def __init__(self, config: CommandAgent, host: ProgramHost) -> None:
        self._config = config
        self._host = host
        self._program = find_program(config)
        self._folder = str(Path(config.folder).absolute())
        self._readable_paths = _list_readable_paths(config, self._program, self._folder)

    async def run(self, task: AgentTask, access: EndpointAccess) -> str:
        """Run the program and return its standard output."""
        task_json = task.to_json()
        replacements = {"{task}": task_json, "{text}": task.text}
        # Both placeholders are replaced in one pass, because the task may contain "{text}".
        arguments = [
            _PLACEHOLDER_PATTERN.sub(lambda match: replacements[match[0]], argument)
            for argument in self._config.command[1:]
        ]
        outcome = await self._host.run(
            [self._program, *arguments],
            variables=self._make_variables(task_json, access),
            folder=self._folder,
            readable_paths=self._readable_paths,
        )
        if outcome.exit_code == NOT_CONFINED and _SANDBOX_ERROR in outcome.errors:
            raise ConfigError(f"environment.agent.sandbox = 'required': {outcome.errors.strip()}")
        if outcome.exit_code != 0:
            last_errors = " ".join(outcome.errors.split())[-MAX_QUOTED_CHARACTERS:]
            raise AgentError(
                f"the agent's program exited with exit code {outcome.exit_code}; its last errors: "
                f"{last_errors or 'none'}"
            )
        return outcome.output

    def _make_variables(self, task_json: str, access: EndpointAccess) -> dict[str, str]:
        variables = filter_variables(os.environ, self._config.pass_env)
        variables |= {
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_BASE": access.base_url,  # the name in older clients
            "OPENAI_API_KEY": access.api_key,
            "OPENAI_MODEL": access.model,
        }
        exempt_loopback(variables, urlsplit(access.base_url).hostname)
        if access.mcp_url is not None:
            variables["LUDUS_MCP_URL"] = access.mcp_url
        if len(task_json.encode()) > _MAX_VARIABLE_BYTES:
            raise AgentError(
                f"expected a task of at most {_MAX_VARIABLE_BYTES} bytes as JSON, got "
                f"{len(task_json.encode())}; use a service (agent.url) for larger tasks"
            )
        return variables | {"LUDUS_TASK": task_json}


async def _call_service(
    url: str, client: httpx.AsyncClient, task: AgentTask, access: EndpointAccess
) -> Any:
    body = {"task": asdict(task), **asdict(access)}
    try:
        response = await client.post(url, json=body)
    except httpx.TransportError as error:
        raise UnavailableError(
            f"agent.url = '{url}': {type(error).__name__}: {error}; start the service, or correct "
            "the address"
        ) from error
    if not response.is_success:
        response_text = " ".join(response.text.split())[:MAX_QUOTED_CHARACTERS]
        raise AgentError(f"the agent's service returned {response.status_code}: {response_text}")
    with contextlib.suppress(ValueError):
        return response.json()
    return response.text


async def _call_function(
    path: str,
    function: Callable[..., Any],
    executor: ThreadPoolExecutor,
    task: AgentTask,
    access: EndpointAccess,
) -> Any:
    try:
        if inspect.iscoroutinefunction(function):
            return await function(task, access)
        # The function may block while it waits for a response, which this event loop sends.
        loop = asyncio.get_running_loop()
        function_output = await loop.run_in_executor(executor, function, task, access)
        return await function_output if inspect.isawaitable(function_output) else function_output
    except (Exception, SystemExit) as error:  # the run's custom code
        raise AgentError(f"agent.function = '{path}' raised {describe_error(error)}") from error


def _list_readable_paths(config: CommandAgent, program: str, folder: str) -> list[str]:
    """Return the paths that the program may read in addition to the system's paths."""
    paths = [folder, program, os.path.realpath(program), *_list_virtual_environment_paths(program)]
    arguments = [os.path.join(folder, argument) for argument in config.command[1:]]
    paths += [path for path in arguments if os.path.exists(path)]
    for variable_name in ("PYTHONPATH", "VIRTUAL_ENV"):
        paths += filter(None, os.environ.get(variable_name, "").split(os.pathsep))
    return sorted({*paths, *map(os.path.abspath, config.allow_read)})


def _list_virtual_environment_paths(program: str) -> list[str]:
    """Return the folders of a program's virtual environment and of its base Python."""
    environment_folder = Path(program).parent.parent
    settings_file = environment_folder / "pyvenv.cfg"
    if not settings_file.is_file():
        return []
    home = re.search(r"^home *= *(.*\S)", settings_file.read_text(), re.MULTILINE)
    return [str(environment_folder), *([str(Path(home[1]).parent)] if home else [])]


def read_result(
    agent_output: Any, answer_form: Literal["json", "text", "last_message", "none"], last_text: str
) -> AgentResult:
    """Return the result in the output of an agent.

    Args:
        answer_form: form of the output (`agent.answer` of the configuration).
        last_text: text of the last completion, the answer if the form is "last_message".

    Raises:
        AgentError: the output does not have this form.
    """
    match answer_form:
        case "none":
            return AgentResult()
        case "last_message":
            answer_fields = agent_output if isinstance(agent_output, dict) else {}
            return AgentResult(answer=last_text, fields=answer_fields)
        case "text":
            if not isinstance(agent_output, str):
                raise AgentError(
                    f"agent.answer = 'text' needs a text, got {_quote(agent_output)}; "
                    "return only the answer, or set agent.answer = 'json'"
                )
            return AgentResult(answer=agent_output.strip())
    fields = dict(_read_object(agent_output))
    answer, action = fields.pop("answer", None), fields.pop("action", None)
    reward = fields.pop("reward", 0.0)
    if not isinstance(reward, int | float) or not is_valid_reward(reward):
        raise AgentError(f"expected {REWARD_RULE} as reward, got {_quote(reward)}")
    if answer is not None and action is not None:
        raise AgentError("expected an answer or an action, got both; return only one of them")
    return AgentResult(
        answer=answer if answer is None or isinstance(answer, str) else str(answer),
        action=action,
        reward=float(reward),
        fields=fields,
    )


def _read_object(agent_output: Any) -> dict[str, Any]:
    """Return the output as an object, which a text contains as JSON in its last line.

    The object is empty if there is no output.
    """
    if agent_output is None:
        return {}
    if isinstance(agent_output, str):
        lines = [line for line in agent_output.splitlines() if line.strip()]
        if not lines:
            return {}
        try:
            agent_output = json.loads(lines[-1])
        except (ValueError, RecursionError):
            raise AgentError(
                'expected JSON like {"answer": "..."} in the last line (agent.answer = \'json\'), '
                f"got {_quote(lines[-1])}; set agent.answer = 'text' if the whole text is the "
                "answer"
            ) from None
    if not isinstance(agent_output, dict):
        raise AgentError(f'expected an object like {{"answer": "..."}}, got {_quote(agent_output)}')
    return agent_output


def _quote(value: Any) -> str:
    return f"{value!r:.{MAX_QUOTED_CHARACTERS}}"
