"""Guides to environments for language models, taken from Gymnasium's documentation.

Labels are in the order of the numbers that they describe. A guide has no labels for an observation
whose size is changed by options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Guide:
    """Instructions for an environment, and names for the numbers in its spaces."""

    action_names: tuple[str, ...] = ()
    """Names of the discrete actions, in order."""
    instructions: str = ""
    slippery_instructions: str = ""
    """Instructions that are added if the option `is_slippery` is on."""
    color_meanings: Mapping[str, str] = field(default_factory=dict)
    """Meaning of each color in a text picture, by its terminal code."""
    observation_labels: tuple[str, ...] = ()
    """Names of the numbers in an observation. The last numbers may have no names."""
    observation_size: int = 0
    """Number of numbers in an observation. 0 means the number of labels."""
    action_labels: tuple[str, ...] = ()
    """Names of the numbers in an action."""

    def find_observation_labels(self, num_values: int) -> tuple[str, ...]:
        """Return the labels of an observation by its size; empty if it has another size."""
        size = self.observation_size or len(self.observation_labels)
        return self.observation_labels if num_values == size else ()


def find_guide(base_name: str) -> Guide:
    """Return the guide to an environment by its name without module, namespace and version."""
    if base_name.partition("-")[0] in ("MiniGrid", "BabyAI"):
        return _GRID_WORLD_GUIDE
    return GUIDES.get(base_name.removesuffix("8x8").removesuffix("Slippery"), Guide())


def _fill(template: str, *names: str) -> tuple[str, ...]:
    return tuple(template.format(name) for name in names)


def _label_runner(part: str, joints: tuple[str, ...]) -> tuple[str, ...]:
    """Return the observation labels of a body that runs in a plane."""
    return (
        *(f"height of {part}", f"angle of {part}", *_fill("angle of {}", *joints)),
        *("speed in x", "speed in z", f"angular speed of {part}"),
        *_fill("angular speed of {}", *joints),
    )


_GRID_WORLD_GUIDE = Guide(
    ("LEFT", "RIGHT", "FORWARD", "PICKUP", "DROP", "TOGGLE", "DONE"),
    "You walk through rooms of square cells and do what `mission` says. LEFT and RIGHT turn you;"
    " TOGGLE opens what is in front of you. `direction` is where you look: 0 right, 1 down, 2"
    " left, 3 up. `image` is what you see of 7 columns, from your left to your right, each of 7"
    " cells, from far to near; you stand in the last cell of the fourth. A cell is [object,"
    " colour, state]. Objects: 0 unseen, 1 empty, 2 wall, 3 floor, 4 door, 5 key, 6 ball, 7 box,"
    " 8 goal, 9 lava. Colours: 0 red, 1 green, 2 blue, 3 purple, 4 yellow, 5 grey. States of"
    " doors: 0 open, 1 closed, 2 locked.",
)

_CHEETAH_JOINTS = (
    *("back thigh", "back shin", "back foot"),
    *("front thigh", "front shin", "front foot"),
)
_HOPPER_JOINTS = ("thigh", "leg", "foot")
_WALKER_JOINTS = ("right thigh", "right leg", "right foot", "left thigh", "left leg", "left foot")
_ANT_JOINTS = (
    *("front left hip", "front left ankle", "front right hip", "front right ankle"),
    *("back left hip", "back left ankle", "back right hip", "back right ankle"),
)
_LIMB_JOINTS = (
    *("right hip x", "right hip z", "right hip y", "right knee"),
    *("left hip x", "left hip z", "left hip y", "left knee"),
    *("right shoulder 1", "right shoulder 2", "right elbow"),
    *("left shoulder 1", "left shoulder 2", "left elbow"),
)
_HUMANOID_JOINTS = ("abdomen z", "abdomen y", "abdomen x", *_LIMB_JOINTS)
_ARM_JOINTS = (
    *("shoulder pan", "shoulder lift", "upper arm roll", "elbow flex"),
    *("forearm roll", "wrist flex", "wrist roll"),
)
_TORSO_POSE = (
    "height of the torso",
    *_fill("{} of the torso's orientation", "w", "x", "y", "z"),
)
_TORSO_SPEEDS = (
    *_fill("speed of the torso in {}", "x", "y", "z"),
    *_fill("angular speed of the torso about {}", "x", "y", "z"),
)
_HUMANOID_OBSERVATION = (
    *(*_TORSO_POSE, *_fill("angle of {}", *_HUMANOID_JOINTS)),
    *(*_TORSO_SPEEDS, *_fill("angular speed of {}", *_HUMANOID_JOINTS)),
)
_HUMANOID_TORQUES = _fill("torque of {}", "abdomen y", "abdomen z", "abdomen x", *_LIMB_JOINTS)

_CLASSIC_CONTROL_GUIDES = {
    "CartPole": Guide(
        ("LEFT", "RIGHT"),
        "Push the cart so that the pole stays up.",
        observation_labels=(
            *("position of the cart", "speed of the cart"),
            *("angle of the pole (radians, right is positive)", "angular speed of the pole"),
        ),
    ),
    "MountainCar": Guide(
        ("LEFT", "COAST", "RIGHT"),
        "Get the car out of the valley to position 0.5: swing back and forth to gain speed.",
        observation_labels=("position", "speed"),
    ),
    "MountainCarContinuous": Guide(
        instructions="Get the car out of the valley to position 0.45 with little force: swing back"
        " and forth to gain speed.",
        observation_labels=("position", "speed"),
        action_labels=("force, negative to the left",),
    ),
    "Acrobot": Guide(
        ("NEGATIVE", "NONE", "POSITIVE"),
        "Swing the lower link above the line by torque on the joint between the links. The first"
        " angle is 0 where the first link hangs down, the second is relative to the first link.",
        observation_labels=(
            *("cosine of the first angle", "sine of the first angle"),
            *("cosine of the second angle", "sine of the second angle"),
            *("angular speed of the first link", "angular speed of the second link"),
        ),
    ),
    "Pendulum": Guide(
        instructions="Swing the pendulum up and keep it upright, where its angle is 0, with little"
        " torque.",
        observation_labels=("cosine of the angle", "sine of the angle", "angular speed"),
        action_labels=("torque, positive counterclockwise",),
    ),
}

_BOX2D_GUIDES = {
    "LunarLander": Guide(
        ("NOTHING", "LEFT", "MAIN", "RIGHT"),
        "Land at (0, 0) by firing engines.",
        observation_labels=(
            *("x", "y", "speed in x", "speed in y", "angle", "angular speed"),
            *("left leg touches the ground (1)", "right leg touches the ground (1)"),
        ),
    ),
    "BipedalWalker": Guide(
        instructions="Walk to the right with two legs and do not fall. An action is how fast each"
        " joint is driven, from -1 to 1.",
        observation_labels=(
            *("angle of the hull", "angular speed of the hull", "speed in x", "speed in y"),
            *("angle of hip 1", "speed of hip 1", "angle of knee 1", "speed of knee 1"),
            "leg 1 touches the ground (1)",
            *("angle of hip 2", "speed of hip 2", "angle of knee 2", "speed of knee 2"),
            "leg 2 touches the ground (1)",
            *_fill("lidar {}", *map(str, range(1, 11))),
        ),
        action_labels=("hip 1", "knee 1", "hip 2", "knee 2"),
    ),
    "CarRacing": Guide(
        ("NOTHING", "RIGHT", "LEFT", "GAS", "BRAKE"),
        "Drive round the track, which is seen from above.",
        action_labels=("steering, -1 left to 1 right", "gas", "brake"),
    ),
}

_MUJOCO_GUIDES = {
    "HalfCheetah": Guide(
        instructions="Make the two-legged cheetah run forward, fast.",
        observation_labels=_label_runner("the front tip", _CHEETAH_JOINTS),
        action_labels=_fill("torque of {}", *_CHEETAH_JOINTS),
    ),
    "Hopper": Guide(
        instructions="Make the one-legged body hop forward and do not fall.",
        observation_labels=_label_runner("the torso", _HOPPER_JOINTS),
        action_labels=_fill("torque of {}", *_HOPPER_JOINTS),
    ),
    "Walker2d": Guide(
        instructions="Make the two-legged body walk forward and do not fall.",
        observation_labels=_label_runner("the torso", _WALKER_JOINTS),
        action_labels=_fill("torque of {}", *_WALKER_JOINTS),
    ),
    "Swimmer": Guide(
        instructions="Make the chain of three links swim to the right, fast.",
        observation_labels=(
            *("angle of the front link", "angle of joint 1", "angle of joint 2"),
            *("speed of the tip in x", "speed of the tip in y"),
            *_fill("angular speed of {}", "the front link", "joint 1", "joint 2"),
        ),
        action_labels=("torque of joint 1", "torque of joint 2"),
    ),
    "Ant": Guide(
        instructions="Make the four-legged body walk forward, in x, and do not fall.",
        observation_labels=(
            *(*_TORSO_POSE, *_fill("angle of {}", *_ANT_JOINTS)),
            *(*_TORSO_SPEEDS, *_fill("angular speed of {}", *_ANT_JOINTS)),
        ),
        observation_size=105,
        action_labels=_fill("torque of {}", *_ANT_JOINTS[-2:], *_ANT_JOINTS[:-2]),
    ),
    "Humanoid": Guide(
        instructions="Make the two-legged body walk forward and do not fall.",
        observation_labels=_HUMANOID_OBSERVATION,
        observation_size=348,
        action_labels=_HUMANOID_TORQUES,
    ),
    "HumanoidStandup": Guide(
        instructions="Make the body that lies on the ground stand up.",
        observation_labels=_HUMANOID_OBSERVATION,
        observation_size=348,
        action_labels=_HUMANOID_TORQUES,
    ),
    "InvertedPendulum": Guide(
        instructions="Push the cart so that the pole stays up.",
        observation_labels=(
            *("position of the cart", "angle of the pole"),
            *("speed of the cart", "angular speed of the pole"),
        ),
        action_labels=("force on the cart",),
    ),
    "InvertedDoublePendulum": Guide(
        instructions="Push the cart so that the two poles, one on the other, stay up.",
        observation_labels=(
            "position of the cart",
            *("sine of the first pole's angle", "sine of the second pole's angle"),
            *("cosine of the first pole's angle", "cosine of the second pole's angle"),
            *("speed of the cart", "angular speed of the first pole"),
            *("angular speed of the second pole", "constraint force in x"),
        ),
        action_labels=("force on the cart",),
    ),
    "Reacher": Guide(
        instructions="Move the tip of the two-jointed arm to the target.",
        observation_labels=(
            *("cosine of the first angle", "cosine of the second angle"),
            *("sine of the first angle", "sine of the second angle"),
            *("x of the target", "y of the target"),
            *("angular speed of the first arm", "angular speed of the second arm"),
            *("x from target to tip", "y from target to tip"),
        ),
        action_labels=("torque of the first joint", "torque of the second joint"),
    ),
    "Pusher": Guide(
        instructions="Push the object to the goal with the tip of the arm.",
        observation_labels=(
            *(
                *_fill("angle of {}", *_ARM_JOINTS),
                *_fill("angular speed of {}", *_ARM_JOINTS),
            ),
            *_fill("{} of the tip", "x", "y", "z"),
            *_fill("{} of the object", "x", "y", "z"),
            *_fill("{} of the goal", "x", "y", "z"),
        ),
        action_labels=_fill("torque of {}", *_ARM_JOINTS),
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
        color_meanings={
            "34;1": "passenger",
            "35": "destination",
            "43": "taxi",
            "42": "taxi with passenger",
        },
    ),
    "Blackjack": Guide(
        ("STICK", "HIT"),
        "You play blackjack. The observation is your sum, the dealer's open card (1 is an ace),"
        " and whether you hold an ace that counts 11 (1) or not (0).",
    ),
    **_CLASSIC_CONTROL_GUIDES,
    **_BOX2D_GUIDES,
    **_MUJOCO_GUIDES,
}
"""Guides by the environment's name without version."""
