"""Shop: a customer with a private budget, a clerk who makes offers, and a manager who approves discounts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.tools import Tool, ToolFormat, tool
from forge_agents.tools.env import ToolEnv
from forge_envs.shared import check_ranges, end_for_all

GOODS = ("lamp", "chair", "kettle", "clock", "carpet", "mirror", "basket", "radio", "vase", "ladder")
CLERKS_LIMIT = 10
"""Maximum discount without the manager's approval, in percent."""
_DECISION = re.compile(r"\b(ACCEPT|LEAVE)\b")
_TO_MANAGER = re.compile(r"\s*@?manager\s*[:,]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer to the customer."""

    item: str
    quantity: int
    discount: int
    cents: int


class Shop(ToolEnv):
    """Cooperative game of three agents.

    ``customer`` wants a quantity of one item within a private budget. ``clerk`` looks up prices and stock and makes
    offers with its tools. Discounts above 10 percent need the approval of ``manager``, who alone knows the maximum
    discount of each item without a loss. Customer and manager write to the clerk. The clerk writes to the manager if
    its text begins with "manager:", else to the customer, who also reads the open offer. The customer ends the episode
    by the word ACCEPT, if there is an offer, or LEAVE. The first of them counts.

    Each episode is one of four cases: the budget covers the full price, a discount of at most 10 percent is needed, a
    larger discount without a loss is needed, or no deal is possible because of the stock or the discount.

    After ACCEPT all agents get 1 if the offer matches the customer's wish, is within its budget, and has a discount
    without a loss; 0.5 if only the last condition fails; else 0. After LEAVE they get 1 if no deal was possible, else
    0. A truncated episode earns 0. At the end infos contain ``end``, ``deal`` (whether one was possible),
    ``satisfied`` and ``sound``.

    Args:
        num_goods: Number of items in the shop, 1 to 10.
        tool_format: As in `ToolEnv`.
        max_turns: Number of decisions, tool calls included, after which the episode is truncated.
        max_message_chars: Maximum length of a message. Longer ones are cut.
    """

    possible_agents = ("customer", "clerk", "manager")

    def __init__(
        self,
        *,
        num_goods: int = 5,
        tool_format: ToolFormat = "hermes",
        max_turns: int = 24,
        max_message_chars: int = 400,
    ) -> None:
        super().__init__(tool_format=tool_format, max_turns=max_turns)
        check_ranges(num_goods=(num_goods, 1, len(GOODS)), max_message_chars=(max_message_chars, 1, None))
        self._num_goods, self._max_message_chars = num_goods, max_message_chars

    def setup(self, rng: np.random.Generator) -> None:
        self.goods = tuple(GOODS[i] for i in rng.permutation(len(GOODS))[: self._num_goods])
        self.prices = {item: int(rng.integers(10, 100)) for item in self.goods}
        self.stock_of = {item: int(rng.integers(1, 6)) for item in self.goods}
        self.bears = {item: int(rng.integers(0, 41)) for item in self.goods}
        self.wanted = self.goods[int(rng.integers(self._num_goods))]
        self.quantity = int(rng.integers(1, self.stock_of[self.wanted] + 1))
        case = int(rng.integers(4))
        low, high = ((-20, 1), (1, CLERKS_LIMIT + 1), (CLERKS_LIMIT + 1, 41), (CLERKS_LIMIT + 1, 41))[case]
        needed = int(rng.integers(low, high))
        if case == 2:
            self.bears[self.wanted] = int(rng.integers(needed, 41))
        elif case == 3 and rng.random() < 0.5:
            self.quantity = self.stock_of[self.wanted] + int(rng.integers(1, 4))
        elif case == 3:
            self.bears[self.wanted] = int(rng.integers(0, needed))
        else:  # a discount within the clerk's limit is never a loss
            self.bears[self.wanted] = int(rng.integers(CLERKS_LIMIT, 41))
        self.deal = case < 3
        self.budget = self.prices[self.wanted] * self.quantity * (100 - needed)
        self.offered: Offer | None = None
        self.approved: dict[str, int] = {}
        self.inbox = {"customer": self._wish(), "clerk": "", "manager": ""}

    # ---- tools

    @tool
    def stock(self, item: str) -> str:
        """Look up the price and the stock of an item."""
        self._must_exist(item)
        return f"{item}: {_money(100 * self.prices[item])} each, {self.stock_of[item]} in stock"

    @tool
    def offer(self, item: str, quantity: int, discount: int = 0) -> str:
        """Put an offer before the customer, in place of an earlier one.

        Args:
            item: What is sold.
            quantity: How many.
            discount: Percent off the price; above 10 the manager must have approved it.
        """
        self._must_exist(item)
        if not 1 <= quantity <= self.stock_of[item]:
            raise ValueError(f"there are {self.stock_of[item]} in stock, {quantity} cannot be offered")
        allowed = max(CLERKS_LIMIT, self.approved.get(item, 0))
        if not 0 <= discount <= allowed:
            raise ValueError(f"a discount of {discount} % on {item} is not allowed; without approval 0 to {allowed} is")
        cents = self.prices[item] * quantity * (100 - discount)
        self.offered = Offer(item, quantity, discount, cents)
        return f"Offered: {quantity} x {item} for {_money(cents)}. Now tell the customer."

    @tool
    def margin(self, item: str) -> str:
        """Look up the largest discount that an item bears without a loss."""
        self._must_exist(item)
        return self._bearing(item)

    @tool
    def approve(self, item: str, discount: int) -> str:
        """Allow the clerk to give a discount on an item.

        Args:
            item: What is sold.
            discount: The largest discount allowed, in percent.
        """
        self._must_exist(item)
        if not 0 <= discount <= 100:
            raise ValueError(f"a discount is 0 to 100 percent, not {discount}")
        self.approved[item] = discount
        return f"Approved: up to {discount} % on {item}. Now tell the clerk."

    def tools(self, agent: str) -> Sequence[Tool]:
        return {"customer": [], "clerk": [self.stock, self.offer], "manager": [self.margin, self.approve]}[agent]

    # ---- texts and rules

    def instructions(self, agent: str) -> str:
        role = {
            "customer": "You are a customer in a shop. Tell the clerk what you want. Buy only what you came for, "
            "within your budget. Write ACCEPT to take the offer on the table, or LEAVE if the shop cannot serve you.",
            "clerk": "You are the clerk of a shop. Serve the customer: look up the stock, then make an offer with your "
            "tool. You may give up to 10 percent off; ask the manager for more with a text that begins with "
            '"manager:". All other texts go to the customer.',
            "manager": "You are the manager of a shop. The clerk asks you for discounts. Approve, with your tool, what "
            "an item bears and no more, then answer the clerk.",
        }[agent]
        return f"{role}\n\n{self.tool_help(agent)}".strip()

    def observe_text(self, agent: str) -> str:
        return self.inbox[agent]

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the customer's budget and the items' maximum discounts, as their owners read them."""
        budget = () if agent == "customer" else (self._wish(),)
        return budget if agent == "manager" else (*budget, *map(self._bearing, self.goods))

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Draw another budget and other maximum discounts, unless `agent` knows them."""
        if agent != "customer":
            self.budget += int(rng.integers(1, 1000))
        if agent != "manager":
            self.bears = {item: int(rng.integers(0, 41)) for item in self.goods}

    def act(self, agent: str, action: str) -> Outcome:
        message = action.strip()[: self._max_message_chars]
        if agent == "customer":
            decisions = [word for word in _DECISION.findall(action) if word == "LEAVE" or self.offered]
            if decisions:
                return self._end(decisions[0])
            self.inbox["clerk"] = f"Customer: {message}"
            return Outcome(next="clerk")
        if agent == "manager":
            self.inbox["clerk"] = f"Manager: {message}"
            return Outcome(next="clerk")
        if _TO_MANAGER.match(action):
            self.inbox["manager"] = f"Clerk: {message}"
            return Outcome(next="manager")
        self.inbox["customer"] = f"Clerk: {message}"
        if (open_ := self.offered) is not None:
            self.inbox["customer"] += f"\nOffer: {open_.quantity} x {open_.item} for {_money(open_.cents)}."
        return Outcome(next="customer")

    def _end(self, decision: str) -> Outcome:
        bought = self.offered if decision == "ACCEPT" else None
        satisfied = bought is not None and (
            (bought.item, bought.quantity) == (self.wanted, self.quantity) and bought.cents <= self.budget
        )
        sound = bought is None or bought.discount <= self.bears[bought.item]
        reward = (1.0 if sound else 0.5) if satisfied else float(bought is None and not self.deal)
        facts = {"end": decision, "deal": self.deal, "satisfied": satisfied, "sound": sound}
        return end_for_all(self.possible_agents, reward, facts)

    def _wish(self) -> str:
        return f"You want to buy: {self.quantity} x {self.wanted}. You can spend {_money(self.budget)} in all."

    def _bearing(self, item: str) -> str:
        return f"{item} bears a discount of at most {self.bears[item]} %"

    def _must_exist(self, item: str) -> None:
        if item not in self.prices:
            raise ValueError(f"the shop has no {item!r}; it sells {', '.join(self.goods)}")


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"
