"""Adapter for all environments of `gymnasium.make`.

    gymnasium:<id>, options --make_gymnasium_builder--> class for its spaces --()--> environment

The types of actions and observations follow from the spaces. Options are passed to
`gymnasium.make`, except `action_names`, `instructions` and `picture_columns`, which control the
text for language models. An environment whose observations are only pictures needs
`picture_columns` to have a text renderer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import orjson
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from pydantic import Field, ValidationError, create_model

from ludus.env.adapters import GYMNASIUM
from ludus.env.adapters.gymnasium.guides import Guide, find_guide
from ludus.env.adapters.gymnasium.interface_check import InterfaceCheck
from ludus.env.adapters.gymnasium.modules import find_package_name, suggest_registering_module
from ludus.env.adapters.gymnasium.spaces import (
    AnySpace,
    SpaceCodec,
    Tensors,
    make_codec,
    to_plain_json,
)
from ludus.env.adapters.gymnasium.success import find_return_range, find_success, is_game
from ludus.env.adapters.gymnasium.text import (
    MAX_LISTED_ACTIONS,
    GymnasiumRenderer,
    clean_picture,
    draw_picture,
    require_picture,
)
from ludus.env.environment import AnyEnvironment, Builder, Environment
from ludus.env.options import Option, explain_errors, format_default, list_parameters
from ludus.env.types import (
    Action,
    ActionT,
    JsonObject,
    Observation,
    ObservationT,
    ReturnRange,
    State,
    Transition,
)
from ludus.proto.errors import (
    ConfigError,
    EpisodeStateError,
    ErrorCode,
    ExecutionError,
    IllegalActionError,
    NotFoundError,
    did_you_mean,
)

AnyGymnasiumEnv = gymnasium.Env[Any, Any]
_SEED_BITS = 32
_TEXT_RENDER_MODE = "ansi"


class GymnasiumState(State):
    """The state of the episode."""

    episode_return: float = 0.0


class EpisodicGymnasiumEnvironment(Environment[ActionT, ObservationT, GymnasiumState]):
    """The base class of environments that play the episodes of a Gymnasium environment."""

    state_type = GymnasiumState

    def __init__(self, environment: AnyGymnasiumEnv) -> None:
        self.gym_env = environment
        self.is_game = is_game(environment)
        self._is_playing = False
        self._state = GymnasiumState()

    @property
    def state(self) -> GymnasiumState:
        """The number of steps and the return of the episode so far."""
        return self._state

    @property
    def return_range(self) -> ReturnRange | None:
        """The range that the environment declares; see `find_return_range`."""
        return find_return_range(self.gym_env)

    def close(self) -> None:
        """Close the environment."""
        self.gym_env.close()

    def start_episode(self, seed: int | None, options: JsonObject) -> tuple[Any, JsonObject]:
        """Reset the Gymnasium environment, and return its first observation and info."""
        if seed is None:  # Gymnasium would otherwise continue with the last episode's generator
            seed = secrets.randbits(_SEED_BITS)
        self._is_playing = False
        self.gym_env.action_space.seed(seed)
        gym_observation, info = self.gym_env.reset(seed=seed, options=options or None)
        self._is_playing = True
        self._state = GymnasiumState()
        return gym_observation, info

    def require_episode(self) -> None:
        """Check that an episode is running."""
        if not self._is_playing:
            raise EpisodeStateError(
                "a step needs a running episode; call reset", ErrorCode.EPISODE_OVER
            )

    def make_transition(
        self,
        observation: ObservationT,
        rewards: Sequence[float],
        is_terminated: bool,
        is_truncated: bool,
        info: JsonObject,
        tensors: Tensors,
    ) -> Transition[ObservationT]:
        """Return the result of a step, with the sum of the rewards and the episode's success."""
        self._is_playing = not (is_terminated or is_truncated)
        self._state.step_count += 1
        self._state.episode_return += sum(rewards)
        success = None
        if not self._is_playing:
            episode_return = self._state.episode_return
            success = find_success(self.gym_env, is_terminated, rewards[-1], episode_return, info)
        return Transition(
            observation,
            sum(rewards),
            bool(is_terminated),
            bool(is_truncated),
            info=to_plain_json(info),
            tensors=tensors,
            success=success,
        )


class GymnasiumEnvironment(EpisodicGymnasiumEnvironment[Action, Observation]):
    """A Gymnasium environment, with a subclass for each id and its options."""

    env_id: ClassVar[str]
    gymnasium_options: ClassVar[JsonObject]
    renderer: ClassVar[GymnasiumRenderer]
    action_codec: ClassVar[SpaceCodec]
    observation_codec: ClassVar[SpaceCodec]
    picture_columns: ClassVar[int]
    """Number of digits in each row of the picture; 0 means no picture."""

    def __init__(self) -> None:
        super().__init__(make_gymnasium(self.env_id, self.gymnasium_options))
        self._space = self.gym_env.action_space
        self._has_text_rendering = self.gym_env.render_mode == _TEXT_RENDER_MODE
        has_renderer = (
            self._has_text_rendering or self.picture_columns or not self.observation_codec.is_tensor
        )
        self.text_renderer = self.renderer if has_renderer else None

    @property
    def options(self) -> JsonObject:
        """The options of `gymnasium.make`."""
        return dict(self.gymnasium_options)

    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[Observation]:
        """Return the first observation; `options` are passed to Gymnasium."""
        gym_observation, info = self.start_episode(seed, options)
        observation, tensors = self._observe(gym_observation, info, is_over=False)
        return Transition(observation, info=to_plain_json(info), tensors=tensors)

    def step(self, action: Action) -> Transition[Observation]:
        """Take an action and return its result.

        Raises:
            IllegalActionError: the action is not in the action space.
        """
        self.require_episode()
        action_json: Any = dict(action)["action"]
        gym_action = self.action_codec.decode(action_json)
        if gym_action not in self._space:
            raise IllegalActionError(
                f"expected an action in {self._space}, got {action_json}; see /schema"
            )
        gym_observation, reward, is_terminated, is_truncated, info = self.gym_env.step(gym_action)
        is_over = is_terminated or is_truncated
        observation, tensors = self._observe(gym_observation, info, is_over=is_over)
        return self.make_transition(
            observation, [float(reward)], is_terminated, is_truncated, info, tensors
        )

    def _observe(
        self, gym_observation: Any, info: JsonObject, *, is_over: bool
    ) -> tuple[Observation, Tensors]:
        tensors: Tensors = {}
        fields = {"observation": self.observation_codec.encode(gym_observation, tensors)}
        if isinstance(self._space, spaces.Discrete):
            fields |= _make_legal_fields(self._space, info, is_over)
        if self.picture_columns:
            fields["picture"] = draw_picture(np.asarray(gym_observation), self.picture_columns)
        if self._has_text_rendering:
            fields["rendered"] = clean_picture(str(self.gym_env.render()), self.renderer.guide)
        try:
            return self.observation_type.model_validate(fields), tensors
        except ValidationError as error:
            raise ExecutionError(
                f"the observation is not in {self.gym_env.observation_space}: "
                f"{explain_errors(error)}; correct the environment's observation_space"
            ) from error


def make_gymnasium_builder(env_id: str) -> Builder:
    """Return a function that creates environments with an id and options of `gymnasium.make`.

    Raises:
        NotFoundError: the id is not registered.
        ConfigError: a required library is missing.
    """
    _find_spec(env_id)

    def build(**options: Any) -> AnyEnvironment:
        try:
            options_json = orjson.dumps(options, option=orjson.OPT_SORT_KEYS)
        except TypeError as error:
            raise ConfigError(f"options must be JSON, got {options}: {error}") from None
        return _make_class(env_id, options_json)()

    return build


@functools.lru_cache(maxsize=64)
def _make_class(env_id: str, options_json: bytes) -> type[GymnasiumEnvironment]:
    """Create the class for an id and its options, typed by the spaces of a sample environment."""
    options: JsonObject = orjson.loads(options_json)
    action_names: Sequence[str] = options.pop("action_names", ())
    instructions: str = options.pop("instructions", "")
    picture_columns: int = options.pop("picture_columns", 0)
    options = _add_text_rendering(env_id, options)
    sample_env = make_gymnasium(env_id, options)
    try:
        action_space = sample_env.action_space
        action_codec = make_codec(action_space, "action")
        observation_codec = make_codec(sample_env.observation_space, "observation")
        base_name = env_id.rpartition(":")[2].rpartition("/")[2].rpartition("-v")[0]
        base_guide = find_guide(base_name)
        guide = replace(
            base_guide,
            action_names=tuple(action_names)
            or base_guide.action_names
            or _read_action_names(sample_env),
            instructions=instructions or _make_instructions(base_guide, sample_env),
        )
        if picture_columns:
            require_picture(sample_env.observation_space, picture_columns)
    finally:
        sample_env.close()
    action_type = create_model("GymnasiumAction", __base__=Action, action=action_codec.annotation)
    has_text_rendering = options.get("render_mode") == _TEXT_RENDER_MODE
    class_attributes = {
        "__doc__": f"Gymnasium's {env_id}.",
        "name": f"{GYMNASIUM}:{env_id}",
        "description": f"Gymnasium's {env_id}",
        "version": f"{gymnasium.__version__}",
        "action_type": action_type,
        "observation_type": _make_observation_type(
            observation_codec, action_space, has_text_rendering, bool(picture_columns)
        ),
        "env_id": env_id,
        "gymnasium_options": options,
        "renderer": GymnasiumRenderer(env_id, action_type, action_space, guide),
        "action_codec": action_codec,
        "observation_codec": observation_codec,
        "picture_columns": picture_columns,
    }
    return type("GymnasiumEnvironment", (GymnasiumEnvironment,), class_attributes)


def _make_observation_type(
    codec: SpaceCodec, space: AnySpace, has_text_rendering: bool, has_picture: bool
) -> type[Observation]:
    fields: dict[str, Any] = {"observation": codec.annotation}
    if isinstance(space, spaces.Discrete):
        description = "Legal actions: those that `action_mask` allows, or all without a mask."
        fields["legal_actions"] = (list[int], Field(description=description))
        if space.n > MAX_LISTED_ACTIONS:
            range_text = f"from {int(space.start)} to {int(space.start + space.n - 1)}"
            description = f"{description} Null if there are more than {MAX_LISTED_ACTIONS}."
            fields["legal_actions"] = (list[int] | None, Field(description=description))
            description = f"Number of legal actions, which are {range_text}."
            fields["num_legal_actions"] = (int, Field(description=description))
    if has_text_rendering:
        fields["rendered"] = (str, Field(description="The environment drawn as text."))
    if has_picture:
        description = "The picture in rows of digits, from 0 for black to 9 for white."
        fields["picture"] = (str, Field(description=description))
    return create_model("GymnasiumObservation", __base__=Observation, **fields)


def make_gymnasium(env_id: str, options: JsonObject) -> AnyGymnasiumEnv:
    """Create a Gymnasium environment.

    Raises:
        ConfigError: the options are invalid, or a required library is missing.
    """
    try:
        environment = gymnasium.make(env_id, **{"disable_env_checker": True, **options})
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _make_missing_library_error(env_id, error) from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"'{GYMNASIUM}:{env_id}' cannot be created: {error}") from error
    return InterfaceCheck(environment)


def _make_missing_library_error(env_id: str, error: Exception) -> ConfigError:
    """Return the error for a missing library. Gymnasium's message names the package to install."""
    message = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        message += f"; pip install {error.name.partition('.')[0]}"
    return ConfigError(f"'{GYMNASIUM}:{env_id}' needs a library: {message}")


def _find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    module_name, _, env_name = env_id.rpartition(":")
    try:
        if module_name:  # the module registers its environments when it is imported
            importlib.import_module(module_name)
        return gymnasium.spec(env_name)
    except ModuleNotFoundError as error:
        missing_module = error.name or module_name
        package_name = find_package_name(missing_module)
        raise NotFoundError(
            f"'{GYMNASIUM}:{env_id}' needs the module '{missing_module}', which is not installed;"
            f" pip install {package_name}"
        ) from error
    except gymnasium.error.Error as error:
        hint = (not module_name and suggest_registering_module(env_name)) or (
            did_you_mean(env_name, gymnasium.registry)
            or "`ludus env list --family gymnasium` prints all ids; for an id of another package,"
            " name the module that registers it: gymnasium:MODULE:ID"
        )
        raise NotFoundError(
            f"Gymnasium has no environment '{env_name}'; {hint} ({error})"
        ) from None


def _add_text_rendering(env_id: str, options: JsonObject) -> JsonObject:
    """Add text rendering to the options if the environment supports it and no mode is set."""
    if "render_mode" in options:
        return options
    env_class = _load_env_class(env_id)
    render_modes = getattr(env_class, "metadata", {}).get("render_modes", ())
    if _TEXT_RENDER_MODE not in render_modes:
        return options
    return {**options, "render_mode": _TEXT_RENDER_MODE}


def _load_env_class(env_id: str) -> Any:
    """Return the class or function that makes the environments of an id; None if there is none."""
    entry_point = _find_spec(env_id).entry_point
    try:
        return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except (gymnasium.error.Error, ImportError) as error:
        raise _make_missing_library_error(env_id, error) from error


def list_gymnasium_options(env_id: str) -> list[Option]:
    """Return the options of an id, with the defaults that the id sets, then the adapter's own.

    Raises:
        NotFoundError: the id is not registered.
        ConfigError: a required library is missing.
    """
    env_class, spec = _load_env_class(env_id), _find_spec(env_id)
    options = list_parameters(env_class) if env_class is not None else []
    defaults = {**spec.kwargs, "max_episode_steps": spec.max_episode_steps}
    return [
        replace(option, default=format_default(defaults.get(option.name, option.default)))
        for option in (*options, *list_parameters(_declare_own_options))
        if option.name != "render_mode"  # the adapter chooses it
    ]


def _declare_own_options(
    max_episode_steps: int | None = None,
    action_names: list[str] | None = None,
    instructions: str = "",
    picture_columns: int = 0,
) -> None:
    """Declare the options of every id, for `list_parameters`."""


def _make_instructions(guide: Guide, environment: AnyGymnasiumEnv) -> str:
    """Return the guide's instructions for the environment's options."""
    sentences = [guide.instructions] if guide.instructions else []
    parameter = inspect.signature(type(environment.unwrapped)).parameters.get("is_slippery")
    arguments = environment.spec.kwargs if environment.spec is not None else {}
    if arguments.get("is_slippery", parameter is not None and parameter.default):
        sentences += [guide.slippery_instructions] if guide.slippery_instructions else []
    num_steps = environment.spec.max_episode_steps if environment.spec is not None else None
    if num_steps is not None:
        sentences.append(f"An episode has at most {num_steps} steps.")
    return " ".join(sentences)


def _read_action_names(environment: AnyGymnasiumEnv) -> tuple[str, ...]:
    """Return the action names that Atari and similar environments declare."""
    get_meanings = getattr(environment.unwrapped, "get_action_meanings", None)
    return tuple(get_meanings()) if get_meanings is not None else ()


def _make_legal_fields(space: spaces.Discrete, info: JsonObject, is_over: bool) -> JsonObject:
    """Return the fields for legal actions. The list is null if it would be long."""
    action_mask, first_action, num_actions = info.get("action_mask"), int(space.start), int(space.n)
    if is_over:
        legal_numbers: Sequence[int] = ()
    elif action_mask is None:
        legal_numbers = range(first_action, first_action + num_actions)
    else:
        legal_numbers = [first_action + int(index) for index in np.flatnonzero(action_mask)]
    if num_actions <= MAX_LISTED_ACTIONS:
        return {"legal_actions": list(legal_numbers)}
    legal_actions = list(legal_numbers) if len(legal_numbers) <= MAX_LISTED_ACTIONS else None
    return {"legal_actions": legal_actions, "num_legal_actions": len(legal_numbers)}
