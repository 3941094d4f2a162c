"""The three kinds of agents, behind one coroutine: a program, a service, a function.

    run(task, access) -> what the agent returned, a text or an object

Whatever goes wrong in an agent is an AgentError; that a service cannot be reached is not its doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import httpx

from ludus.env.programs.client import ProgramHost
from ludus.env.programs.order import NOT_CONFINED
from ludus.env.sandbox.worker_resources import filter_variables
from ludus.proto.config import AgentConfig, CommandAgent, FunctionAgent, UrlAgent
from ludus.proto.errors import AgentError, ConfigError, UnavailableError
from ludus.trainer.agents.endpoint import Access
from ludus.trainer.agents.task import OUTPUT_SHOWN_CHARACTERS, AgentTask
from ludus.trainer.core.functions import import_object
from ludus.trainer.data.failures import describe

_NUM_THREADS = 256
_MAX_VARIABLE_BYTES = 120_000
"""Of LUDUS_TASK: Linux takes 128 KiB."""


_PLACES = re.compile(r"\{task\}|\{text\}")
"""In an argument of a program."""
_LACKS = "the sandbox lacks"

for _name in ("httpx", "httpx2"):
    # Of an agent in this process, each request would be a line.
    logging.getLogger(_name).setLevel(logging.WARNING)


class AgentRunner(Protocol):
    """Runs one agent per call."""

    async def run(self, task: AgentTask, access: Access) -> Any:
        """What the agent returned; a call that is cancelled ends it.

        Raises:
            AgentError: it failed.
            InfrastructureError: it cannot be reached.
        """


async def make_runner(config: AgentConfig, stack: AsyncExitStack) -> AgentRunner:
    """What runs the agent that the configuration names; what it needs ends with the stack.

    Raises:
        ConfigError: there is no such program or function.
    """
    match config:
        case CommandAgent():
            host = await stack.enter_async_context(ProgramHost(config.sandbox))
            return ProgramRunner(config, host)
        case UrlAgent():
            token = os.environ.get(config.token_env)
            headers = {"authorization": f"Bearer {token}"} if token else {}
            client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=10.0),
                limits=httpx.Limits(max_connections=None),
            )
            return ServiceRunner(config, await stack.enter_async_context(client))
        case FunctionAgent():
            threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="agent")
            return FunctionRunner(config, threads)


def check_agent(config: AgentConfig) -> None:
    """Check that what the agent needs is there, as far as this machine can tell.

    Raises:
        ConfigError: the program, its folder or the function is not.
    """
    match config:
        case CommandAgent():
            program_of(config)
        case FunctionAgent():
            import_object(config.function, "environment.agent.function")


def program_of(config: CommandAgent) -> str:
    """The path of the agent's program.

    Raises:
        ConfigError: there is none, or its folder is not there.
    """
    folder, name = Path(config.folder).absolute(), config.command[0]
    if not folder.is_dir():
        raise ConfigError(
            f"environment.agent.folder = '{config.folder}': expected a folder, there is none at "
            f"'{folder}'"
        )
    found = shutil.which(str(folder / name) if os.sep in name else name)
    if found is None:
        raise ConfigError(
            f"environment.agent.command = {list(config.command)}: expected a program that can be "
            f"executed, found no '{name}' in {'that place' if os.sep in name else 'PATH'}; "
            "install it, or give its path"
        )
    return os.path.abspath(found)


class ProgramRunner:
    """Starts a program for each episode."""

    def __init__(self, config: CommandAgent, host: ProgramHost) -> None:
        self._config = config
        self._host = host
        self._program = program_of(config)
        self._folder = str(Path(config.folder).absolute())
        self._readable = _readable(config, self._program, self._folder)

    async def run(self, task: AgentTask, access: Access) -> str:
        """What it wrote to standard output."""
        task_json = task.to_json()
        told = {"{task}": task_json, "{text}": task.text}
        # At once: what a task says may have braces of its own.
        arguments = [
            _PLACES.sub(lambda place: told[place[0]], one) for one in self._config.command[1:]
        ]
        ended = await self._host.run(
            [self._program, *arguments],
            variables=self._variables(task_json, access),
            folder=self._folder,
            readable=self._readable,
        )
        if ended.exit.code == NOT_CONFINED and _LACKS in ended.errors:
            raise ConfigError(f"environment.agent.sandbox = 'required': {ended.errors.strip()}")
        if ended.exit.code != 0:
            said = " ".join(ended.errors.split())[-OUTPUT_SHOWN_CHARACTERS:]
            raise AgentError(
                f"the agent's program ended with exit code {ended.exit.code}, and said last: "
                f"{said or 'nothing'}"
            )
        return ended.output

    def _variables(self, task_json: str, access: Access) -> dict[str, str]:
        variables = filter_variables(os.environ, self._config.pass_env)
        variables |= {
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_BASE": access.base_url,  # what older clients read
            "OPENAI_API_KEY": access.api_key,
            "OPENAI_MODEL": access.model,
            "NO_PROXY": "127.0.0.1,localhost",
        }
        if access.mcp_url is not None:
            variables["LUDUS_MCP_URL"] = access.mcp_url
        if len(task_json.encode()) > _MAX_VARIABLE_BYTES:
            raise AgentError(
                f"expected a task of at most {_MAX_VARIABLE_BYTES} bytes as JSON, got "
                f"{len(task_json.encode())}; a service (agent.url) takes larger ones"
            )
        return variables | {"LUDUS_TASK": task_json}


class ServiceRunner:
    """Calls a service for each episode."""

    def __init__(self, config: UrlAgent, client: httpx.AsyncClient) -> None:
        self._url = config.url
        self._client = client

    async def run(self, task: AgentTask, access: Access) -> Any:
        """What it answered."""
        asked = {"task": asdict(task), **asdict(access)}
        try:
            answer = await self._client.post(self._url, json=asked)
        except httpx.TransportError as error:
            raise UnavailableError(
                f"agent.url = '{self._url}': {type(error).__name__}: {error}; start the service, "
                "or correct the address"
            ) from error
        if not answer.is_success:
            said = " ".join(answer.text.split())[:OUTPUT_SHOWN_CHARACTERS]
            raise AgentError(f"the agent's service answered {answer.status_code}: {said}")
        with contextlib.suppress(ValueError):
            return answer.json()
        return answer.text


class FunctionRunner:
    """Calls a function for each episode, in this process."""

    def __init__(self, config: FunctionAgent, threads: ThreadPoolExecutor) -> None:
        self._path = config.function
        self._function = import_object(config.function, "environment.agent.function")
        self._threads = threads

    async def run(self, task: AgentTask, access: Access) -> Any:
        """What it returned."""
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(task, access)
            # It may wait for the policy, whose answers come from this event loop.
            loop = asyncio.get_running_loop()
            returned = await loop.run_in_executor(self._threads, self._function, task, access)
            return await returned if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:  # the boundary to the run's own code
            raise AgentError(f"agent.function = '{self._path}' raised {describe(error)}") from error


def _readable(config: CommandAgent, program: str, folder: str) -> list[str]:
    """What the program may read beside the system: itself, its folder, and what is named."""
    found = [folder, program, os.path.realpath(program), *_environment_of(program)]
    named = [os.path.join(folder, one) for one in config.command[1:]]
    found += [one for one in named if os.path.exists(one)]
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        found += filter(None, os.environ.get(name, "").split(os.pathsep))
    return sorted({*found, *(os.path.abspath(one) for one in config.allow_read)})


def _environment_of(program: str) -> list[str]:
    """The virtual environment that a program belongs to, and the Python below it."""
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
