"""Any environment that `gymnasium.make` knows, as an `Environment`.

    gymnasium:<id>, options --gymnasium_builder--> a class made for the id's spaces
                                                       --()--> environment

Action and observation types follow from the spaces. Options go to `gymnasium.make`, but for
`action_names`, `instructions` and `picture_columns`, which say how language models see the
environment. One that shows nothing but a picture has no text renderer without the last.
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
from ludus.env.adapters.gymnasium.known import Play, known_of
from ludus.env.adapters.gymnasium.pictures import picture_rows, require_picture
from ludus.env.adapters.gymnasium.spaces import (
    AnySpace,
    SpaceCodec,
    Tensors,
    codec_of,
    json_safe,
)
from ludus.env.adapters.gymnasium.success import Ending, success_of
from ludus.env.adapters.gymnasium.text import (
    MAX_LISTED_ACTIONS,
    GymnasiumRenderer,
    without_colours,
)
from ludus.env.environment import AnyEnvironment, Builder, Environment
from ludus.env.types import Action, JsonObject, Observation, State, Transition
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
    """Where the episode stands."""

    episode_return: float = 0.0


class GymnasiumEnvironment(Environment[Action, Observation, GymnasiumState]):
    """One Gymnasium environment; subclasses are made for each id and its options."""

    state_type = GymnasiumState

    env_id: ClassVar[str]
    make_options: ClassVar[JsonObject]
    renderer: ClassVar[GymnasiumRenderer]
    action_codec: ClassVar[SpaceCodec]
    observation_codec: ClassVar[SpaceCodec]
    picture_columns: ClassVar[int]
    """How wide the picture is drawn in digits; 0 draws none."""

    def __init__(self) -> None:
        self._gymnasium = make_gymnasium(self.env_id, self.make_options)
        self._space = self._gymnasium.action_space
        self._is_text = self._gymnasium.render_mode == _ANSI
        self._is_playing = False
        self._state = GymnasiumState()
        is_seen = self._is_text or self.picture_columns or not self.observation_codec.is_tensor
        self.text_renderer = self.renderer if is_seen else None

    @property
    def options(self) -> JsonObject:
        """What `gymnasium.make` got."""
        return dict(self.make_options)

    def reset(self, *, seed: int | None = None, **options: Any) -> Transition[Observation]:
        """The first observation; options are Gymnasium's `options`."""
        if seed is None:  # Gymnasium would continue with the last episode's generator
            seed = secrets.randbits(_SEED_BITS)
        self._is_playing = False
        self._space.seed(seed)
        element, info = self._gymnasium.reset(seed=seed, options=options or None)
        self._is_playing = True
        self._state = GymnasiumState()
        return self._transition(element, info)

    def step(self, action: Action) -> Transition[Observation]:
        """What the action led to.

        Raises:
            IllegalActionError: it is not in the action space.
        """
        if not self._is_playing:
            raise EpisodeStateError(
                "expected a running episode, got a step before or after one; call reset",
                ErrorCode.EPISODE_OVER,
            )
        value: Any = dict(action)["action"]
        element = self.action_codec.decode(value)
        if element not in self._space:
            raise IllegalActionError(
                f"expected an action in {self._space}, got {value}; see /schema"
            )
        observed, reward, terminated, truncated, info = self._gymnasium.step(element)
        self._is_playing = not (terminated or truncated)
        self._state.step_count += 1
        self._state.episode_return += float(reward)
        success = None
        if not self._is_playing:
            total = self._state.episode_return
            ending = Ending(self._gymnasium, bool(terminated), float(reward), total, info)
            success = success_of(ending)
        return self._transition(
            observed, info, float(reward), bool(terminated), bool(truncated), success
        )

    @property
    def state(self) -> GymnasiumState:
        """Steps and return so far."""
        return self._state

    def close(self) -> None:
        """Close the environment."""
        self._gymnasium.close()

    def _transition(
        self,
        element: Any,
        info: JsonObject,
        reward: float | None = None,
        terminated: bool = False,
        truncated: bool = False,
        success: bool | None = None,
    ) -> Transition[Observation]:
        tensors: Tensors = {}
        fields: JsonObject = {"observation": self.observation_codec.encode(element, tensors)}
        if isinstance(self._space, spaces.Discrete):
            fields |= _legal_fields(self._space, info, terminated or truncated)
        if self.picture_columns:
            fields["picture"] = picture_rows(np.asarray(element), self.picture_columns)
        if self._is_text:
            fields["rendered"] = without_colours(
                str(self._gymnasium.render()), self.renderer.play.marks
            )
        return Transition(
            self.observation_type.model_validate(fields),
            reward,
            terminated,
            truncated,
            info=json_safe(info),
            tensors=tensors,
            success=success,
        )


def gymnasium_builder(env_id: str) -> Builder:
    """What makes environments of an id; options are `gymnasium.make`'s.

    Raises:
        NotFoundError: Gymnasium does not know the id.
        ConfigError: a library that the id needs is missing.
    """
    _spec_of(env_id)

    def build(**options: Any) -> AnyEnvironment:
        try:
            key = orjson.dumps(options, option=orjson.OPT_SORT_KEYS)
        except TypeError as error:
            raise ConfigError(f"expected options that are JSON, got {options}: {error}") from None
        return _class_of(env_id, key)()

    return build


@functools.lru_cache(maxsize=64)
def _class_of(env_id: str, options_json: bytes) -> type[GymnasiumEnvironment]:
    """The class for an id and its options: its types come from the spaces of one that is made."""
    options: JsonObject = orjson.loads(options_json)
    names: Sequence[str] = options.pop("action_names", ())
    instructions: str = options.pop("instructions", "")
    picture_columns: int = options.pop("picture_columns", 0)
    options = _with_text_rendering(env_id, options)
    sample = make_gymnasium(env_id, options)
    try:
        space = sample.action_space
        action_codec = codec_of(space, "action")
        observation_codec = codec_of(sample.observation_space, "observation")
        base_name = env_id.rpartition(":")[2].rpartition("/")[2].rpartition("-v")[0]
        known = known_of(base_name)
        play = replace(
            known,
            names=tuple(names) or known.names or _own_names(sample),
            instructions=instructions or _instructions(known, sample),
        )
        if picture_columns:
            require_picture(sample.observation_space, picture_columns)
    finally:
        sample.close()
    action_type = create_model("GymnasiumAction", __base__=Action, action=action_codec.annotation)
    renderer = GymnasiumRenderer(
        env_id,
        action_type,
        int(space.start) if isinstance(space, spaces.Discrete) else None,
        int(space.n) if isinstance(space, spaces.Discrete) else 0,
        play,
    )
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
        "renderer": renderer,
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
        said = "The actions that may be taken; those that `action_mask` allows where there is one."
        fields["legal_actions"] = (list[int], Field(description=said))
        if space.n > MAX_LISTED_ACTIONS:
            limits = f"out of {int(space.start)} to {int(space.start + space.n - 1)}"
            many = f"{said} Null where these are more than {MAX_LISTED_ACTIONS}."
            fields["legal_actions"] = (list[int] | None, Field(description=many))
            said = f"How many actions may be taken, {limits}."
            fields["num_legal_actions"] = (int, Field(description=said))
    if is_text:
        fields["rendered"] = (str, Field(description="The environment drawn as text."))
    if has_picture:
        said = "The picture in rows of digits, from 0 for black to 9 for white."
        fields["picture"] = (str, Field(description=said))
    return create_model("GymnasiumObservation", __base__=Observation, **fields)


def make_gymnasium(env_id: str, options: JsonObject) -> AnyGymnasium:
    """What `gymnasium.make` gives for an id.

    Raises:
        ConfigError: it cannot be made with these options, or a library that it needs is missing.
    """
    try:
        return gymnasium.make(env_id, **{"disable_env_checker": True, **options})
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _lacking(env_id, error) from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"'{GYMNASIUM}:{env_id}' cannot be made: {error}") from error


def _lacking(env_id: str, error: Exception) -> ConfigError:
    """The sentence for a library that is not there; Gymnasium's own names what to install."""
    said = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        said += f"; pip install {error.name.partition('.')[0]}"
    return ConfigError(f"'{GYMNASIUM}:{env_id}' needs a library: {said}")


def _spec_of(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    module, _, name = env_id.rpartition(":")
    try:
        if module:  # registers its environments while it is imported
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ModuleNotFoundError as error:
        raise NotFoundError(
            f"'{GYMNASIUM}:{env_id}' needs the module '{error.name}', which is not installed"
        ) from error
    except gymnasium.error.Error as error:
        hint = did_you_mean(name, gymnasium.registry) or "see gymnasium.pprint_registry()"
        raise NotFoundError(f"Gymnasium has no environment '{name}'; {hint} ({error})") from None


def _with_text_rendering(env_id: str, options: JsonObject) -> JsonObject:
    """The options, with rendering as text where the environment can and nobody chose."""
    entry_point = _spec_of(env_id).entry_point
    if "render_mode" in options or entry_point is None:
        return options
    try:
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except (gymnasium.error.Error, ImportError) as error:
        raise _lacking(env_id, error) from error
    modes = getattr(creator, "metadata", {}).get("render_modes", ())
    return {**options, "render_mode": _ANSI} if _ANSI in modes else options


def _instructions(known: Play, environment: AnyGymnasium) -> str:
    """What is known of the environment, as it was made."""
    default = inspect.signature(type(environment.unwrapped)).parameters.get("is_slippery")
    made_with = environment.spec.kwargs if environment.spec is not None else {}
    if made_with.get("is_slippery", default is not None and default.default):
        return f"{known.instructions} {known.when_slippery}".strip()
    return known.instructions


def _own_names(environment: AnyGymnasium) -> tuple[str, ...]:
    """The names that Atari and its like give their actions."""
    meanings = getattr(environment.unwrapped, "get_action_meanings", None)
    return tuple(meanings()) if meanings is not None else ()


def _legal_fields(space: spaces.Discrete, info: JsonObject, is_over: bool) -> JsonObject:
    """The legal actions, or how many they are where a list would be long."""
    mask, first, size = info.get("action_mask"), int(space.start), int(space.n)
    if is_over:
        legal: Sequence[int] = ()
    elif mask is None:
        legal = range(first, first + size)
    else:
        legal = [first + int(index) for index in np.flatnonzero(mask)]
    if size <= MAX_LISTED_ACTIONS:
        return {"legal_actions": list(legal)}
    listed = list(legal) if len(legal) <= MAX_LISTED_ACTIONS else None
    return {"legal_actions": listed, "num_legal_actions": len(legal)}
