"""Launchers of the three kinds of agents, with their tasks and results.

    AgentTask --program, service or function--> text or object --read_result--> AgentResult

Every failure of an agent is an AgentError, except that a service cannot be reached, which is an
InfrastructureError.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx

from ludus.env import Message
from ludus.env.programs.client import ProgramHost
from ludus.env.programs.launcher import NOT_CONFINED
from ludus.env.sandbox.worker_resources import filter_variables
from ludus.proto.config import AgentConfig, CommandAgent, FunctionAgent, UrlAgent
from ludus.proto.errors import AgentError, ConfigError, UnavailableError
from ludus.trainer.core.functions import import_object
from ludus.trainer.data.failures import describe_error
from ludus.trainer.rollout.agents.endpoint.server import EndpointAccess

_NUM_THREADS = 256
_MAX_VARIABLE_BYTES = 120_000
"""Maximum size of LUDUS_TASK; Linux limits a variable to 128 KiB."""
_PLACEHOLDERS = re.compile(r"\{task\}|\{text\}")
"""Placeholders in the arguments of a program."""
_SANDBOX_ERROR = "the sandbox lacks"
MAX_QUOTED_CHARACTERS = 200
_RESULT_KEYS = ("answer", "action", "reward")

for _name in ("httpx", "httpx2"):
    # These loggers write a line for every request of an agent in this process.
    logging.getLogger(_name).setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The first result of an episode, which is sent to the agent as JSON."""

    text: str
    """Text of all messages."""
    messages: Sequence[Message]
    observation: Mapping[str, Any]
    info: Mapping[str, Any]
    """Info of the result; for a data set, the columns of the row."""
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


RunAgent: TypeAlias = Callable[[AgentTask, EndpointAccess], Awaitable[Any]]
"""Runs the agent on an episode and returns its value; cancelling the call stops the agent."""


async def start_launcher(config: AgentConfig, stack: AsyncExitStack) -> RunAgent:
    """Return the function that runs the configured agent; the stack closes what it needs."""
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
            threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="agent")
            function = import_object(config.function, "environment.agent.function")
            return partial(_call_function, config.function, function, threads)


def check_agent(config: AgentConfig) -> None:
    """Check that the agent exists on this machine.

    Raises:
        ConfigError: the program, its folder or the function does not exist.
    """
    match config:
        case CommandAgent():
            find_program(config)
        case FunctionAgent():
            import_object(config.function, "environment.agent.function")


def find_program(config: CommandAgent) -> str:
    """Return the path of the agent's program.

    Raises:
        ConfigError: the program or its folder does not exist.
    """
    folder, name = Path(config.folder).absolute(), config.command[0]
    if not folder.is_dir():
        raise ConfigError(
            f"environment.agent.folder = '{config.folder}': there is no folder '{folder}'; create "
            "it, or correct the path"
        )
    program = shutil.which(str(folder / name) if os.sep in name else name)
    if program is None:
        raise ConfigError(
            f"environment.agent.command = {list(config.command)}: there is no executable program "
            f"'{name}' in {'the folder' if os.sep in name else 'PATH'}; install it, or set its path"
        )
    return os.path.abspath(program)


class ProgramLauncher:
    """Starts a program for each episode."""

    def __init__(self, config: CommandAgent, host: ProgramHost) -> None:
        self._config = config
        self._host = host
        self._program = find_program(config)
        self._folder = str(Path(config.folder).absolute())
        self._readable = _readable_paths(config, self._program, self._folder)

    async def run(self, task: AgentTask, access: EndpointAccess) -> str:
        """Run the program and return its standard output."""
        task_json = task.to_json()
        values = {"{task}": task_json, "{text}": task.text}
        # One pass replaces both placeholders, because the task itself may contain braces.
        arguments = [
            _PLACEHOLDERS.sub(lambda match: values[match[0]], argument)
            for argument in self._config.command[1:]
        ]
        result = await self._host.run(
            [self._program, *arguments],
            variables=self._variables(task_json, access),
            folder=self._folder,
            readable_paths=self._readable,
        )
        if result.exit_code == NOT_CONFINED and _SANDBOX_ERROR in result.errors:
            raise ConfigError(f"environment.agent.sandbox = 'required': {result.errors.strip()}")
        if result.exit_code != 0:
            errors = " ".join(result.errors.split())[-MAX_QUOTED_CHARACTERS:]
            raise AgentError(
                f"the agent's program exited with exit code {result.exit_code}; its last errors: "
                f"{errors or 'none'}"
            )
        return result.output

    def _variables(self, task_json: str, access: EndpointAccess) -> dict[str, str]:
        variables = filter_variables(os.environ, self._config.pass_env)
        variables |= {
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_BASE": access.base_url,  # the name in older clients
            "OPENAI_API_KEY": access.api_key,
            "OPENAI_MODEL": access.model,
            "NO_PROXY": "127.0.0.1,localhost",
        }
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
        text = " ".join(response.text.split())[:MAX_QUOTED_CHARACTERS]
        raise AgentError(f"the agent's service returned {response.status_code}: {text}")
    with contextlib.suppress(ValueError):
        return response.json()
    return response.text


async def _call_function(
    path: str,
    function: Callable[..., Any],
    threads: ThreadPoolExecutor,
    task: AgentTask,
    access: EndpointAccess,
) -> Any:
    try:
        if inspect.iscoroutinefunction(function):
            return await function(task, access)
        # A thread may wait for the policy, whose responses come from this event loop.
        loop = asyncio.get_running_loop()
        returned = await loop.run_in_executor(threads, function, task, access)
        return await returned if inspect.isawaitable(returned) else returned
    except (Exception, SystemExit) as error:  # the run's custom code
        raise AgentError(f"agent.function = '{path}' raised {describe_error(error)}") from error


def _readable_paths(config: CommandAgent, program: str, folder: str) -> list[str]:
    """Return the paths, in addition to the system's, that the program may read."""
    paths = [folder, program, os.path.realpath(program), *_virtual_environment(program)]
    arguments = [os.path.join(folder, argument) for argument in config.command[1:]]
    paths += [path for path in arguments if os.path.exists(path)]
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        paths += filter(None, os.environ.get(name, "").split(os.pathsep))
    return sorted({*paths, *map(os.path.abspath, config.allow_read)})


def _virtual_environment(program: str) -> list[str]:
    """Return the virtual environment of a program and the Python it is based on."""
    prefix = Path(program).parent.parent
    settings = prefix / "pyvenv.cfg"
    if not settings.is_file():
        return []
    values: Mapping[str, str] = dict(
        [part.strip() for part in line.partition("=")[::2]]  # type: ignore[misc]
        for line in settings.read_text().splitlines()
    )
    home = values.get("home")
    return [str(prefix), *([str(Path(home).parent)] if home else [])]


def read_result(
    value: Any, form: Literal["json", "text", "last_message", "none"], last_text: str
) -> AgentResult:
    """Return the result in a text or an object, which the configuration's `form` describes.

    Args:
        last_text: text of the last completion, which is the answer of "last_message".

    Raises:
        AgentError: the value does not have this form.
    """
    match form:
        case "none":
            return AgentResult()
        case "last_message":
            fields = value if isinstance(value, dict) else {}
            return AgentResult(answer=last_text, fields=fields)
        case "text":
            if not isinstance(value, str):
                raise AgentError(
                    f"expected a text (agent.answer = 'text'), got {_quote(value)}; return only "
                    "the answer, or set agent.answer = 'json'"
                )
            return AgentResult(answer=value.strip())
    result = _read_object(value)
    action, reward = result.get("action"), result.get("reward", 0.0)
    answer = result.get("answer")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise AgentError(f"expected a finite number as reward, got {_quote(reward)}")
    if answer is not None and action is not None:
        raise AgentError("expected an answer or an action, got both; return only one of them")
    return AgentResult(
        answer=answer if answer is None or isinstance(answer, str) else str(answer),
        action=action,
        reward=float(reward),
        fields={key: entry for key, entry in result.items() if key not in _RESULT_KEYS},
    )


def _read_object(value: Any) -> dict[str, Any]:
    """Return the object, or the object in the last line of a text; empty for an empty text."""
    if value is None:
        return {}
    if isinstance(value, str):
        lines = [line for line in value.splitlines() if line.strip()]
        if not lines:
            return {}
        try:
            value = json.loads(lines[-1])
        except ValueError:
            raise AgentError(
                'expected JSON like {"answer": "..."} in the last line (agent.answer = \'json\'), '
                f"got {_quote(lines[-1])}; set agent.answer = 'text' if the whole text is the "
                "answer"
            ) from None
    if not isinstance(value, dict):
        raise AgentError(f'expected an object like {{"answer": "..."}}, got {_quote(value)}')
    return value


def _quote(value: Any) -> str:
    return f"{value!r:.{MAX_QUOTED_CHARACTERS}}"
