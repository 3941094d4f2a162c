"""Text of a market. The response is an order: "buy 3", "sell 2", "hold", "buy 3 B, sell 1 A".

compact   user:      94 97 101 shares 6
                     cash 350
rules     system:    the goal, the cost of an order and the format of responses
          user:      Date 12; 4 decisions left. Prices, oldest first ...

"buy" and "sell" without a number mean the maximum.
"""

from __future__ import annotations

import re
from typing import Literal

from ludus.env import Message
from ludus.env.text import extract_answer, quote_end
from ludus.proto.errors import ActionParseError

from .models import TradingAction, TradingObservation
from .portfolio import count_affordable_shares

TextStyle = Literal["compact", "rules"]

_ORDER_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Order sizes that are offered. A response may use any other number."""
_ORDER_PATTERN = re.compile(r"(buy|sell)(?: (\d{1,9}))?(?: ([^\s,]+))?", re.IGNORECASE)
_HOLD = "hold"


class TradingRenderer:
    """Renderer for a market.

    Args:
        has_quantities: Offer orders of several sizes. Otherwise only "buy", "sell" and "hold".
    """

    def __init__(self, style: TextStyle, has_quantities: bool) -> None:
        self._style = style
        self._has_quantities = has_quantities

    def render(self, observation: TradingObservation, *, first: bool) -> list[Message]:
        """Return the prices and the portfolio. In the rules style, the rules come first."""
        if self._style == "compact":
            return [{"role": "user", "content": _render_compact(observation)}]
        message: Message = {"role": "user", "content": _render_sentences(observation)}
        if not first:
            return [message]
        rules = (
            f"You trade {', '.join(observation.assets)}. Your goal is to beat buy-and-hold, which"
            " spends all cash at the start and then keeps the shares. An order costs"
            f" {observation.cost:.2%} of its value. You cannot borrow. Answer with orders, for"
            f" example <answer>buy 3</answer>, <answer>sell 2</answer> or <answer>{_HOLD}</answer>."
            " Without a number, an order is for the maximum."
        )
        if len(observation.assets) > 1:
            example = f"buy 3 {observation.assets[-1]}"
            rules += f" Name the asset, as in {example}. Separate orders with commas."
        return [{"role": "system", "content": rules}, message]

    def parse(self, text: str, observation: TradingObservation) -> TradingAction:
        """Return the orders in the text.

        Raises:
            ActionParseError: The text has no orders, or some that cannot be filled.
        """
        response = extract_answer(text) if self._style == "rules" else text
        response = " ".join(response.split())
        action = TradingAction()
        if response.casefold() == _HOLD:
            return action
        for order_text in response.split(","):
            name, num_shares = self._parse_order(order_text.strip(), observation, text)
            if name in action.orders:
                raise ActionParseError(f"give one order for {name}, not two: {quote_end(text)}")
            action.orders[name] = num_shares
        return action

    def legal_answers(self, observation: TradingObservation) -> list[str]:
        """Return "hold" and single orders of several sizes that can be filled."""
        if not observation.steps_left:
            return []
        answers = [_HOLD]
        for index, name in enumerate(observation.assets):
            suffix = f" {name}" if len(observation.assets) > 1 else ""
            for verb in ("buy", "sell"):
                max_shares = _count_max_shares(verb, index, observation)
                if max_shares:
                    answers.append(f"{verb}{suffix}")
                if self._has_quantities:
                    order_sizes = [
                        order_size for order_size in _ORDER_SIZES if order_size <= max_shares
                    ]
                    answers += [f"{verb} {order_size}{suffix}" for order_size in order_sizes]
        return answers

    def _parse_order(
        self, order_text: str, observation: TradingObservation, text: str
    ) -> tuple[str, int]:
        """Return the asset and the signed number of shares of one order."""
        assets = observation.assets
        match = _ORDER_PATTERN.fullmatch(order_text)
        folded_name = (match[3] or "").casefold() if match else ""
        name_by_folded_name = {name.casefold(): name for name in assets}
        name = name_by_folded_name.get(folded_name) if folded_name else assets[0]
        if match is None or name is None or (not folded_name and len(assets) > 1):
            asset_choice = f" of {' or '.join(assets)}" if len(assets) > 1 else ""
            raise ActionParseError(
                f"answer {_HOLD}, or buy or sell and a number{asset_choice}; got {quote_end(text)}"
            )
        verb = match[1].casefold()
        max_shares = _count_max_shares(verb, assets.index(name), observation)
        num_shares = int(match[2]) if match[2] else max_shares
        if not max_shares:
            reason = "there is not enough cash" if verb == "buy" else "you own no shares of it"
            raise ActionParseError(f"you cannot {verb} {name}: {reason}; got {quote_end(text)}")
        if not 0 < num_shares <= max_shares:
            raise ActionParseError(
                f"you can {verb} 1 to {max_shares} shares of {name}; got {quote_end(text)}"
            )
        return name, num_shares if verb == "buy" else -num_shares


def _count_max_shares(verb: str, index: int, observation: TradingObservation) -> int:
    if not observation.steps_left:
        return 0
    if verb == "sell":
        return observation.shares[index]
    return count_affordable_shares(
        observation.cash, observation.prices[-1][index], observation.cost
    )


def _render_compact(observation: TradingObservation) -> str:
    if not observation.steps_left:
        return f"over {observation.value:.0f}"
    lines = []
    for index, name in enumerate(observation.assets):
        prices = " ".join(f"{row[index]:.0f}" for row in observation.prices)
        label = f"{name} " if len(observation.assets) > 1 else ""
        lines.append(f"{label}{prices} shares {observation.shares[index]}")
    return "\n".join([*lines, f"cash {observation.cash:.0f}"])


def _render_sentences(observation: TradingObservation) -> str:
    lines = []
    for index, name in enumerate(observation.assets):
        prices = ", ".join(f"{row[index]:.2f}" for row in observation.prices)
        lines.append(
            f"{name}, oldest price first: {prices}. Shares owned: {observation.shares[index]}."
        )
    summary = f"Cash: {observation.cash:.2f}. Total value: {observation.value:.2f}."
    if not observation.steps_left:
        return f"The market has closed. {summary}"
    heading = f"Date {observation.date}; {observation.steps_left} decisions left."
    return "\n".join([heading, *lines, summary])
