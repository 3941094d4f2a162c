"""Guides to environments for language models, taken from Gymnasium's documentation.

Names are in the order of the numbers they describe. If options change the number of numbers, the
guide does not name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Guide:
    """A guide to an environment, in addition to its spaces."""

    names: tuple[str, ...] = ()
    """Names of the discrete actions, in order."""
    instructions: str = ""
    slippery_instructions: str = ""
    """Instructions that are added if the option `is_slippery` is on."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Meaning of a color in the picture, by its terminal code."""
    numbers: tuple[str, ...] = ()
    """Names of the numbers of an observation. The last numbers may have no names."""
    num_numbers: int = 0
    """Number of numbers in an observation. 0 means the number of names."""
    controls: tuple[str, ...] = ()
    """Names of the numbers of an action."""

    def number_names(self, num_numbers: int) -> tuple[str, ...]:
        """Return the names of an observation's numbers; empty if it has another size."""
        return self.numbers if num_numbers == (self.num_numbers or len(self.numbers)) else ()


def find_guide(base_name: str) -> Guide:
    """Return the guide to an environment by its name without module, namespace and version."""
    if base_name.partition("-")[0] in ("MiniGrid", "BabyAI"):
        return _GRID
    return GUIDES.get(base_name.removesuffix("8x8"), Guide())


def _format_each(form: str, *parts: str) -> tuple[str, ...]:
    return tuple(form.format(part) for part in parts)


_GRID = Guide(
    ("LEFT", "RIGHT", "FORWARD", "PICKUP", "DROP", "TOGGLE", "DONE"),
    "You walk through rooms of square cells and do what `mission` says. LEFT and RIGHT turn you;"
    " TOGGLE opens what is in front of you. `direction` is where you look: 0 right, 1 down, 2"
    " left, 3 up. `image` is what you see of 7 columns, from your left to your right, each of 7"
    " cells, from far to near; you stand in the last cell of the fourth. A cell is [object,"
    " colour, state]. Objects: 0 unseen, 1 empty, 2 wall, 3 floor, 4 door, 5 key, 6 ball, 7 box,"
    " 8 goal, 9 lava. Colours: 0 red, 1 green, 2 blue, 3 purple, 4 yellow, 5 grey. States of"
    " doors: 0 open, 1 closed, 2 locked.",
)

_CHEETAH = ("back thigh", "back shin", "back foot", "front thigh", "front shin", "front foot")
_HOPPER = ("thigh", "leg", "foot")
_WALKER = ("right thigh", "right leg", "right foot", "left thigh", "left leg", "left foot")
_ANT = (
    *("front left hip", "front left ankle", "front right hip", "front right ankle"),
    *("back left hip", "back left ankle", "back right hip", "back right ankle"),
)
_LIMBS = (
    *("right hip x", "right hip z", "right hip y", "right knee"),
    *("left hip x", "left hip z", "left hip y", "left knee"),
    *("right shoulder 1", "right shoulder 2", "right elbow"),
    *("left shoulder 1", "left shoulder 2", "left elbow"),
)
_HUMANOID = ("abdomen z", "abdomen y", "abdomen x", *_LIMBS)
_ARM = (
    *("shoulder pan", "shoulder lift", "upper arm roll", "elbow flex"),
    *("forearm roll", "wrist flex", "wrist roll"),
)
_TORSO = ("height of the torso", *_format_each("{} of the torso's orientation", "w", "x", "y", "z"))
_TORSO_SPEEDS = (
    *_format_each("speed of the torso in {}", "x", "y", "z"),
    *_format_each("angular speed of the torso about {}", "x", "y", "z"),
)
_HUMANOID_NUMBERS = (
    *(*_TORSO, *_format_each("angle of {}", *_HUMANOID)),
    *(*_TORSO_SPEEDS, *_format_each("angular speed of {}", *_HUMANOID)),
)
_HUMANOID_TORQUES = _format_each("torque of {}", "abdomen y", "abdomen z", "abdomen x", *_LIMBS)

_CLASSIC_CONTROL = {
    "CartPole": Guide(
        ("LEFT", "RIGHT"),
        "Push the cart so that the pole stays up.",
        numbers=(
            *("position of the cart", "speed of the cart"),
            *("angle of the pole (radians, right is positive)", "angular speed of the pole"),
        ),
    ),
    "MountainCar": Guide(
        ("LEFT", "COAST", "RIGHT"),
        "Get the car out of the valley to position 0.5: swing back and forth to gain speed.",
        numbers=("position", "speed"),
    ),
    "MountainCarContinuous": Guide(
        instructions="Get the car out of the valley to position 0.45 with little force: swing back"
        " and forth to gain speed.",
        numbers=("position", "speed"),
        controls=("force, negative to the left",),
    ),
    "Acrobot": Guide(
        ("NEGATIVE", "NONE", "POSITIVE"),
        "Swing the lower link above the line by torque on the joint between the links. The first"
        " angle is 0 where the first link hangs down, the second is relative to the first link.",
        numbers=(
            *("cosine of the first angle", "sine of the first angle"),
            *("cosine of the second angle", "sine of the second angle"),
            *("angular speed of the first link", "angular speed of the second link"),
        ),
    ),
    "Pendulum": Guide(
        instructions="Swing the pendulum up and keep it upright, where its angle is 0, with little"
        " torque.",
        numbers=("cosine of the angle", "sine of the angle", "angular speed"),
        controls=("torque, positive counterclockwise",),
    ),
}

_BOX2D = {
    "LunarLander": Guide(
        ("NOTHING", "LEFT", "MAIN", "RIGHT"),
        "Land at (0, 0) by firing engines.",
        numbers=(
            *("x", "y", "speed in x", "speed in y", "angle", "angular speed"),
            *("left leg touches the ground (1)", "right leg touches the ground (1)"),
        ),
    ),
    "BipedalWalker": Guide(
        instructions="Walk to the right with two legs and do not fall. An action is how fast each"
        " joint is driven, from -1 to 1.",
        numbers=(
            *("angle of the hull", "angular speed of the hull", "speed in x", "speed in y"),
            *("angle of hip 1", "speed of hip 1", "angle of knee 1", "speed of knee 1"),
            "leg 1 touches the ground (1)",
            *("angle of hip 2", "speed of hip 2", "angle of knee 2", "speed of knee 2"),
            "leg 2 touches the ground (1)",
            *_format_each("lidar {}", *map(str, range(1, 11))),
        ),
        controls=("hip 1", "knee 1", "hip 2", "knee 2"),
    ),
    "CarRacing": Guide(
        ("NOTHING", "RIGHT", "LEFT", "GAS", "BRAKE"),
        "Drive round the track, which is seen from above.",
        controls=("steering, -1 left to 1 right", "gas", "brake"),
    ),
}

_MUJOCO = {
    "HalfCheetah": Guide(
        instructions="Make the two-legged cheetah run forward, fast.",
        numbers=(
            *(
                "height of the front tip",
                "angle of the front tip",
                *_format_each("angle of {}", *_CHEETAH),
            ),
            *("speed in x", "speed in z", "angular speed of the front tip"),
            *_format_each("angular speed of {}", *_CHEETAH),
        ),
        controls=_format_each("torque of {}", *_CHEETAH),
    ),
    "Hopper": Guide(
        instructions="Make the one-legged body hop forward and do not fall.",
        numbers=(
            *("height of the torso", "angle of the torso", *_format_each("angle of {}", *_HOPPER)),
            *("speed in x", "speed in z", "angular speed of the torso"),
            *_format_each("angular speed of {}", *_HOPPER),
        ),
        controls=_format_each("torque of {}", *_HOPPER),
    ),
    "Walker2d": Guide(
        instructions="Make the two-legged body walk forward and do not fall.",
        numbers=(
            *("height of the torso", "angle of the torso", *_format_each("angle of {}", *_WALKER)),
            *("speed in x", "speed in z", "angular speed of the torso"),
            *_format_each("angular speed of {}", *_WALKER),
        ),
        controls=_format_each("torque of {}", *_WALKER),
    ),
    "Swimmer": Guide(
        instructions="Make the chain of three links swim to the right, fast.",
        numbers=(
            *("angle of the front link", "angle of joint 1", "angle of joint 2"),
            *("speed of the tip in x", "speed of the tip in y"),
            *_format_each("angular speed of {}", "the front link", "joint 1", "joint 2"),
        ),
        controls=("torque of joint 1", "torque of joint 2"),
    ),
    "Ant": Guide(
        instructions="Make the four-legged body walk forward, in x, and do not fall.",
        numbers=(
            *(*_TORSO, *_format_each("angle of {}", *_ANT)),
            *(*_TORSO_SPEEDS, *_format_each("angular speed of {}", *_ANT)),
        ),
        num_numbers=105,
        controls=_format_each("torque of {}", *_ANT[-2:], *_ANT[:-2]),
    ),
    "Humanoid": Guide(
        instructions="Make the two-legged body walk forward and do not fall.",
        numbers=_HUMANOID_NUMBERS,
        num_numbers=348,
        controls=_HUMANOID_TORQUES,
    ),
    "HumanoidStandup": Guide(
        instructions="Make the body that lies on the ground stand up.",
        numbers=_HUMANOID_NUMBERS,
        num_numbers=348,
        controls=_HUMANOID_TORQUES,
    ),
    "InvertedPendulum": Guide(
        instructions="Push the cart so that the pole stays up.",
        numbers=(
            *("position of the cart", "angle of the pole"),
            *("speed of the cart", "angular speed of the pole"),
        ),
        controls=("force on the cart",),
    ),
    "InvertedDoublePendulum": Guide(
        instructions="Push the cart so that the two poles, one on the other, stay up.",
        numbers=(
            "position of the cart",
            *("sine of the first pole's angle", "sine of the second pole's angle"),
            *("cosine of the first pole's angle", "cosine of the second pole's angle"),
            *("speed of the cart", "angular speed of the first pole"),
            *("angular speed of the second pole", "constraint force in x"),
        ),
        controls=("force on the cart",),
    ),
    "Reacher": Guide(
        instructions="Move the tip of the two-jointed arm to the target.",
        numbers=(
            *("cosine of the first angle", "cosine of the second angle"),
            *("sine of the first angle", "sine of the second angle"),
            *("x of the target", "y of the target"),
            *("angular speed of the first arm", "angular speed of the second arm"),
            *("x from target to tip", "y from target to tip"),
        ),
        controls=("torque of the first joint", "torque of the second joint"),
    ),
    "Pusher": Guide(
        instructions="Push the object to the goal with the tip of the arm.",
        numbers=(
            *(*_format_each("angle of {}", *_ARM), *_format_each("angular speed of {}", *_ARM)),
            *_format_each("{} of the tip", "x", "y", "z"),
            *_format_each("{} of the object", "x", "y", "z"),
            *_format_each("{} of the goal", "x", "y", "z"),
        ),
        controls=_format_each("torque of {}", *_ARM),
    ),
}

GUIDES: dict[str, Guide] = {
    "FrozenLake": Guide(
        ("LEFT", "DOWN", "RIGHT", "UP"),
        "Cross the frozen lake from the start S to the goal G. F is ice, and a hole H ends the"
        " game. [ ] marks where you are.",
        "You may slip sideways.",
    ),
    "CliffWalking": Guide(
        ("UP", "RIGHT", "DOWN", "LEFT"),
        "Walk from the lower left to the goal T in few steps. x is you; the cliff C costs 100"
        " and sends you back.",
        "You may slip sideways.",
    ),
    "Taxi": Guide(
        ("SOUTH", "NORTH", "EAST", "WEST", "PICKUP", "DROPOFF"),
        "Drive the taxi to the passenger, PICKUP, drive to the destination, DROPOFF. Both are"
        " among R, G, Y, B; | is a wall.",
        marks={"34;1": "passenger", "35": "destination", "43": "taxi", "42": "taxi with passenger"},
    ),
    "Blackjack": Guide(
        ("STICK", "HIT"),
        "You play blackjack. The observation is your sum, the dealer's open card (1 is an ace),"
        " and whether you hold an ace that counts 11 (1) or not (0).",
    ),
    **_CLASSIC_CONTROL,
    **_BOX2D,
    **_MUJOCO,
}
"""Guides by the environment's name without version."""
