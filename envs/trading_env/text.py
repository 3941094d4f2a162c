"""A market as text, answered with orders: "buy 3", "sell 2", "hold", "buy 3 B, sell 1 A".

compact   user:      94 97 101 cash 350 shares 6
rules     system:    what is traded, what it costs, and how to answer
          user:      Day 12 of ...; prices, oldest first

"buy" and "sell" without a number mean as much as there is.
"""

from __future__ import annotations

import re
from typing import Literal

from ludus.env import Message
from ludus.env.text.answers import extract_answer, quoted
from ludus.proto.errors import ActionParseError

from .models import TradingAction, TradingObservation
from .portfolio import affordable

TextStyle = Literal["compact", "rules"]

_QUANTITIES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Of an order that is offered; any other number may be said, too."""
_ORDER = re.compile(r"(buy|sell)(?: (\d{1,9}))?(?: ([^\s,]+))?", re.IGNORECASE)
_HOLD = "hold"


class TradingRenderer:
    """Text for one market.

    Args:
        has_quantities: offers orders of some sizes; else only "buy", "sell" and "hold".
    """

    def __init__(self, style: TextStyle, has_quantities: bool) -> None:
        self._style = style
        self._has_quantities = has_quantities

    def render(self, observation: TradingObservation, *, first: bool) -> list[Message]:
        """Prices and what is owned; in the style with rules, a system message before the first."""
        if self._style == "compact":
            return [{"role": "user", "content": _brief(observation)}]
        shown: Message = {"role": "user", "content": _prose(observation)}
        if not first:
            return [shown]
        names = ", ".join(observation.assets)
        rules = (
            f"You trade {names} and want to own more at the end than who buys at once and keeps."
            f" An order costs {observation.cost:.2%} of its worth; there is no credit. Answer with"
            " orders, for example <answer>buy 3</answer>, <answer>sell 2</answer> or"
            f" <answer>{_HOLD}</answer>; without a number, as much as there is."
        )
        if len(observation.assets) > 1:
            rules += f" Name the asset, as in buy 3 {observation.assets[-1]}; commas part orders."
        return [{"role": "system", "content": rules}, shown]

    def parse(self, text: str, observation: TradingObservation) -> TradingAction:
        """The orders that the text gives.

        Raises:
            ActionParseError: it gives none, or some that cannot be filled.
        """
        said = extract_answer(text) if self._style == "rules" else text
        said = " ".join(said.split())
        action = TradingAction()
        if said.casefold() == _HOLD:
            return action
        for part in said.split(","):
            name, number = self._order(part.strip(), observation, text)
            if name in action.orders:
                raise ActionParseError(f"expected one order for {name}, got two: {quoted(text)}")
            action.orders[name] = number
        return action

    def legal_answers(self, observation: TradingObservation) -> list[str]:
        """Holding, and single orders of some sizes that can be filled."""
        if not observation.steps_left:
            return []
        answers = [_HOLD]
        for index, name in enumerate(observation.assets):
            suffix = f" {name}" if len(observation.assets) > 1 else ""
            for verb in ("buy", "sell"):
                most = _most(verb, index, observation)
                if most:
                    answers.append(f"{verb}{suffix}")
                if self._has_quantities:
                    fitting = [number for number in _QUANTITIES if number <= most]
                    answers += [f"{verb} {number}{suffix}" for number in fitting]
        return answers

    def _order(self, part: str, observation: TradingObservation, text: str) -> tuple[str, int]:
        """The asset and the shares of one order."""
        found = _ORDER.fullmatch(part)
        names = {name.casefold(): name for name in observation.assets}
        asked = (found[3] or "").casefold() if found else ""
        name = names.get(asked) if asked else observation.assets[0]
        if found is None or name is None or (not asked and len(names) > 1):
            of = f" of {', '.join(observation.assets)}" if len(names) > 1 else ""
            raise ActionParseError(
                f"expected {_HOLD}, or buy or sell and a number{of}; got {quoted(text)}"
            )
        verb = found[1].casefold()
        most = _most(verb, observation.assets.index(name), observation)
        number = int(found[2]) if found[2] else most
        if not 0 < number <= most:
            raise ActionParseError(
                f"expected to {verb} from 1 to {most} of {name}, got {quoted(text)}"
                if most
                else f"expected another order, for there is nothing to {verb} {name} with; got"
                f" {quoted(text)}"
            )
        return name, number if verb == "buy" else -number


def _most(verb: str, index: int, observation: TradingObservation) -> int:
    """How many shares an order can be of."""
    if not observation.steps_left:
        return 0
    if verb == "sell":
        return observation.shares[index]
    return affordable(observation.cash, observation.prices[-1][index], observation.cost)


def _brief(observation: TradingObservation) -> str:
    if not observation.steps_left:
        return f"over {observation.value:.0f}"
    lines = []
    for index, name in enumerate(observation.assets):
        prices = " ".join(f"{row[index]:.0f}" for row in observation.prices)
        label = f"{name} " if len(observation.assets) > 1 else ""
        lines.append(f"{label}{prices} shares {observation.shares[index]}")
    return "\n".join([*lines, f"cash {observation.cash:.0f}"])


def _prose(observation: TradingObservation) -> str:
    lines = []
    for index, name in enumerate(observation.assets):
        prices = ", ".join(f"{row[index]:.2f}" for row in observation.prices)
        lines.append(f"{name}, oldest price first: {prices}. You hold {observation.shares[index]}.")
    standing = f"Cash: {observation.cash:.2f}. You own {observation.value:.2f} in all."
    if not observation.steps_left:
        return f"The market has closed. {standing}"
    head = f"Date {observation.date}; {observation.steps_left} decisions are left."
    return "\n".join([head, *lines, standing])
