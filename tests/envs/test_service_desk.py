import random
import re

import pytest
from team_play import play

import forge_agents as fa
from forge_agents.testing import check_env, check_levels
from forge_envs.teams import service_desk, signs
from forge_envs.teams.service_desk import ServiceDesk

LEVELS = [1, 2, 3, 4, 5, 6]
RULES = (
    (r"No order is cancelled more than (\d+) days after it was made", "cancel", "days", 1),
    (r"No order of less than (\d+) euros is cancelled", "cancel", "price", -1),
    (r"No order is refunded more than (\d+) days after its delivery", "refund", "days", 1),
    (r"No order of less than (\d+) euros is refunded", "refund", "price", -1),
    (r"No plan is changed that is less than (\d+) months old", "change_plan", "months", -1),
    (r"Who has made (\d+) complaints or more stays with the plan", "change_plan", "complaints", 0),
    (r"Cancelling an order of more than (\d+) euros needs approval", "cancel", "price", 1),
    (r"A refund of more than (\d+) euros needs approval", "refund", "price", 1),
    (r"Changing a plan that is more than (\d+) months old needs approval", "change_plan", "months", 1),
)
PLAYERS = {"customer": fa.Scripted(service_desk.customer), "supervisor": fa.Scripted(service_desk.supervisor)}


class Team:
    """Plays the agent from its own observations, and the other seats by the module's functions.

    With probability `overlooks` it does not see that a rule applies.
    """

    def __init__(self, *, asks=True, overlooks=0.0):
        self.asks, self.overlooks, self.rng = asks, overlooks, random.Random(0)

    def __call__(self, seen, agent):
        return self.agent(seen) if agent == "agent" else getattr(service_desk, agent)(seen)

    def agent(self, seen):
        if seen.startswith("Policy") or not hasattr(self, "rules"):
            self.rules = re.findall(r"^(\d+)\. (.+)\.$", seen, re.MULTILINE)
        if wish := re.search(r"Customer: I am (.+)\. Please (\w+) .*?(\w+)\.$", seen, re.MULTILINE):
            self.name, self.kind, self.what = wish[1], wish[2].replace("change", "change_plan"), wish[3]
            if self.what.isdecimal() and not self.rules:
                return f"CALL {self.kind}({self.what})"
            return f'CALL look_up("{self.name}")'
        if "complaints\n" in seen:
            return self.decide(seen)
        if seen.startswith("Supervisor: Approved"):
            return self.do()
        if seen.startswith("Supervisor:"):
            last = next(number for number, text in self.rules if text.startswith("What needs"))
            return f'CALL refuse("{self.name}", {last})'
        return seen.partition(" Now")[0]

    def decide(self, seen):
        plan = re.search(r"plan \w+, (\d+) months old; (\d+) complaints", seen)
        facts = {"months": int(plan[1]), "complaints": int(plan[2])}
        if order := re.search(rf"order (\d+): {self.what}, (\d+) euros, (?:open, made|delivered) (\d+) days", seen):
            self.order = order[1]
            facts |= {"price": int(order[2]), "days": int(order[3])}
        noticed = [rule for rule in self.rules if self.rng.random() >= self.overlooks]
        hit = [(number, text) for number, text in noticed if self.applies(text, facts)]
        for number, text in hit:
            if "approval" not in text:
                return f'CALL refuse("{self.name}", {number})'
        if hit and self.asks:
            return f"supervisor: may I {self.kind} {'' if self.kind == 'change_plan' else self.order} of {self.name}?"
        return self.do()

    def applies(self, text, facts):
        for form, kind, fact, sign in RULES:
            if found := re.match(form, text):
                n = int(found[1])
                return kind == self.kind and (facts[fact] * sign > n * sign if sign else facts[fact] >= n)
        return False

    def do(self):
        if self.kind == "change_plan":
            return f'CALL change_plan("{self.name}", "{self.what}")'
        return f"CALL {self.kind}({self.order})"


def played(team, seed, **settings):
    env = ServiceDesk(**settings)
    return env, play(env, team, seed)


def at(level):
    return dict(fa.spec(f"forge/ServiceDesk-v0@{level}").kwargs)


def test_the_environment_keeps_the_contract():
    check_env("forge/ServiceDesk-v0@4", episodes=2)


@pytest.mark.parametrize("level", LEVELS)
def test_a_team_that_keeps_the_policy_always_earns_one(level):
    for seed in range(12):
        env, reward = played(Team(), seed, **at(level))
        assert reward == 1.0, f"{seed}\n{env.violations}\n{env.render()}"


def test_all_that_may_happen_happens():
    news, approved = [], 0
    for seed in range(20):
        env, _ = played(Team(), seed, **at(6))
        news, approved = [*news, *env.news], approved + len(env.approved)
    for what in ("cancelled", "refunded", "Your plan", "refused"):
        assert sum(what in line for line in news) >= 2
    assert approved >= 2


def test_what_is_against_the_policy_earns_nothing_and_is_told():
    rewards, told = [], []
    for seed in range(30):
        env, reward = played(Team(asks=False), seed, **at(4))
        rewards.append(reward)
        told += env.violations
    assert 0.2 < sum(rewards) / 30 < 0.9 and any("against rule" in line for line in told)
    assert sum(played(Team(overlooks=1), seed, **at(5))[1] for seed in range(30)) <= 15


def test_approving_who_is_under_review_earns_nothing():
    class Lax(Team):
        def __call__(self, seen, agent):
            return super().__call__(re.sub("Under review.*", "Under review: nobody.", seen), agent)

    found = [(env, reward) for env, reward in (played(Lax(), seed, **at(4)) for seed in range(40)) if env.violations]
    assert found and all(reward == 0 for _, reward in found)
    assert any("under review" in env.violations[0] for env, _ in found)


@pytest.mark.parametrize(
    "say",
    [lambda seen: "", lambda seen: seen, lambda seen: "BYE", lambda seen: "CALL cancel(417)",
     lambda seen: 'CALL refuse("Ada Berg", 1)', lambda seen: "supervisor: please"],
    ids=["silence", "copying", "bye", "an order", "a refusal", "asking"],
)  # fmt: skip
def test_what_knows_nothing_earns_nothing(say):
    for level in (1, 5):
        for seats in (fa.Scripted(say), {"agent": fa.Scripted(say), **PLAYERS}):
            episodes = [fa.play(f"forge/ServiceDesk-v0@{level}", seats, seed=seed) for seed in range(5)]
            assert sum(episode.rewards["agent"] for episode in episodes) == 0


def test_each_level_is_harder_for_an_agent_that_overlooks_rules():
    means = check_levels("forge/ServiceDesk-v0", fa.Scripted(Team(overlooks=0.4)), episodes=20)
    assert means[:2] == [1, 1] and means[-1] < 0.6


def test_nobody_reads_what_is_anothers():
    env = ServiceDesk(alternatives=True, wishes=2)
    env.reset(seed=4)
    assert "You want to" in env.observe("customer") and "or if that is refused" in env.observe("customer")
    assert "You want" not in env.observe("agent") + env.observe("supervisor")
    env.step("hello")
    assert env.observe("agent").startswith("Policy:\n1. ") and env.observe("agent").endswith("Customer: hello")
    env.step("supervisor: hm?")
    assert env.observe("supervisor").startswith("Under review: ") and "Policy" not in env.observe("supervisor")
    env.step("what?")
    assert env.observe("agent") == "Supervisor: what?"


def test_tools_take_whatever_is_written():
    env = ServiceDesk(max_turns=99)
    env.reset(seed=0)
    before = env.database
    for call, error in (
        ("look_up(nobody)", "there is no customer 'nobody'"), ("cancel(5)", "there is no order 5"),
        (f"refund({10**30})", "there is no order"), ("refuse(nobody, 1)", "no customer"),
        (f'refuse("{env.customer}", 99)', "there is no rule 99; rules are 1 to"),
        (f'change_plan("{env.customer}", "free")', "others are"), ("approve(1)", "no tool is called 'approve'"),
    ):  # fmt: skip
        env.step("hello")
        env.step(f"CALL {call}")
        assert error in env.observe("agent")
        env.step("sorry")
    assert env.database == before and not env.violations


def test_weak_signs_tell_good_work_from_bad():
    def seat(agent, **habits):
        return fa.play("forge/ServiceDesk-v0@3", fa.Scripted(Team(**habits)), seed=2).trajectories[agent]

    good = seat("agent")
    marks = (signs.calls_work, signs.calls_differ, signs.ends_in_words, service_desk.looked_first)
    assert [mark(good) for mark in marks] == [1, 1, 1, 1] and [mark(seat("supervisor")) for mark in marks] == [None] * 4
    bad = {"agent": fa.Scripted(lambda seen: "CALL cancel(5)"), **PLAYERS}
    worse = fa.play("forge/ServiceDesk-v0@3", bad, seed=2).trajectories["agent"]
    assert signs.calls_work(worse) == 0 and signs.calls_differ(worse) < 0.2 and service_desk.looked_first(worse) == 0


@pytest.mark.parametrize("wrong", [{"kinds": 0}, {"rules": 7}, {"wishes": 4}, {"customers": 0}])
def test_settings_that_make_no_desk_are_told(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=. must be"):
        ServiceDesk(**wrong)
