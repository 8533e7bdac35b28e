"""Oracle of `forge_envs.teams.service_desk`."""

from __future__ import annotations

import operator
import re

from forge_envs.oracles.script import Script, read
from forge_envs.teams import service_desk

_COMPARE = {">": operator.gt, "<": operator.lt, ">=": operator.ge}
_RULES = [
    (re.escape(text.rstrip(".")).replace(r"\{n\}", r"(\d+)"), kind, fact, _COMPARE[sign])
    for kind, text, condition, _ in (*service_desk.FORBIDDING, *service_desk.APPROVED)
    for fact, sign, _ in [condition.split()]
]
"""Policy rules: pattern, kind of wish, and the fact and comparison with the rule's number."""


class Oracle(Script):
    """The agent looks up the customer and applies the policy. The others use the scripts of `service_desk`."""

    rules: tuple[tuple[str, str], ...] = ()
    """Number and text of each rule."""

    def answer(self, seen: str) -> str:
        if self.agent == "agent":
            return self.serve(seen)
        if self.agent == "customer":
            return service_desk.customer(seen)
        reply = service_desk.supervisor(seen)
        approval = re.fullmatch(r'CALL approve\("(.+)"\)', reply)
        return self.call("approve", request=approval[1]) if approval else reply

    def serve(self, seen: str) -> str:
        """Return a call, a question to the supervisor, or the result for the customer."""
        if seen.startswith("Policy"):
            self.rules = tuple(re.findall(r"^(\d+)\. (.+)\.$", seen, re.MULTILINE))
        if wish := re.search(r"Customer: I am (.+)\. Please (\w+) .*?(\w+)\.$", seen, re.MULTILINE):
            self.name, self.kind, self.what = wish[1], wish[2].replace("change", "change_plan"), wish[3]
            if self.what.isdecimal() and not self.rules:
                return self.call(self.kind, order=int(self.what))
            return self.call("look_up", customer=self.name)
        if re.search(r"^.+: plan \w+, \d+ months old; \d+ complaints$", seen, re.MULTILINE):
            return self.decide(seen)
        if seen.startswith("Supervisor: Approved"):
            return self.do()
        if seen.startswith("Supervisor:"):
            return self.refuse(next(number for number, text in self.rules if text.startswith("What needs")))
        return seen.partition(" Now")[0]

    def decide(self, seen: str) -> str:
        """Apply the policy to the wish and the facts that were looked up."""
        facts = {what: int(read(form, seen)) for what, form in
                 (("months", r"(\d+) months old"), ("complaints", r"(\d+) complaints"))}  # fmt: skip
        which = rf"({self.what}): \w+" if self.what.isdecimal() else rf"(\d+): {self.what}"
        order = rf"order {which}, (\d+) euros, (?:open, made|delivered) (\d+) days"
        if match := re.search(order, seen):
            self.order = match[1]
            facts |= {"price": int(match[2]), "days": int(match[3])}
        applying = [(number, text) for number, text in self.rules if self.applies(text, facts)]
        for number, text in applying:
            if "approval" not in text:
                return self.refuse(number)
        if applying:
            return f"supervisor: may I {self.kind} {'' if self.kind == 'change_plan' else self.order} of {self.name}?"
        return self.do()

    def applies(self, text: str, facts: dict[str, int]) -> bool:
        """Whether a rule applies to this wish and these facts."""
        for form, kind, fact, compare in _RULES:
            if match := re.match(form, text):
                return kind == self.kind and bool(compare(facts[fact], int(match[1])))
        return False

    def do(self) -> str:
        """Grant the wish."""
        if self.kind == "change_plan":
            return self.call("change_plan", customer=self.name, plan=self.what)
        return self.call(self.kind, order=int(self.order))

    def refuse(self, number: str) -> str:
        """Refuse the wish by a rule."""
        return self.call("refuse", customer=self.name, rule=int(number))
