"""Guides to environments for language models, taken from Gymnasium's documentation.

Labels are in the order of the numbers that they describe. A guide has no labels for an observation
whose size is changed by options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Guide:
    """Instructions for an environment, and names for the numbers in its spaces."""

    action_names: tuple[str, ...] = ()
    """Names of the discrete actions, in order."""
    instructions: str = ""
    slippery_instructions: str = ""
    """Instructions that are added if the option `is_slippery` is on."""
    observation_labels: tuple[str, ...] = ()
    """Names of the numbers in an observation. The last numbers may have no names."""
    observation_size: int = 0
    """Number of numbers in an observation. 0 means the number of labels."""
    action_labels: tuple[str, ...] = ()
    """Names of the numbers in an action."""
    describe: Callable[[Any], str] | None = None
    """Function that describes an observation in sentences; "" if the observation has an unexpected
    form. None shows the numbers."""
    has_complete_picture: bool = False
    """True if the text picture shows all that the observation contains."""

    def find_observation_labels(self, num_values: int) -> tuple[str, ...]:
        """Return the labels of an observation by its size; empty if it has another size."""
        size = self.observation_size or len(self.observation_labels)
        return self.observation_labels if num_values == size else ()


def find_guide(base_name: str) -> Guide:
    """Return the guide to an environment by its name without module, namespace and version."""
    if base_name.partition("-")[0] in ("MiniGrid", "BabyAI"):
        return _GRID_WORLD_GUIDE
    return GUIDES.get(base_name.removesuffix("8x8").removesuffix("Slippery"), Guide())


def _describe_cart_pole(observation: Any) -> str:
    if not isinstance(observation, list | tuple) or len(observation) != 4:
        return ""
    position, speed, angle, angular_speed = observation
    return (
        f"Cart position {position:.3f}, speed {speed:.3f} (right is positive). Pole angle"
        f" {angle:.3f} radians, angular speed {angular_speed:.3f} (to the right is positive)."
    )


def _describe_mountain_car(observation: Any) -> str:
    if not isinstance(observation, list | tuple) or len(observation) != 2:
        return ""
    position, speed = observation
    return f"Position {position:.3f}, speed {speed:.4f} (right is positive)."


def _describe_blackjack(observation: Any) -> str:
    if not isinstance(observation, list | tuple) or len(observation) != 3:
        return ""
    total, dealer_card, has_usable_ace = observation
    kind = "soft: an ace counts 11" if has_usable_ace else "hard"
    dealer_text = "an ace" if dealer_card == 1 else dealer_card
    return f"You hold {total} ({kind}). The dealer shows {dealer_text}."


def _describe_taxi(observation: Any) -> str:
    if not isinstance(observation, int) or not 0 <= observation < _NUM_TAXI_STATES:
        return ""
    rest, destination = divmod(observation, 4)
    rest, passenger = divmod(rest, 5)
    row, column = divmod(rest, 5)
    passenger_text = (
        f"The passenger waits at {_TAXI_PLACES[passenger]}."
        if passenger < len(_TAXI_PLACES)
        else "The passenger is in the taxi."
    )
    return (
        f"The taxi is at row {row}, column {column}. {passenger_text} The destination is"
        f" {_TAXI_PLACES[destination]}."
    )


_TAXI_PLACES = (
    *("R (row 0, column 0)", "G (row 0, column 4)"),
    *("Y (row 4, column 0)", "B (row 4, column 3)"),
)
_NUM_TAXI_STATES = 500


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
        "Balance the pole on the cart. Each step pays 1 point. The episode ends when the pole"
        " tilts more than 0.21 radians (12 degrees) or the cart leaves the positions from -2.4 to"
        " 2.4. LEFT and RIGHT push the cart to that side for 0.02 seconds.",
        observation_labels=(
            *("position of the cart", "speed of the cart"),
            *("angle of the pole (radians, right is positive)", "angular speed of the pole"),
        ),
        describe=_describe_cart_pole,
    ),
    "MountainCar": Guide(
        ("LEFT", "COAST", "RIGHT"),
        "Drive the car out of the valley to position 0.5. The engine is too weak for the slope, so"
        " swing back and forth to gain speed. The lowest point is near position -0.5, and a wall"
        " is at -1.2. LEFT and RIGHT accelerate to that side, COAST does not. Each step costs 1"
        " point.",
        observation_labels=("position", "speed"),
        describe=_describe_mountain_car,
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
        "Cross the frozen lake from the start S to the goal G, which pays 1 point; all else pays"
        " nothing. F is ice, and a hole H ends the game. [ ] marks where you are.",
        "You may slip sideways.",
        has_complete_picture=True,
    ),
    "CliffWalking": Guide(
        ("UP", "RIGHT", "DOWN", "LEFT"),
        "Walk from the lower left to the goal T in few steps. x is you. Each step costs 1 point;"
        " the cliff C costs 100 and sends you back to the start.",
        "You may slip sideways.",
        has_complete_picture=True,
    ),
    "Taxi": Guide(
        ("SOUTH", "NORTH", "EAST", "WEST", "PICKUP", "DROPOFF"),
        "Drive the taxi to the passenger, PICKUP, drive to the destination, DROPOFF. Each step"
        " costs 1 point, a wrong PICKUP or DROPOFF costs 10, and the delivery pays 20. The map has"
        " the rows 0 to 4 from north to south and the columns 0 to 4 from west to east. | is a"
        " wall, : is open.",
        describe=_describe_taxi,
    ),
    "Blackjack": Guide(
        ("STICK", "HIT"),
        "Get closer to 21 than the dealer without exceeding 21. Jack, queen and king count 10, an"
        " ace counts 1 or 11. HIT takes a card. STICK ends your turn; then the dealer draws up to"
        " 17 or more. A win pays 1 point, a loss costs 1.",
        describe=_describe_blackjack,
    ),
    **_CLASSIC_CONTROL_GUIDES,
    **_BOX2D_GUIDES,
    **_MUJOCO_GUIDES,
}
"""Guides by the environment's name without version."""
