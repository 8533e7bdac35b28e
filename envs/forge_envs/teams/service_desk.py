"""ServiceDesk: a customer with wishes, an agent with a database and a policy, and a supervisor who approves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.tools import Tool, ToolFormat, tool
from forge_agents.tools.env import ToolEnv
from forge_agents.types import Trajectory
from forge_envs.shared import PEOPLE, Database, check_ranges, choose, end_for_all, sample

ITEMS = ("bell", "boat", "chair", "clock", "drum", "flute", "kettle", "kite", "lamp", "map", "radio", "rope", "vase")
PLANS = ("small", "middle", "large", "huge")
KINDS = ("cancel", "refund", "change_plan")
_DAYS, _PRICES, _MONTHS, _COMPLAINTS = (1, 60), (10, 200), (1, 24), (0, 3)
"""Ranges of values in the database, inclusive."""
_FACTS = (
    "SELECT {what} FROM customers LEFT JOIN orders ON orders.customer = customers.name AND orders.id = ? "
    "WHERE customers.name = ?"
)
FORBIDDING = (
    ("cancel", "No order is cancelled more than {n} days after it was made.", "days > {n}", (30, 50)),
    ("cancel", "No order of less than {n} euros is cancelled.", "price < {n}", (20, 60)),
    ("refund", "No order is refunded more than {n} days after its delivery.", "days > {n}", (30, 50)),
    ("refund", "No order of less than {n} euros is refunded.", "price < {n}", (20, 60)),
    ("change_plan", "No plan is changed that is less than {n} months old.", "months < {n}", (3, 10)),
    ("change_plan", "Who has made {n} complaints or more stays with the plan.", "complaints >= {n}", (2, 3)),
)
APPROVED = (
    ("cancel", "Cancelling an order of more than {n} euros needs approval.", "price > {n}", (60, 140)),
    ("refund", "A refund of more than {n} euros needs approval.", "price > {n}", (60, 140)),
    ("change_plan", "Changing a plan that is more than {n} months old needs approval.", "months > {n}", (6, 18)),
)
"""Rules of policies, which forbid or require approval: kind of wish, text, condition on the facts, range of {n}."""
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
    """A rule of the policy."""

    number: int
    text: str
    kind: str
    """Kind of wish, one of `KINDS`. Empty for the rule about missing approval."""
    condition: str
    """SQL condition on an order and its customer."""
    approval: bool
    """Whether the rule requires approval instead of forbidding."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A customer's wish: to cancel or refund an order, or to change the plan."""

    kind: str
    order: int = 0
    item: str = ""
    plan: str = ""

    def describe(self, *, by_number: bool) -> str:
        """Return the wish in the customer's words, with the order's number or item."""
        if self.plan:
            return f"change to the plan {self.plan}"
        which = f"order {self.order}" if by_number else f"the order of the {self.item}"
        return f"{self.kind} {which}"

    @property
    def news(self) -> str:
        """The customer's notification once the wish is granted."""
        done = {"cancel": "cancelled", "refund": "refunded"}
        if self.plan:
            return f"Your plan is {self.plan} now."
        return f"Order {self.order} of the {self.item} is {done[self.kind]}."


class ServiceDesk(ToolEnv):
    """Cooperative game of three agents.

    ``customer`` has one or more private wishes (cancel or refund an order, change the plan), each perhaps with an
    alternative in case of a refusal. The customer writes to ``agent``, is notified of changes to its orders and plan,
    and ends the episode by the word BYE. The agent alone reads the policy. Its tools look up and change the shop's
    database without checking the policy. The agent refuses forbidden wishes by the number of a rule. Its texts go to
    ``supervisor`` if they begin with "supervisor:", else to the customer. The supervisor alone knows which customers
    are under review, and approves requests for the others. Policy, customers and orders are generated for every
    episode.

    All agents get 1 if the final database is what the policy prescribes for the wishes, no change violated the policy
    or lacked approval, and nothing was approved for a customer under review; else 0. A truncated episode earns 0. At
    the end infos contain ``done`` (whether the database is correct), ``violations`` (descriptions) and ``wishes``.

    Args:
        kinds: Number of kinds of wishes, 1 to 3: cancel, refund, change_plan.
        knows_numbers: Whether the customer knows its order numbers. Otherwise the agent must look them up.
        rules: Number of forbidding rules, 0 to 6.
        approvals: Whether some wishes need the supervisor's approval.
        alternatives: Whether each wish has an alternative.
        wishes: Number of wishes, 1 to 3.
        customers: Number of customers in the database, 1 to 40.
        examples: Whether the agent reads two example calls instead of the tools' description. For small models, with
            cancellations only.
        tool_format: As in `ToolEnv`.
        max_turns: Number of decisions, tool calls included, after which the episode is truncated. None uses 16 per wish
            and alternative.
        max_message_chars: Maximum length of a message. Longer ones are cut.
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
        limit = 16 * wishes * (1 + alternatives) if max_turns is None else max_turns
        super().__init__(tool_format=tool_format, max_turns=limit)
        check_ranges(kinds=(kinds, 1, 3), rules=(rules, 0, len(FORBIDDING)), wishes=(wishes, 1, 3))
        check_ranges(customers=(customers, 1, 40), max_message_chars=(max_message_chars, 1, 4000))
        self._kinds, self._knows_numbers, self._num_rules, self._approvals = kinds, knows_numbers, rules, approvals
        self._alternatives, self._num_wishes, self._customers = alternatives, wishes, customers
        self._max_message_chars, self._examples = max_message_chars, examples

    # ---- the shop

    def setup(self, rng: np.random.Generator) -> None:
        self._draw_shop(rng)
        self._draw_policy(rng)
        self._draw_wishes(rng)
        self.reviewed = tuple(name for name in self.names if rng.random() < 0.4)
        self.gold = self._expected_database()
        self.approved: set[str] = set()
        self.violations: list[str] = []
        self.news: list[str] = []
        self.inbox = {"customer": "", "agent": "", "supervisor": ""}
        self.has_policy = False

    def _draw_shop(self, rng: np.random.Generator) -> None:
        self.names = sample(rng, PEOPLE, self._customers)
        num_orders = 2 * self._num_wishes + 2  # per customer, half of them open
        if self._kinds == 1:  # all wishes and alternatives are cancellations
            num_orders = max(num_orders, 2 * self._num_wishes * (1 + self._alternatives))
        numbers = iter((rng.permutation(900)[: num_orders * len(self.names)] + 100).tolist())
        customers, orders, complaints = [], [], []
        for name in self.names:
            customers.append((name, choose(rng, PLANS), _within(rng, _MONTHS)))
            complaints += [(name, "complaint")] * _within(rng, _COMPLAINTS)
            for index, item in enumerate(sample(rng, ITEMS, num_orders)):
                status = ("open", "delivered")[index % 2]
                orders.append((next(numbers), name, item, _within(rng, _PRICES), status, _within(rng, _DAYS)))
        self.database = Database.of(
            {
                "customers(name, plan, months)": customers,
                "orders(id, customer, item, price, status, days)": orders,
                "tickets(customer, about)": complaints,
            }
        )

    def _draw_policy(self, rng: np.random.Generator) -> None:
        kinds = KINDS[: self._kinds]
        forms = [(*form, False) for form in sample(rng, FORBIDDING, self._num_rules)]
        forms += [(*form, True) for form in APPROVED if self._approvals]
        forms = [form for form in forms if form[0] in kinds]
        if self._approvals:
            forms.append(("", _UNAPPROVED, "", (0, 0), False))
        rules = []
        for number, (kind, text, condition, span, approval) in enumerate(sample(rng, forms, len(forms)), 1):
            n = _within(rng, span)
            rules.append(Rule(number, text.format(n=n), kind, condition.format(n=n), approval))
        self.rules = tuple(rules)

    def _draw_wishes(self, rng: np.random.Generator) -> None:
        """Draw the customer and its wishes, each with its alternative."""
        self.customer, *_ = self.names
        name, plan, _ = self.database.rows("SELECT * FROM customers WHERE name = ?", self.customer)[0]
        orders = self.database.rows("SELECT id, item, status FROM orders WHERE customer = ? ORDER BY id", name)
        left = {
            "cancel": [Wish("cancel", number, item) for number, item, status in orders if status == "open"],
            "refund": [Wish("refund", number, item) for number, item, status in orders if status == "delivered"],
            "change_plan": [Wish("change_plan", plan=choose(rng, [other for other in PLANS if other != plan]))],
        }
        drawn: list[Wish] = []
        for _ in range(self._num_wishes * (1 + self._alternatives)):
            wishes = left[choose(rng, [kind for kind in KINDS[: self._kinds] if left[kind]])]
            drawn.append(wishes.pop(int(rng.integers(len(wishes)))))
        step = 1 + self._alternatives
        self.wishes = [tuple(drawn[start : start + step]) for start in range(0, len(drawn), step)]

    def _forbidding_rule(self, wish: Wish, customer: str, *, approved: bool) -> Rule | None:
        """Return the first rule that forbids a wish now, else the rule about missing approval if it applies."""
        applying = [rule for rule in self.rules if rule.kind == wish.kind and self._applies(rule, wish, customer)]
        if forbidding := [rule for rule in applying if not rule.approval]:
            return forbidding[0]
        return next(rule for rule in self.rules if not rule.kind) if applying and not approved else None

    def _applies(self, rule: Rule, wish: Wish, customer: str) -> bool:
        complaints = "(SELECT COUNT(*) FROM tickets WHERE tickets.customer = name AND about = 'complaint')"
        condition = rule.condition.replace("complaints", complaints)
        return bool(self.database.rows(_FACTS.format(what=condition), wish.order, customer)[0][0])

    def _expected_database(self) -> Database:
        """Return the database that the policy prescribes for the wishes."""
        end = self.database
        for wishes in self.wishes:
            for wish in wishes:
                rule = self._forbidding_rule(wish, self.customer, approved=self.customer not in self.reviewed)
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
        if rule not in [existing.number for existing in self.rules]:
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
        rows = self.database.rows("SELECT customer FROM orders WHERE id = ?", number)
        customer, request = (rows[0][0], str(number)) if rows else (request, request)
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
        rows = self.database.rows("SELECT customer, item, status FROM orders WHERE id = ?", number)
        if not rows:
            raise ValueError(f"there is no order {order}")
        customer, item, status = rows[0]
        if status != needed:
            raise ValueError(f"order {order} is {status}; to {kind} it, it must be {needed}")
        return self._record(Wish(kind, order, item), customer)

    def _record(self, wish: Wish, customer: str) -> str:
        """Apply a change without checking the policy, and record any violation."""
        subject = customer if wish.plan else str(wish.order)
        if rule := self._forbidding_rule(wish, customer, approved=subject in self.approved):
            change = wish.describe(by_number=True)
            self.violations.append(f"{change} was done for {customer} against rule {rule.number}")
        self.database = _done(self.database, wish, customer)
        if customer == self.customer:
            self.news.append(wish.news)
        return f"Done: {wish.describe(by_number=True)}. Now tell the customer."

    # ---- texts and rules

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
        if agent == "customer":  # everything, every time, so that a stateless function can play the customer
            return "\n".join([self._goal(), *(f"News: {line}" for line in self.news), self.inbox[agent]]).rstrip("\n")
        if agent == "supervisor":
            return f"{self._under_review()}\n{self.inbox[agent]}"
        message = f"{_EXAMPLES}{self.inbox[agent]}\nAnswer:" if self._examples else self.inbox[agent]
        return message if self.has_policy else f"{self._policy()}{message}"

    def _goal(self) -> str:
        texts = [[wish.describe(by_number=self._knows_numbers) for wish in wishes] for wishes in self.wishes]
        wants = "\n".join(f"You want to: {', or if that is refused to: '.join(options)}." for options in texts)
        return f"You are {self.customer}.\n{wants}"

    def _policy(self) -> str:
        rules = "".join(f"{rule.number}. {rule.text}\n" for rule in self.rules)
        return f"Policy:\n{rules}{_HOW}\n\n" if rules else ""

    def _under_review(self) -> str:
        return f"Under review: {', '.join(self.reviewed) or 'nobody'}."

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the wishes, the policy and the reviews that other agents know."""
        knowledge = {"customer": self._goal(), "agent": self._policy(), "supervisor": self._under_review()}
        return tuple(text for owner, text in knowledge.items() if owner != agent and text)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Draw other wishes, another policy and other reviews, unless the agent knows them."""
        if agent != "customer":
            self.wishes = [(Wish("change_plan", plan=choose(rng, PLANS)),)]
        if agent != "agent":
            self._draw_policy(rng)
        if agent != "supervisor":
            self.reviewed = tuple(name for name in self.names if rng.random() < 0.5)

    def act(self, agent: str, action: str) -> Outcome:
        message = " ".join(action.split())[: self._max_message_chars]
        if agent == "customer":
            if _BYE.search(action):
                return self._end()
            self.inbox["agent"] = f"Customer: {message}"
            return Outcome(next="agent")
        if agent == "supervisor":
            self.inbox["agent"] = f"Supervisor: {message}"
            return Outcome(next="agent")
        self.has_policy = True
        recipient = "supervisor" if _TO_SUPERVISOR.match(action) else "customer"
        self.inbox[recipient] = f"Agent: {message}"
        return Outcome(next=recipient)

    def _end(self) -> Outcome:
        done = _contents(self.database) == _contents(self.gold)
        wishes = [[wish.describe(by_number=True) for wish in options] for options in self.wishes]
        facts = {"done": done, "violations": list(self.violations), "wishes": wishes}
        return end_for_all(self.possible_agents, float(done and not self.violations), facts)


def _within(rng: np.random.Generator, span: tuple[int, int]) -> int:
    """Draw an integer from an inclusive range."""
    return int(rng.integers(span[0], span[1] + 1))


def _done(database: Database, wish: Wish, customer: str) -> Database:
    if wish.plan:
        return database.after("UPDATE customers SET plan = ?, months = 0 WHERE name = ?", wish.plan, customer)
    status = {"cancel": "cancelled", "refund": "refunded"}[wish.kind]
    return database.after("UPDATE orders SET status = ? WHERE id = ?", status, wish.order)


def _refused(database: Database, customer: str, rule: int) -> Database:
    return database.after("INSERT INTO tickets VALUES (?, ?)", customer, f"refused under rule {rule}")


def _contents(database: Database) -> list[list[tuple[int | str, ...]]]:
    """Return all rows of all tables, independent of their order."""
    tables = ("customers", "orders", "tickets")
    return [sorted(database.rows(f"SELECT * FROM {table}")) for table in tables]  # noqa: S608  # constant names


# ---- scripted players, and a weak verifier


def customer(observation: str) -> str:
    """Scripted customer, ``fa.Scripted(customer)``: repeats its next wish until the news settle it, then writes BYE."""
    name = re.search(r"You are (.+)\.", observation)
    news = re.findall(r"^News: (.+)", observation, re.MULTILINE)
    for line in re.findall(r"^You want to: (.+)\.$", observation, re.MULTILINE):
        for wish in line.split(", or if that is refused to: "):
            settled = next((index for index, item in enumerate(news) if _settles(item, wish)), None)
            if settled is None:
                return f"I am {name[1] if name else 'a customer'}. Please {wish}."
            item, news = news[settled], news[settled + 1 :]
            if "refused under" not in item:
                break
    return "BYE"


def _settles(news: str, wish: str) -> bool:
    """Whether a notification grants or refuses a wish."""
    if "refused under" in news:
        return True
    *_, last = wish.split()
    return news == f"Your plan is {last} now." or f" {last} is " in news or news.startswith(f"Order {last} ")


def supervisor(observation: str) -> str:
    """Scripted supervisor: approves requests with a number and name, unless the name is under review."""
    request = observation.rpartition("\nAgent: ")[2]
    if observation.startswith("Approved"):
        return observation.partition(" Now")[0]
    if not (name := re.search(r"\b[A-Z]\w+ [A-Z]\w+\b", request)):
        return "Not approved: say for whom, with first and last name."
    if name[0] in observation.partition("\n")[0]:
        return f"Not approved: {name[0]} is under review."
    order = re.search(r"\b\d{3}\b", request)
    return f'CALL approve("{order[0] if order else name[0]}")'


def looked_first(trajectory: Trajectory) -> float | None:
    """Return 1 if the agent looked the customer up before its first change, else 0, or None without changes."""
    names = [call.name for turn in trajectory.turns for call in turn.tool_calls]
    changes = [index for index, name in enumerate(names) if name in KINDS]
    return float("look_up" in names[: changes[0]]) if changes else None
