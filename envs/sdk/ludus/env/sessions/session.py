"""One session: an environment, its episode's progress, and the rules of calling it."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from ludus.env.encoding import (
    EncodedResult,
    ResetArgs,
    check_size,
    decode_action,
    encode_transition,
)
from ludus.env.environment import AnyEnvironment, TextRenderer
from ludus.env.types import JsonObject, State, Transition
from ludus.proto.errors import (
    ActionParseError,
    EnvError,
    EpisodeStateError,
    ErrorCode,
    InvalidCallError,
    is_complete_env_error,
    wrap_exception,
)

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class EnvironmentSession:
    """An environment with its episode's progress; knows no wire, no clock and no thread.

    Its methods must not run in two threads at once; who hosts it sees to that. They raise nothing
    but EnvError, whatever the environment raises: none of them waits, so that also a cancellation
    or the end of the process can only be the environment's own idea.
    """

    __slots__ = (
        "_environment",
        "_episode_id",
        "_last",
        "_pid",
        "_renderer",
        "_transition",
        "id",
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
        self._last: EncodedResult | None = None
        """The latest answer of the running episode; None before the first reset."""

    @property
    def last(self) -> EncodedResult | None:
        """The latest answer, None before the first reset."""
        return self._last

    def reset(self, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        options = args.options
        if options:
            _reject_unknown_options(type(self._environment), options)
        if args.episode_id:
            declared = declared_options(type(self._environment))
            if declared and "episode_id" in declared:
                options = {**options, "episode_id": args.episode_id}
        self._last = None
        try:
            transition = self._environment.reset(seed=args.seed, **options)
        except BaseException as error:  # noqa: BLE001 - the boundary to foreign code
            told = self._told("reset", error, self._built_with())
            raise told from told.__cause__
        self._episode_id = args.episode_id or None
        return self._advance(transition, 0)

    def step(self, action: bytes | str, step_index: int = 0) -> EncodedResult:
        """The answer to one action; a repeated number gets the first answer again.

        Args:
            action: bytes are JSON of the action type, a str is a language model's text.
            step_index: this step's number in its episode, from 1; 0 means not numbered.
        """
        last = self._last
        if last is None:
            raise EpisodeStateError(
                f"expected a reset before step {step_index or ''} of session {self.id};"
                " call reset first",
                ErrorCode.NOT_RESET,
            )
        if step_index and step_index != last.step_index + 1:
            return self._repeated(last, step_index)
        if last.terminated or last.truncated:
            raise EpisodeStateError(
                f"expected no step after the episode's end (it took {last.step_index} steps);"
                " call reset to start the next one",
                ErrorCode.EPISODE_OVER,
            )
        try:
            transition = self._environment.step(self._typed(action))
        except BaseException as error:  # noqa: BLE001 - the boundary to foreign code
            told = self._told("step", error)
            raise told from told.__cause__
        return self._advance(transition, last.step_index + 1)

    def state_json(self) -> bytes:
        """The environment's state; the empty state before the first reset."""
        if self._last is None:
            return State(episode_id=self._episode_id).model_dump_json().encode()
        return self._guarded("state", self._state_of_environment)

    def call_tool(self, name: str, arguments: JsonObject) -> bytes:
        """What a tool of the environment returned, as JSON."""
        return self._guarded("call_tool", lambda: self._returned(name, arguments))

    def close(self) -> None:
        """Free what the environment holds; a failure is logged, not raised."""
        try:
            self._environment.close()
        except BaseException:  # noqa: BLE001 - foreign code; the session is gone either way
            _log.exception("close of %s failed", type(self._environment).__name__)
        finally:
            exit_if_forked(self._pid)

    def _returned(self, name: str, arguments: JsonObject) -> bytes:
        result = orjson.dumps(self._environment.call_tool(name, arguments))
        check_size(f"a result of tool '{name}'", len(result))
        return result

    def _state_of_environment(self) -> bytes:
        state = self._environment.state
        if state.episode_id is None and self._episode_id is not None:
            state = state.model_copy(update={"episode_id": self._episode_id})
        state_json = state.__pydantic_serializer__.to_json(state)
        check_size("a state", len(state_json))
        return state_json

    def _repeated(self, last: EncodedResult, step_index: int) -> EncodedResult:
        if step_index == last.step_index:
            return last
        raise EpisodeStateError(
            f"expected step {last.step_index + 1} (or {last.step_index} once more),"
            f" got {step_index}; call reset to get back in step",
            ErrorCode.STEP_CONFLICT,
        )

    def _typed(self, action: bytes | str) -> Any:
        if isinstance(action, bytes):
            return decode_action(self._environment.action_type, action)
        renderer = self._environment.text_renderer
        if renderer is None:
            raise ActionParseError(
                f"expected a JSON action: {type(self._environment).__name__} has no text renderer"
            )
        transition = self._transition
        assert transition is not None, "steps come after a reset"
        try:
            return renderer.parse(action, transition.observation)
        except BaseException as error:  # noqa: BLE001 - the boundary to foreign code
            told = self._told("parse", error)
            raise told from told.__cause__

    def _advance(self, transition: Transition, step_index: int) -> EncodedResult:
        # When encoding fails the step has happened but has no answer: nothing can be
        # repeated, so the episode is over for the client (NOT_RESET) rather than skewed.
        self._last = self._transition = None
        try:
            self._last = encoded = encode_transition(transition, self._renderer, step_index)
        except BaseException as error:  # noqa: BLE001 - the boundary to foreign code
            told = self._told("encoding", error)
            raise told from told.__cause__
        self._transition = transition
        exit_if_forked(self._pid)
        return encoded

    def _guarded(self, what: str, call: Callable[[], ResultT]) -> ResultT:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - the boundary to foreign code
            told = self._told(what, error)
            raise told from told.__cause__
        finally:
            exit_if_forked(self._pid)

    def _built_with(self) -> str:
        """The options that a failed reset may come from."""
        try:
            options = self._environment.options
        except Exception:  # noqa: BLE001 - foreign code; the reset has failed already
            return ""
        said = "see that each option has the type that it expects"
        return f"; the environment was built with {options}, {said}" if options else ""

    def _told(self, what: str, error: BaseException, more: str = "") -> EnvError:
        """What the caller is told; an EnvError that was raised on purpose stays as it is."""
        exit_if_forked(self._pid)
        if is_complete_env_error(error):
            return error
        _log.error("%s of %s failed", what, type(self._environment).__name__, exc_info=error)
        return wrap_exception(f"{what} failed with ", error, suffix=more)


def exit_if_forked(pid: int) -> None:
    """End this process where it is a copy of that one, which foreign code has forked.

    It would go on as a second server, on the same sockets.
    """
    if os.getpid() != pid:
        os._exit(0)


@functools.cache
def declared_options(environment_type: type[AnyEnvironment]) -> frozenset[str] | None:
    """The names that the environment's `reset` accepts beside `seed`; None means any."""
    parameters = inspect.signature(environment_type.reset).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters) - {"self", "seed"}


def accepts_option(environment_type: type[AnyEnvironment], name: str) -> bool:
    """True when the environment's `reset` takes a keyword argument of that name."""
    declared = declared_options(environment_type)
    return declared is None or name in declared


def _reject_unknown_options(environment_type: type[AnyEnvironment], options: JsonObject) -> None:
    unknown = [name for name in options if not accepts_option(environment_type, name)]
    if unknown:
        declared = ", ".join(sorted(declared_options(environment_type) or ())) or "none"
        raise InvalidCallError(
            f"expected reset options out of: {declared}; got {', '.join(sorted(unknown))};"
            f" {environment_type.__name__}.reset does not take them"
        )
