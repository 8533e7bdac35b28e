"""A service desk: a customer with wishes, an agent with the shop's database and its policy, a supervisor who approves.

In: texts: messages, tool calls, BYE. Out: one reward for all three: is the database as the policy would have it? Waits
for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.tools import Tool, ToolFormat, tool
from forge_agents.tools.env import ToolEnv
from forge_agents.types import Trajectory
from forge_envs.teams.generated import PEOPLE, Database, ended, one, some

ITEMS = ("bell", "boat", "chair", "clock", "drum", "flute", "kettle", "kite", "lamp", "map", "radio", "rope", "vase")
PLANS = ("small", "middle", "large", "huge")
KINDS = ("cancel", "refund", "change_plan")
_DAYS, _PRICES, _MONTHS, _COMPLAINTS = (1, 60), (10, 200), (1, 24), (0, 3)
"""Least and greatest values in the database."""
_FACTS = (
    "SELECT {what} FROM customers LEFT JOIN orders ON orders.customer = customers.name AND orders.id = ? "
    "WHERE customers.name = ?"
)
# What a policy is made of: the wishes that a rule is about, its text, the facts to which it applies, the range of {n}.
_FORBIDDING = (
    ("cancel", "No order is cancelled more than {n} days after it was made.", "days > {n}", (30, 50)),
    ("cancel", "No order of less than {n} euros is cancelled.", "price < {n}", (20, 60)),
    ("refund", "No order is refunded more than {n} days after its delivery.", "days > {n}", (30, 50)),
    ("refund", "No order of less than {n} euros is refunded.", "price < {n}", (20, 60)),
    ("change_plan", "No plan is changed that is less than {n} months old.", "months < {n}", (3, 10)),
    ("change_plan", "Who has made {n} complaints or more stays with the plan.", "complaints >= {n}", (2, 3)),
)
_APPROVED = (
    ("cancel", "Cancelling an order of more than {n} euros needs approval.", "price > {n}", (60, 140)),
    ("refund", "A refund of more than {n} euros needs approval.", "price > {n}", (60, 140)),
    ("change_plan", "Changing a plan that is more than {n} months old needs approval.", "months > {n}", (6, 18)),
)
_UNAPPROVED = "What needs approval and does not get it is refused."
_HOW = "What a rule forbids is refused under the number of that rule; if more than one forbids it, under the lowest."
_EXAMPLES = (
    "Customer: Please cancel order 417.\nAnswer: CALL cancel(417)\n"
    "Customer: Please cancel order 806.\nAnswer: CALL cancel(806)\n"
)
_TO_SUPERVISOR = re.compile(r"\s*@?supervisor\s*[:,]", re.IGNORECASE)
_BYE = re.compile(r"\bBYE\b")


@dataclass(frozen=True, slots=True)
class Rule:
    """One of the policy's."""

    number: int
    text: str
    kind: str
    """Of the wishes that it is about, one of `KINDS`; empty: of what needs approval and has none."""
    condition: str
    """In SQL, of an order and its customer."""
    approval: bool
    """Whether it asks for approval; else it forbids."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a customer wants: an order cancelled or refunded, or another plan."""

    kind: str
    order: int = 0
    item: str = ""
    plan: str = ""

    def told(self, *, by_number: bool) -> str:
        """In the customer's words: the order by its number or by what it is of."""
        if self.plan:
            return f"change to the plan {self.plan}"
        which = f"order {self.order}" if by_number else f"the order of the {self.item}"
        return f"{self.kind} {which}"

    @property
    def news(self) -> str:
        """What the customer hears once it is done."""
        done = {"cancel": "cancelled", "refund": "refunded"}
        if self.plan:
            return f"Your plan is {self.plan} now."
        return f"Order {self.order} of the {self.item} is {done[self.kind]}."


class ServiceDesk(ToolEnv):
    """Three seats that share one reward.

    ``customer`` has wishes, an order cancelled or refunded or another plan, one after the other, and for each perhaps
    another in its place if it is refused; nobody else knows them. It talks to the ``agent``, is told what happens to
    its orders and its plan, and ends the episode with the word BYE. The agent looks up and changes the shop's database
    by its tools, which carry out whatever they are told; what is allowed stands in a policy that it alone reads, drawn
    anew in each episode as customers and orders are. What may not be done it refuses, under a rule's number. A text of
    it that begins with "supervisor:" goes to the ``supervisor``, all others to the customer. The supervisor alone knows
    which customers are under review, and approves what is asked for the others.

    All get 1.0 if in the end the database is what the policy makes of the customer's wishes, nothing was done against
    it on the way or without the approval that it asks for, and nothing was approved for who is under review; else 0,
    also if the episode is cut off. At the end infos hold ``done`` (whether the database is right), ``violations``
    (what was against the policy, in words) and ``wishes``.

    Args:
        kinds: How many of cancel, refund and change_plan a customer may wish for, 1 to 3.
        knows_numbers: Whether the customer knows its orders' numbers; else the agent has to look them up.
        rules: Rules that forbid something, 0 to 6.
        approvals: Whether some things need the supervisor's approval.
        alternatives: Whether a customer has another wish in the place of one that is refused.
        wishes: Wishes of the customer, 1 to 3.
        customers: Customers in the database, 1 to 40.
        examples: Whether the agent reads two calls before what the customer says, instead of how tools are called; for
            small models, and where there is nothing to do but to cancel orders.
        tool_format: As for `ToolEnv`.
        max_turns: Decisions, tool calls included, after which the episode is cut off; None: 16 for each wish, and as
            many again for its alternative.
        max_message_chars: Longer messages are cut.
    """

    possible_agents = ("customer", "agent", "supervisor")
    max_reward = 1.0

    def __init__(
        self,
        *,
        kinds: int = 3,
        knows_numbers: bool = False,
        rules: int = 3,
        approvals: bool = True,
        alternatives: bool = False,
        wishes: int = 1,
        customers: int = 4,
        examples: bool = False,
        tool_format: ToolFormat = "plain",
        max_turns: int | None = None,
        max_message_chars: int = 300,
    ) -> None:
        most = 16 * wishes * (1 + alternatives) if max_turns is None else max_turns
        super().__init__(tool_format=tool_format, max_turns=most)
        given = {"kinds": (kinds, 1, 3), "rules": (rules, 0, len(_FORBIDDING)), "wishes": (wishes, 1, 3)}
        given |= {"customers": (customers, 1, 40), "max_message_chars": (max_message_chars, 1, 4000)}
        for name, (value, low, high) in given.items():
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be {low} to {high}")
        self._kinds, self._knows_numbers, self._num_rules, self._approvals = kinds, knows_numbers, rules, approvals
        self._alternatives, self._num_wishes, self._customers = alternatives, wishes, customers
        self._max_message_chars, self._examples = max_message_chars, examples

    # ---- the shop

    def setup(self, rng: np.random.Generator) -> None:
        self._draw_shop(rng)
        self._draw_policy(rng)
        self._draw_wishes(rng)
        self.reviewed = tuple(name for name in self.names if rng.random() < 0.4)
        self.gold = self._as_it_should_be()
        self.approved: set[str] = set()
        self.violations: list[str] = []
        self.news: list[str] = []
        self.heard = {"customer": "", "agent": "", "supervisor": ""}
        self.has_policy = False

    def _draw_shop(self, rng: np.random.Generator) -> None:
        self.names = some(rng, PEOPLE, self._customers)
        each = 2 * self._num_wishes + 2  # orders: half of them open
        numbers = iter((rng.permutation(900)[: each * len(self.names)] + 100).tolist())
        customers, orders, complaints = [], [], []
        for name in self.names:
            customers.append((name, one(rng, PLANS), _within(rng, _MONTHS)))
            complaints += [(name, "complaint")] * _within(rng, _COMPLAINTS)
            for place, item in enumerate(some(rng, ITEMS, each)):
                status = ("open", "delivered")[place % 2]
                orders.append((next(numbers), name, item, _within(rng, _PRICES), status, _within(rng, _DAYS)))
        self.database = Database.of(
            {
                "customers(name, plan, months)": customers,
                "orders(id, customer, item, price, status, days)": orders,
                "tickets(customer, about)": complaints,
            }
        )

    def _draw_policy(self, rng: np.random.Generator) -> None:
        known = KINDS[: self._kinds]
        drawn = [(*form, False) for form in some(rng, _FORBIDDING, self._num_rules)]
        drawn += [(*form, True) for form in _APPROVED if self._approvals]
        drawn = [form for form in drawn if form[0] in known]
        if self._approvals:
            drawn.append(("", _UNAPPROVED, "", (0, 0), False))
        rules = []
        for number, (kind, text, condition, span, approval) in enumerate(some(rng, drawn, len(drawn)), 1):
            n = _within(rng, span)
            rules.append(Rule(number, text.format(n=n), kind, condition.format(n=n), approval))
        self.rules = tuple(rules)

    def _draw_wishes(self, rng: np.random.Generator) -> None:
        """The customer, and its wishes, each with what it wants instead."""
        self.customer, *_ = self.names
        name, plan, _ = self.database.rows("SELECT * FROM customers WHERE name = ?", self.customer)[0]
        orders = self.database.rows("SELECT id, item, status FROM orders WHERE customer = ? ORDER BY id", name)
        left = {
            "cancel": [Wish("cancel", number, item) for number, item, status in orders if status == "open"],
            "refund": [Wish("refund", number, item) for number, item, status in orders if status == "delivered"],
            "change_plan": [Wish("change_plan", plan=one(rng, [other for other in PLANS if other != plan]))],
        }
        drawn: list[Wish] = []
        for _ in range(self._num_wishes * (1 + self._alternatives)):
            wishes = left[one(rng, [kind for kind in KINDS[: self._kinds] if left[kind]])]
            drawn.append(wishes.pop(int(rng.integers(len(wishes)))))
        step = 1 + self._alternatives
        self.wishes = [tuple(drawn[place : place + step]) for place in range(0, len(drawn), step)]

    def _against(self, wish: Wish, customer: str, *, approved: bool) -> Rule | None:
        """The rule that forbids something now: the first of those that apply, else that it is not approved."""
        hit = [rule for rule in self.rules if rule.kind == wish.kind and self._applies(rule, wish, customer)]
        if forbidding := [rule for rule in hit if not rule.approval]:
            return forbidding[0]
        return next(rule for rule in self.rules if not rule.kind) if hit and not approved else None

    def _applies(self, rule: Rule, wish: Wish, customer: str) -> bool:
        complaints = "(SELECT COUNT(*) FROM tickets WHERE tickets.customer = name AND about = 'complaint')"
        condition = rule.condition.replace("complaints", complaints)
        return bool(self.database.rows(_FACTS.format(what=condition), wish.order, customer)[0][0])

    def _as_it_should_be(self) -> Database:
        """What the database is once the policy was kept."""
        end = self.database
        for wishes in self.wishes:
            for wish in wishes:
                rule = self._against(wish, self.customer, approved=self.customer not in self.reviewed)
                if rule is None:
                    end = _done(end, wish, self.customer)
                    break
                end = _refused(end, self.customer, rule.number)
        return end

    # ---- tools

    @tool
    def look_up(self, customer: str) -> str:
        """Look up the plan, complaints and orders of a customer.

        Args:
            customer: First and last name.
        """
        plan, months = self._row("SELECT plan, months FROM customers WHERE name = ?", customer)
        (made,) = self._row("SELECT COUNT(*) FROM tickets WHERE customer = ? AND about = 'complaint'", customer)
        lines = [f"{customer}: plan {plan}, {months} months old; {made} complaints"]
        orders = "SELECT id, item, price, status, days FROM orders WHERE customer = ? ORDER BY id"
        for number, item, price, status, days in self.database.rows(orders, customer):
            ago = {"open": f", made {days} days ago", "delivered": f" {days} days ago"}.get(status, "")
            lines.append(f"order {number}: {item}, {price} euros, {status}{ago}")
        return "\n".join(lines)

    @tool
    def cancel(self, order: int) -> str:
        """Cancel an open order.

        Args:
            order: Its number.
        """
        return self._carry_out("cancel", order)

    @tool
    def refund(self, order: int) -> str:
        """Pay the money for a delivered order back.

        Args:
            order: Its number.
        """
        return self._carry_out("refund", order)

    @tool
    def change_plan(self, customer: str, plan: str) -> str:
        """Give a customer another plan.

        Args:
            customer: First and last name.
            plan: small, middle, large or huge.
        """
        (now,) = self._row("SELECT plan FROM customers WHERE name = ?", customer)
        if plan not in PLANS or plan == now:
            raise ValueError(f"{customer} has the plan {now}; others are {', '.join(p for p in PLANS if p != now)}")
        return self._record(Wish("change_plan", plan=plan), customer)

    @tool
    def refuse(self, customer: str, rule: int) -> str:
        """Refuse what a customer wishes for, under the number of a rule.

        Args:
            customer: First and last name.
            rule: The number of the rule that forbids it.
        """
        self._row("SELECT 1 FROM customers WHERE name = ?", customer)
        if rule not in [each.number for each in self.rules]:
            raise ValueError(f"there is no rule {rule}; rules are 1 to {len(self.rules)}")
        self.database = _refused(self.database, customer, rule)
        if customer == self.customer:
            self.news.append(f"Your wish is refused under rule {rule}.")
        return f"Refused under rule {rule}. Now tell the customer."

    @tool
    def approve(self, request: str) -> str:
        """Approve what the agent asks for.

        Args:
            request: The number of the order, or the name of the customer who wants another plan.
        """
        number = int(request) if request.isdecimal() and len(request) < 9 else 0
        known = self.database.rows("SELECT customer FROM orders WHERE id = ?", number)
        customer, request = (known[0][0], str(number)) if known else (request, request)
        self._row("SELECT 1 FROM customers WHERE name = ?", customer)
        self.approved.add(request)
        if customer in self.reviewed:
            self.violations.append(f"{request} was approved, but {customer} is under review")
        return f"Approved: {request}. Now tell the agent."

    def tools(self, agent: str) -> Sequence[Tool]:
        if agent == "agent":
            changing = [self.cancel, self.refund, self.change_plan][: self._kinds]
            looking = [] if self._knows_numbers and not self.rules else [self.look_up]
            return [*looking, *changing, *([self.refuse] if self.rules else [])]
        return [self.approve] if agent == "supervisor" else []

    def _row(self, query: str, value: str | int) -> tuple[int | str, ...]:
        rows = self.database.rows(query, value)
        if not rows:
            raise ValueError(f"there is no customer {value!r}; write first and last name")
        return rows[0]

    def _carry_out(self, kind: str, order: int) -> str:
        needed = {"cancel": "open", "refund": "delivered"}[kind]
        number = order if 0 < order < 10**9 else 0
        found = self.database.rows("SELECT customer, item, status FROM orders WHERE id = ?", number)
        if not found:
            raise ValueError(f"there is no order {order}")
        customer, item, status = found[0]
        if status != needed:
            raise ValueError(f"order {order} is {status}; to {kind} it, it must be {needed}")
        return self._record(Wish(kind, order, item), customer)

    def _record(self, wish: Wish, customer: str) -> str:
        """Carry something out, whatever the policy says, and remember what it says."""
        subject = customer if wish.plan else str(wish.order)
        if rule := self._against(wish, customer, approved=subject in self.approved):
            self.violations.append(f"{wish.told(by_number=True)} was done for {customer} against rule {rule.number}")
        self.database = _done(self.database, wish, customer)
        if customer == self.customer:
            self.news.append(wish.news)
        return f"Done: {wish.told(by_number=True)}. Now tell the customer."

    # ---- the game

    def instructions(self, agent: str) -> str:
        if agent == "customer":
            return (
                "You are a customer of a shop and write to its agent. Say who you are and what you want, one wish "
                "after the other; say what you want instead once a wish is refused. Write BYE when the news settle all."
            )
        if agent == "supervisor":
            return (
                "The agent of a shop asks you for approval. Approve it with your tool, unless the customer is under "
                f"review; then answer the agent.\n\n{self.tool_help(agent)}"
            )
        if self._examples:
            return "You write calls."
        ask = ' To ask for approval, begin a text with "supervisor:" and say what for and for whom.' * self._approvals
        return (
            "You serve a customer of a shop. Do what the customer wishes by calling a tool, then answer the customer."
            f"{' Keep to the policy.' * bool(self.rules)}{ask}\n\n{self.tool_help(agent)}"
        )

    def observe_text(self, agent: str) -> str:
        if agent == "customer":  # all that it knows, each time: so a function without a memory can take its seat
            return "\n".join([self._goal(), *(f"News: {line}" for line in self.news), self.heard[agent]]).rstrip("\n")
        if agent == "supervisor":
            return f"{self._under_review()}\n{self.heard[agent]}"
        said = f"{_EXAMPLES}{self.heard[agent]}\nAnswer:" if self._examples else self.heard[agent]
        return said if self.has_policy else f"{self._policy()}{said}"

    def _goal(self) -> str:
        told = [[wish.told(by_number=self._knows_numbers) for wish in wishes] for wishes in self.wishes]
        wants = "\n".join(f"You want to: {', or if that is refused to: '.join(each)}." for each in told)
        return f"You are {self.customer}.\n{wants}"

    def _policy(self) -> str:
        rules = "".join(f"{rule.number}. {rule.text}\n" for rule in self.rules)
        return f"Policy:\n{rules}{_HOW}\n\n" if rules else ""

    def _under_review(self) -> str:
        return f"Under review: {', '.join(self.reviewed) or 'nobody'}."

    def secrets(self, agent: str) -> tuple[str, ...]:
        """The customer's wishes, the policy and who is under review, each for all but one."""
        known = {"customer": self._goal(), "agent": self._policy(), "supervisor": self._under_review()}
        return tuple(text for seat, text in known.items() if seat != agent and text)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Draw other wishes, another policy and other reviews, for those who do not know them."""
        if agent != "customer":
            self.wishes = [(Wish("change_plan", plan=one(rng, PLANS)),)]
        if agent != "agent":
            self._draw_policy(rng)
        if agent != "supervisor":
            self.reviewed = tuple(name for name in self.names if rng.random() < 0.5)

    def act(self, agent: str, action: str) -> Outcome:
        said = " ".join(action.split())[: self._max_message_chars]
        if agent == "customer":
            if _BYE.search(action):
                return self._end()
            self.heard["agent"] = f"Customer: {said}"
            return Outcome(next="agent")
        if agent == "supervisor":
            self.heard["agent"] = f"Supervisor: {said}"
            return Outcome(next="agent")
        self.has_policy = True
        asked = "supervisor" if _TO_SUPERVISOR.match(action) else "customer"
        self.heard[asked] = f"Agent: {said}"
        return Outcome(next=asked)

    def _end(self) -> Outcome:
        done = _contents(self.database) == _contents(self.gold)
        told = [[wish.told(by_number=True) for wish in wishes] for wishes in self.wishes]
        facts = {"done": done, "violations": list(self.violations), "wishes": told}
        return ended(self.possible_agents, float(done and not self.violations), facts)


def _within(rng: np.random.Generator, span: tuple[int, int]) -> int:
    """A whole number from the first to the second."""
    return int(rng.integers(span[0], span[1] + 1))


def _done(database: Database, wish: Wish, customer: str) -> Database:
    if wish.plan:
        return database.after("UPDATE customers SET plan = ?, months = 0 WHERE name = ?", wish.plan, customer)
    status = {"cancel": "cancelled", "refund": "refunded"}[wish.kind]
    return database.after("UPDATE orders SET status = ? WHERE id = ?", status, wish.order)


def _refused(database: Database, customer: str, rule: int) -> Database:
    return database.after("INSERT INTO tickets VALUES (?, ?)", customer, f"refused under rule {rule}")


def _contents(database: Database) -> list[list[tuple[int | str, ...]]]:
    """All rows of all tables; in which order things were done does not matter."""
    return [sorted(database.rows(f"SELECT * FROM {table}")) for table in ("customers", "orders", "tickets")]  # noqa: S608  # our own words


# ---- players without a model, and a weak verifier


def customer(seen: str) -> str:
    """A customer as a function, ``fa.Scripted(customer)``: says its next wish until the news settle it, then BYE."""
    name = re.search(r"You are (.+)\.", seen)
    news = re.findall(r"^News: (.+)", seen, re.MULTILINE)
    for line in re.findall(r"^You want to: (.+)\.$", seen, re.MULTILINE):
        for wish in line.split(", or if that is refused to: "):
            place = next((at for at, told in enumerate(news) if _settles(told, wish)), None)
            if place is None:
                return f"I am {name[1] if name else 'a customer'}. Please {wish}."
            told, news = news[place], news[place + 1 :]
            if "refused under" not in told:
                break
    return "BYE"


def _settles(told: str, wish: str) -> bool:
    """Whether a piece of news says that a wish was granted or refused."""
    if "refused under" in told:
        return True
    *_, last = wish.split()
    return told == f"Your plan is {last} now." or f" {last} is " in told or told.startswith(f"Order {last} ")


def supervisor(seen: str) -> str:
    """A supervisor as a function: approves what is asked for by number and name, unless the name is under review."""
    asked = seen.rpartition("\nAgent: ")[2]
    if seen.startswith("Approved"):
        return seen.partition(" Now")[0]
    if not (named := re.search(r"\b[A-Z]\w+ [A-Z]\w+\b", asked)):
        return "Not approved: say for whom, with first and last name."
    if named[0] in seen.partition("\n")[0]:
        return f"Not approved: {named[0]} is under review."
    order = re.search(r"\b\d{3}\b", asked)
    return f'CALL approve("{order[0] if order else named[0]}")'


def looked_first(trajectory: Trajectory) -> float | None:
    """Whether the agent looked the customer up before it changed anything; None where it changed nothing."""
    names = [call.name for turn in trajectory.turns for call in turn.tool_calls]
    changing = [place for place, name in enumerate(names) if name in KINDS]
    return float("look_up" in names[: changing[0]]) if changing else None
