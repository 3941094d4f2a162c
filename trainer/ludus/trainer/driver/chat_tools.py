"""The tools of an environment that a model can call in a conversation (`ludus chat --env`).

    target  --> server in a child process --+
                                            +--> client --> session --> results of calls
    address --------------------------------+

A call that ends the episode closes its session. The next call opens another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ludus.env import Message
from ludus.env.client import ConnectOptions, EnvClient, Session
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.errors import ConfigError, EnvError, NotFoundError, UnavailableError
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.messages import make_result
from ludus.trainer.models.tool_calls import ToolCall, ToolSpec
from ludus.trainer.rollout.adapters.environment_adapter import StepOutcome
from ludus.trainer.rollout.adapters.tool_adapter import ToolAdapter, Toolbox

_CONNECT_TIMEOUT_S = 3.0
"""Seconds to wait for the first response of a server."""
_VERDICTS = {True: ", success", False: ", no success", None: ""}


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """The environment whose tools a model can call."""

    location: str
    """Target, or address of a running server."""
    options: Mapping[str, Any]
    """Options for the environment's constructor."""
    token_env: str
    """Environment variable with the token of a running server."""
    max_calls: int
    """Maximum number of calls for each message of the user."""


class ChatTools:
    """The tools of an environment, and the session in which a conversation calls them.

    Args:
        seed: seed of each episode; None for random seeds.
    """

    def __init__(
        self, client: EnvClient, settings: ToolSettings, tokenizer: ChatTokenizer, seed: int | None
    ) -> None:
        self.max_calls = settings.max_calls
        self._client = client
        self._tokenizer = tokenizer
        self._seed = seed
        self._toolbox = Toolbox(client.async_counterpart, settings.location, "--env is set")
        self._session: Session | None
        self._session, self._adapter = self._open_session()
        client.loop_thread.run(self._toolbox.load(self._session.async_counterpart))

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools in the form that chat templates use."""
        return self._toolbox.specs

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return [tool.name for tool in self._toolbox.tools]

    def read_calls(self, answer: str) -> list[ToolCall]:
        """Return the calls in an answer of the model.

        Raises:
            ActionParseError: a call cannot be parsed, or there is no such tool.
        """
        return self._adapter.read_calls(self._tokenizer.thoughts.get_answer(answer))

    def call_all(self, calls: Sequence[ToolCall], show: Callable[[str], None]) -> list[Message]:
        """Call tools in order, show their results, and return the results.

        Raises:
            EnvError: something other than a tool failed. The next call opens another session.
        """
        results: list[Message] = []
        is_over = False
        for call in calls:
            if is_over:
                results.append(make_result(call, '{"error": "the episode has ended"}'))
                continue
            outcome = self._call(call)
            results += outcome.messages
            reward_text = f" (reward {outcome.reward:g})" if outcome.reward else ""
            show(f"{call.name}{reward_text}: {outcome.messages[0]['content']}")
            is_over = outcome.status is not None
            if is_over:
                show(
                    f"the tool ended the episode ({outcome.status}"
                    f"{_VERDICTS[self._adapter.last_result.success]}); the next call starts another"
                )
                self.end_session()
        return results

    def end_session(self) -> None:
        """Close the session; the next call opens another one."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(EnvError):  # the server is gone, or it has closed the session
                session.close()

    def _call(self, call: ToolCall) -> StepOutcome:
        if self._session is None:
            self._session, self._adapter = self._open_session()
        try:
            return self._client.loop_thread.run(self._adapter.call_tool(call))
        except (EnvError, KeyboardInterrupt):
            self.end_session()
            raise

    def _open_session(self) -> tuple[Session, ToolAdapter]:
        session, first_result = self._client.open(seed=self._seed)
        async_session, call_form = session.async_counterpart, self._tokenizer.call_form
        return session, ToolAdapter(async_session, first_result, self._toolbox, 0.0, call_form)


def check_template(tokenizer: ChatTokenizer, model: str) -> None:
    """Check that the chat template shows tools to the model.

    Raises:
        ConfigError: the template does not.
    """
    if not tokenizer.lists_tools:
        raise ConfigError(
            f"--env needs a model that calls tools, but the chat template of '{model}' does not "
            "list tools; choose another model, or omit --env to talk without tools"
        )


@contextmanager
def open_tools(
    settings: ToolSettings, tokenizer: ChatTokenizer, seed: int | None
) -> Iterator[ChatTools]:
    """Yield the tools of an environment. A server for a target runs until the block ends.

    Raises:
        UserError: the environment cannot be used, or it offers no tools.
    """
    with _serve(settings) as (address, options):
        try:
            client = EnvClient.connect(address, options)
        except UnavailableError as error:
            raise NotFoundError(f"{error}; start a server with `ludus env serve`") from None
        with client:
            tools = ChatTools(client, settings, tokenizer, seed)
            tokenizer.check_tools(tools.specs)
            try:
                yield tools
            finally:
                tools.end_session()


@contextmanager
def _serve(settings: ToolSettings) -> Iterator[tuple[str, ConnectOptions]]:
    """Yield the address of the environment's server, and the options to connect to it."""
    if "://" in settings.location:
        token = os.environ.get(settings.token_env)
        yield settings.location, ConnectOptions(token=token, connect_timeout_s=_CONNECT_TIMEOUT_S)
        return
    server = LocalServer(settings.location, dict(settings.options), max_sessions=1)
    try:
        yield server.start().grpc, ConnectOptions()
    finally:
        server.stop()
