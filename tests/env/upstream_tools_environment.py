"""An OpenEnv environment with an MCP tool. Importing this module requires OpenEnv."""

from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class ToolsEnvironment(MCPEnvironment):
    """An environment with an echo tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def echo(message: str) -> str:
            """Return the message."""
            return message

        super().__init__(server)
        self._state = State(episode_id="E")

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0, metadata={"status": "ready"})

    def _step_impl(self, action: Action, timeout_s=None, **kwargs):
        return Observation(done=False, reward=0.0)

    @property
    def state(self) -> State:
        return self._state
