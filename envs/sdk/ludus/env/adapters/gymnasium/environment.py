"""Adapter for all environments of `gymnasium.make`.

    gymnasium:<id>, options --gymnasium_builder--> class for the id's spaces --()--> environment

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
from pydantic import Field, create_model

from ludus.env.adapters import GYMNASIUM
from ludus.env.adapters.gymnasium.guides import Guide, find_guide
from ludus.env.adapters.gymnasium.spaces import (
    AnySpace,
    SpaceCodec,
    Tensors,
    json_safe,
    make_codec,
)
from ludus.env.adapters.gymnasium.success import find_success
from ludus.env.adapters.gymnasium.text import (
    MAX_LISTED_ACTIONS,
    GymnasiumRenderer,
    picture_rows,
    replace_colors,
    require_picture,
)
from ludus.env.environment import AnyEnvironment, Builder, Environment
from ludus.env.types import (
    Action,
    ActionT,
    JsonObject,
    Observation,
    ObservationT,
    State,
    Transition,
)
from ludus.proto.errors import (
    ConfigError,
    EpisodeStateError,
    ErrorCode,
    IllegalActionError,
    NotFoundError,
    did_you_mean,
)

AnyGymnasium = gymnasium.Env[Any, Any]
_SEED_BITS = 32
_ANSI = "ansi"


class GymnasiumState(State):
    """The state of the episode."""

    episode_return: float = 0.0


class GymnasiumEpisodes(Environment[ActionT, ObservationT, GymnasiumState]):
    """The part of an environment that plays the episodes of a Gymnasium environment."""

    state_type = GymnasiumState

    def __init__(self, environment: AnyGymnasium) -> None:
        self.gymnasium = environment
        self._is_playing = False
        self._state = GymnasiumState()

    @property
    def state(self) -> GymnasiumState:
        """The number of steps and the return until now."""
        return self._state

    def close(self) -> None:
        """Close the environment."""
        self.gymnasium.close()

    def start_episode(self, seed: int | None, options: JsonObject) -> tuple[Any, JsonObject]:
        """Reset the Gymnasium environment, and return its first element and info."""
        if seed is None:  # Gymnasium would otherwise continue with the last episode's generator
            seed = secrets.randbits(_SEED_BITS)
        self._is_playing = False
        self.gymnasium.action_space.seed(seed)
        element, info = self.gymnasium.reset(seed=seed, options=options or None)
        self._is_playing = True
        self._state = GymnasiumState()
        return element, info

    def require_episode(self) -> None:
        """Check that an episode is running."""
        if not self._is_playing:
            raise EpisodeStateError(
                "a step needs a running episode; call reset",
                ErrorCode.EPISODE_OVER,
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
            success = find_success(self.gymnasium, is_terminated, rewards[-1], episode_return, info)
        return Transition(
            observation,
            sum(rewards),
            is_terminated,
            is_truncated,
            info=json_safe(info),
            tensors=tensors,
            success=success,
        )


class GymnasiumEnvironment(GymnasiumEpisodes[Action, Observation]):
    """A Gymnasium environment, with a subclass for each id and its options."""

    env_id: ClassVar[str]
    make_options: ClassVar[JsonObject]
    renderer: ClassVar[GymnasiumRenderer]
    action_codec: ClassVar[SpaceCodec]
    observation_codec: ClassVar[SpaceCodec]
    picture_columns: ClassVar[int]
    """Width of the picture in digits; 0 means no picture."""

    def __init__(self) -> None:
        super().__init__(make_gymnasium(self.env_id, self.make_options))
        self._space = self.gymnasium.action_space
        self._is_text = self.gymnasium.render_mode == _ANSI
        has_text = self._is_text or self.picture_columns or not self.observation_codec.is_tensor
        self.text_renderer = self.renderer if has_text else None

    @property
    def options(self) -> JsonObject:
        """The options of `gymnasium.make`."""
        return dict(self.make_options)

    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[Observation]:
        """Return the first observation; `options` are passed to Gymnasium."""
        element, info = self.start_episode(seed, options)
        observation, tensors = self._observe(element, info, is_over=False)
        return Transition(observation, info=json_safe(info), tensors=tensors)

    def step(self, action: Action) -> Transition[Observation]:
        """Take an action and return its result.

        Raises:
            IllegalActionError: the action is not in the action space.
        """
        self.require_episode()
        value: Any = dict(action)["action"]
        element = self.action_codec.decode(value)
        if element not in self._space:
            raise IllegalActionError(
                f"expected an action in {self._space}, got {value}; see /schema"
            )
        element, reward, terminated, truncated, info = self.gymnasium.step(element)
        observation, tensors = self._observe(element, info, is_over=terminated or truncated)
        return self.make_transition(
            observation, [float(reward)], bool(terminated), bool(truncated), info, tensors
        )

    def _observe(
        self, element: Any, info: JsonObject, *, is_over: bool
    ) -> tuple[Observation, Tensors]:
        tensors: Tensors = {}
        fields: JsonObject = {"observation": self.observation_codec.encode(element, tensors)}
        if isinstance(self._space, spaces.Discrete):
            fields |= _legal_fields(self._space, info, is_over)
        if self.picture_columns:
            fields["picture"] = picture_rows(np.asarray(element), self.picture_columns)
        if self._is_text:
            fields["rendered"] = replace_colors(
                str(self.gymnasium.render()), self.renderer.guide.marks
            )
        return self.observation_type.model_validate(fields), tensors


def gymnasium_builder(env_id: str) -> Builder:
    """Return a function that creates environments with an id and options of `gymnasium.make`.

    Raises:
        NotFoundError: the id is not registered.
        ConfigError: a required library is missing.
    """
    _find_spec(env_id)

    def build(**options: Any) -> AnyEnvironment:
        try:
            key = orjson.dumps(options, option=orjson.OPT_SORT_KEYS)
        except TypeError as error:
            raise ConfigError(f"options must be JSON, got {options}: {error}") from None
        return _make_class(env_id, key)()

    return build


@functools.lru_cache(maxsize=64)
def _make_class(env_id: str, options_json: bytes) -> type[GymnasiumEnvironment]:
    """Create the class for an id and its options, with the types of a sample's spaces."""
    options: JsonObject = orjson.loads(options_json)
    names: Sequence[str] = options.pop("action_names", ())
    instructions: str = options.pop("instructions", "")
    picture_columns: int = options.pop("picture_columns", 0)
    options = _add_text_rendering(env_id, options)
    sample = make_gymnasium(env_id, options)
    try:
        space = sample.action_space
        action_codec = make_codec(space, "action")
        observation_codec = make_codec(sample.observation_space, "observation")
        base_name = env_id.rpartition(":")[2].rpartition("/")[2].rpartition("-v")[0]
        base_guide = find_guide(base_name)
        guide = replace(
            base_guide,
            names=tuple(names) or base_guide.names or _read_action_names(sample),
            instructions=instructions or _make_instructions(base_guide, sample),
        )
        if picture_columns:
            require_picture(sample.observation_space, picture_columns)
    finally:
        sample.close()
    action_type = create_model("GymnasiumAction", __base__=Action, action=action_codec.annotation)
    attributes = {
        "__doc__": f"Gymnasium's {env_id}.",
        "name": f"{GYMNASIUM}:{env_id}",
        "description": f"Gymnasium's {env_id}",
        "version": f"{gymnasium.__version__}",
        "action_type": action_type,
        "observation_type": _observation_type(
            observation_codec, space, options.get("render_mode") == _ANSI, bool(picture_columns)
        ),
        "env_id": env_id,
        "make_options": options,
        "renderer": GymnasiumRenderer(env_id, action_type, space, guide),
        "action_codec": action_codec,
        "observation_codec": observation_codec,
        "picture_columns": picture_columns,
    }
    return type("GymnasiumEnvironment", (GymnasiumEnvironment,), attributes)


def _observation_type(
    codec: SpaceCodec, space: AnySpace, is_text: bool, has_picture: bool
) -> type[Observation]:
    fields: dict[str, Any] = {"observation": codec.annotation}
    if isinstance(space, spaces.Discrete):
        text = "Legal actions: those that `action_mask` allows, or all actions without a mask."
        fields["legal_actions"] = (list[int], Field(description=text))
        if space.n > MAX_LISTED_ACTIONS:
            limits = f"from {int(space.start)} to {int(space.start + space.n - 1)}"
            text = f"{text} Null if there are more than {MAX_LISTED_ACTIONS}."
            fields["legal_actions"] = (list[int] | None, Field(description=text))
            text = f"Number of legal actions, which are {limits}."
            fields["num_legal_actions"] = (int, Field(description=text))
    if is_text:
        fields["rendered"] = (str, Field(description="The environment drawn as text."))
    if has_picture:
        text = "The picture in rows of digits, from 0 for black to 9 for white."
        fields["picture"] = (str, Field(description=text))
    return create_model("GymnasiumObservation", __base__=Observation, **fields)


def make_gymnasium(env_id: str, options: JsonObject) -> AnyGymnasium:
    """Create a Gymnasium environment.

    Raises:
        ConfigError: the options are invalid, or a required library is missing.
    """
    try:
        return gymnasium.make(env_id, **{"disable_env_checker": True, **options})
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _missing_library_error(env_id, error) from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"'{GYMNASIUM}:{env_id}' cannot be created: {error}") from error


def _missing_library_error(env_id: str, error: Exception) -> ConfigError:
    """Return the error for a missing library; Gymnasium's message names what to install."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        text += f"; pip install {error.name.partition('.')[0]}"
    return ConfigError(f"'{GYMNASIUM}:{env_id}' needs a library: {text}")


def _find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    module, _, name = env_id.rpartition(":")
    try:
        if module:  # the module registers its environments when it is imported
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ModuleNotFoundError as error:
        raise NotFoundError(
            f"'{GYMNASIUM}:{env_id}' needs the module '{error.name}', which is not installed"
        ) from error
    except gymnasium.error.Error as error:
        hint = did_you_mean(name, gymnasium.registry) or "see gymnasium.pprint_registry()"
        raise NotFoundError(f"Gymnasium has no environment '{name}'; {hint} ({error})") from None


def _add_text_rendering(env_id: str, options: JsonObject) -> JsonObject:
    """Add text rendering to the options if the environment supports it and no mode is set."""
    entry_point = _find_spec(env_id).entry_point
    if "render_mode" in options or entry_point is None:
        return options
    try:
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except (gymnasium.error.Error, ImportError) as error:
        raise _missing_library_error(env_id, error) from error
    modes = getattr(creator, "metadata", {}).get("render_modes", ())
    return {**options, "render_mode": _ANSI} if _ANSI in modes else options


def _make_instructions(guide: Guide, environment: AnyGymnasium) -> str:
    """Return the guide's instructions for the environment's options."""
    default = inspect.signature(type(environment.unwrapped)).parameters.get("is_slippery")
    arguments = environment.spec.kwargs if environment.spec is not None else {}
    if arguments.get("is_slippery", default is not None and default.default):
        return f"{guide.instructions} {guide.slippery_instructions}".strip()
    return guide.instructions


def _read_action_names(environment: AnyGymnasium) -> tuple[str, ...]:
    """Return the names of actions of Atari and similar environments."""
    meanings = getattr(environment.unwrapped, "get_action_meanings", None)
    return tuple(meanings()) if meanings is not None else ()


def _legal_fields(space: spaces.Discrete, info: JsonObject, is_over: bool) -> JsonObject:
    """Return the legal actions, or only their number if the list would be long."""
    mask, first_action, size = info.get("action_mask"), int(space.start), int(space.n)
    if is_over:
        legal: Sequence[int] = ()
    elif mask is None:
        legal = range(first_action, first_action + size)
    else:
        legal = [first_action + int(index) for index in np.flatnonzero(mask)]
    if size <= MAX_LISTED_ACTIONS:
        return {"legal_actions": list(legal)}
    legal_actions = list(legal) if len(legal) <= MAX_LISTED_ACTIONS else None
    return {"legal_actions": legal_actions, "num_legal_actions": len(legal)}
