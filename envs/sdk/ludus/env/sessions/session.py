"""A session: an environment, the progress of its episode, and the order of its calls."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from ludus.env.encoding import (
    EncodedResult,
    EncodedToolResult,
    ResetArgs,
    check_size,
    decode_action,
    encode_tool_result,
    encode_transition,
)
from ludus.env.environment import AnyEnvironment, TextRenderer
from ludus.env.incoming.faults import shorten
from ludus.env.text.unicode import replace_surrogates
from ludus.env.types import JsonObject, State, Transition
from ludus.proto.errors import (
    ActionParseError,
    EnvError,
    EpisodeStateError,
    ErrorCode,
    ExecutionError,
    InvalidCallError,
    is_complete_env_error,
    wrap_exception,
)

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class EnvironmentSession:
    """An environment with the progress of its episode, independent of transports and timeouts.

    Two threads must not call its methods at the same time. The methods raise only EnvError: every
    other exception of the environment is converted. The methods never await, so a CancelledError
    or SystemExit comes from the environment and is converted too.
    """

    __slots__ = (
        *("_environment", "_episode_id", "_is_over", "_pid", "_renderer", "_transition"),
        *("id", "last_result"),
    )

    def __init__(
        self, session_id: str, environment: AnyEnvironment, *, with_text: bool = True
    ) -> None:
        self.id = session_id
        self._pid = os.getpid()
        self._environment = environment
        self._renderer: TextRenderer[Any, Any] | None = (
            environment.text_renderer if with_text else None
        )
        self._episode_id: str | None = None
        self._transition: Transition[Any] | None = None
        self._is_over = False
        """True if a step or a tool call has ended the episode."""
        self.last_result: EncodedResult | None = None
        """Latest result of the running episode; None before the first reset."""

    def reset(self, args: ResetArgs) -> EncodedResult:
        """Start a new episode and return its first result."""
        options = args.options
        if options:
            _refuse_unknown_options(type(self._environment), options)
        if args.episode_id:
            option_names = list_reset_options(type(self._environment))
            if option_names and "episode_id" in option_names:
                options = {**options, "episode_id": args.episode_id}
        self.last_result = None
        transition = self._convert_errors(
            "reset", lambda: self._environment.reset(seed=args.seed, **options)
        )
        self._episode_id = args.episode_id or None
        return self._record_transition(transition, 0)

    def step(self, action: bytes | str, step_index: int = 0) -> EncodedResult:
        """Take a step; see `Sessions.step`."""
        last_result = self.last_result
        if last_result is None:
            raise EpisodeStateError(
                f"session {self.id} has no running episode; call reset first",
                ErrorCode.NOT_RESET,
            )
        if step_index and step_index != last_result.step_index + 1:
            return self._repeat_last_result(last_result, step_index)
        if self._is_over:
            raise EpisodeStateError(
                f"the episode is over after {last_result.step_index} steps; call reset to start the"
                " next one",
                ErrorCode.EPISODE_OVER,
            )
        transition = self._convert_errors(
            "step", lambda: self._environment.step(self._parse_action(action))
        )
        return self._record_transition(transition, last_result.step_index + 1)

    def read_state(self) -> bytes:
        """Return the environment's state, or an empty state before the first reset."""
        if self.last_result is None:
            return State(episode_id=self._episode_id).model_dump_json().encode()
        return self._convert_errors("state", self._encode_state)

    def call_tool(self, name: str, arguments: JsonObject) -> EncodedToolResult:
        """Call a tool of the environment and return its result.

        Raises:
            EpisodeStateError: the tool pays a reward or ends the episode, which is already over.
        """
        result = self._convert_errors(
            "call_tool",
            lambda: encode_tool_result(name, self._environment.call_tool(name, arguments)),
        )
        if self._is_over and (result.reward is not None or result.done):
            raise EpisodeStateError(
                f"the tool '{name}' pays a reward or ends the episode, but the episode is over;"
                " call reset to start the next one",
                ErrorCode.EPISODE_OVER,
            )
        self._is_over |= result.done
        return result

    def close(self) -> None:
        """Free the environment's resources; a failure is logged, not raised."""
        try:
            self._environment.close()
        except BaseException:  # noqa: BLE001 - third-party code; the session is gone either way
            _log.exception("%s.close failed", type(self._environment).__name__)
        finally:
            exit_if_forked(self._pid)

    def _encode_state(self) -> bytes:
        state = self._environment.state
        if state.episode_id is None and self._episode_id is not None:
            state = state.model_copy(update={"episode_id": self._episode_id})
        state_json = _encode_state(state)
        check_size("a state", len(state_json))
        return state_json

    def _repeat_last_result(self, last_result: EncodedResult, step_index: int) -> EncodedResult:
        if step_index == last_result.step_index:
            return last_result
        raise EpisodeStateError(
            f"expected step {last_result.step_index + 1} (or {last_result.step_index} again), got"
            f" {step_index}; call reset to synchronize",
            ErrorCode.STEP_CONFLICT,
        )

    def _parse_action(self, action: bytes | str) -> Any:
        if isinstance(action, bytes):
            return decode_action(self._environment.action_type, action)
        renderer = self._environment.text_renderer
        if renderer is None:
            raise ActionParseError(
                f"the action must be JSON: {type(self._environment).__name__} has no text renderer"
            )
        transition = self._transition
        assert transition is not None, "steps come after a reset"
        return self._convert_errors("parse", lambda: renderer.parse(action, transition.observation))

    def _record_transition(self, transition: Transition[Any], step_index: int) -> EncodedResult:
        # If encoding fails, the step has happened but has no result that could be repeated. The
        # episode is then over for the client (NOT_RESET), so client and environment stay in sync.
        self.last_result = self._transition = None
        self.last_result = encoded_result = self._convert_errors(
            "encoding", lambda: encode_transition(transition, self._renderer, step_index)
        )
        self._transition, self._is_over = transition, encoded_result.done
        return encoded_result

    def _convert_errors(self, call_name: str, call: Callable[[], ResultT]) -> ResultT:
        """Return the result of a call to third-party code, and convert its errors to EnvError."""
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - the boundary to third-party code
            env_error = self._try_to_convert(call_name, error)
            raise env_error from env_error.__cause__
        finally:
            exit_if_forked(self._pid)

    def _try_to_convert(self, call_name: str, error: BaseException) -> EnvError:
        """Convert an error of the environment, even if its class fails when it is shown."""
        try:
            return self._to_env_error(call_name, error)
        except Exception:  # noqa: BLE001 - code of the error's class, or of its metaclass
            return ExecutionError(f"{call_name} failed with an error that cannot be shown")

    def _describe_options(self) -> str:
        """Return a hint about the options that may have made a reset fail."""
        try:
            options = self._environment.options
        except Exception:  # noqa: BLE001 - third-party code; the reset has failed already
            options = {}
        hint = f"; the environment was built with {options}; check the type of each option"
        return hint if options else ""

    def _to_env_error(self, call_name: str, error: BaseException) -> EnvError:
        """Convert an error of the environment; an EnvError raised on purpose is kept."""
        exit_if_forked(self._pid)
        if is_complete_env_error(error):
            return error
        environment_name = type(self._environment).__name__
        _log.error("%s.%s failed", environment_name, call_name, exc_info=error)
        hint = self._describe_options() if call_name == "reset" else ""
        return wrap_exception(f"{call_name} failed with ", error, suffix=hint)


def _encode_state(state: State) -> bytes:
    try:
        return state.__pydantic_serializer__.to_json(state)
    except ValueError:  # also the error for a surrogate
        state = replace_surrogates(state)
        return state.__pydantic_serializer__.to_json(state)


def exit_if_forked(pid: int) -> None:
    """Exit if third-party code has forked this process from the process `pid`.

    The copy would otherwise continue as a second server on the same sockets.
    """
    if os.getpid() != pid:
        os._exit(0)


@functools.cache
def list_reset_options(environment_type: type[AnyEnvironment]) -> frozenset[str] | None:
    """Return the names of reset's options other than `seed`; None means any."""
    parameters = inspect.signature(environment_type.reset).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters) - {"self", "seed"}


def _refuse_unknown_options(environment_type: type[AnyEnvironment], options: JsonObject) -> None:
    option_names = list_reset_options(environment_type)
    if option_names is not None and not option_names.issuperset(options):
        raise InvalidCallError(
            f"{environment_type.__name__}.reset does not have the options"
            f" {shorten(', '.join(sorted(options.keys() - option_names)))}; its options are:"
            f" {', '.join(sorted(option_names)) or 'none'}"
        )
