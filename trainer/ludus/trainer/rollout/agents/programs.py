"""Programs and functions of agents, which are looked up before a run. This needs no torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ludus.proto.config import AgentConfig, CommandAgent, FunctionAgent
from ludus.proto.errors import ConfigError
from ludus.trainer.core.functions import import_callable


def check_agent(config: AgentConfig) -> None:
    """Check that the agent exists on this machine.

    Raises:
        ConfigError: the program, its folder or the function does not exist.
    """
    match config:
        case CommandAgent():
            find_program(config)
        case FunctionAgent():
            import_callable(config.function, "environment.agent.function")


def find_program(config: CommandAgent) -> str:
    """Return the path of the agent's program.

    Raises:
        ConfigError: the program or its folder does not exist.
    """
    folder, program_name = Path(config.folder).absolute(), config.command[0]
    if not folder.is_dir():
        raise ConfigError(
            f"environment.agent.folder = '{config.folder}': there is no folder '{folder}'; create "
            "it, or correct the path"
        )
    program = shutil.which(str(folder / program_name) if os.sep in program_name else program_name)
    if program is None:
        raise ConfigError(
            f"environment.agent.command = {list(config.command)}: there is no executable program "
            f"'{program_name}' in {'the folder' if os.sep in program_name else 'PATH'}; install "
            "it, or set its path"
        )
    return os.path.abspath(program)
