import re

import pytest
from team_play import act, begin, shown, with_oracle

import forge_agents as fa
from forge_agents.testing import check_levels
from forge_envs.oracles.service_desk import Oracle
from forge_envs.teams import service_desk, signs
from forge_envs.teams.service_desk import ServiceDesk

NAME = "forge/ServiceDesk-v0"
PLAYERS = {"customer": fa.Scripted(service_desk.customer), "supervisor": fa.Scripted(service_desk.supervisor)}


class Rash(Oracle):
    """Never asks for approval."""

    def serve(self, seen):
        said = super().serve(seen)
        return self.do() if said.startswith("supervisor:") else said


class Overlooks(Oracle):
    """Sometimes overlooks a rule."""

    chance = 0.4

    def applies(self, text, facts):
        return self.rng.random() >= self.chance and super().applies(text, facts)


class Blind(Overlooks):
    chance = 1.0


class Lax(Oracle):
    """The supervisor ignores reviews."""

    def __call__(self, seen):
        return super().__call__(re.sub("Under review.*", "Under review: nobody.", seen))


def test_all_that_may_happen_happens():
    news, approved = [], 0
    for seed in range(20):
        env, _ = shown(NAME, seed, level=6)
        news, approved = [*news, *env.news], approved + len(env.approved)
    for what in ("cancelled", "refunded", "Your plan", "refused"):
        assert sum(what in line for line in news) >= 2
    assert approved >= 2


def test_policy_violations_earn_nothing_and_are_listed():
    rewards, told = [], []
    for seed in range(30):
        env, reward = shown(NAME, seed, Rash, level=4)
        rewards.append(reward)
        told += env.violations
    assert 0.2 < sum(rewards) / 30 < 0.9 and any("against rule" in line for line in told)
    assert sum(shown(NAME, seed, Blind, level=5)[1] for seed in range(30)) <= 15


def test_approving_who_is_under_review_earns_nothing():
    result = [(env, reward) for env, reward in (shown(NAME, n, Lax, level=4) for n in range(40)) if env.violations]
    assert result and all(reward == 0 for _, reward in result)
    assert any("under review" in env.violations[0] for env, _ in result)


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_there_are_orders_for_all_wishes_and_alternatives(kinds):
    for seed in range(5):
        env = begin(ServiceDesk(kinds=kinds, wishes=3, alternatives=True), seed)
        wishes = [wish for options in env.wishes for wish in options]
        assert len(set(wishes)) == 6 and (kinds > 1 or {wish.kind for wish in wishes} == {"cancel"})


def test_levels_get_harder_for_an_agent_that_overlooks_rules():
    means = check_levels(with_oracle(NAME, Overlooks), fa.Oracle(), episodes=20)
    assert means[:2] == [1, 1] and means[-1] < 0.6


def test_agents_read_only_their_own_information():
    env = begin(ServiceDesk(alternatives=True, wishes=2), 4)
    assert "You want to" in env.observe("customer") and "or if that is refused" in env.observe("customer")
    assert "You want" not in env.observe("agent") + env.observe("supervisor")
    env.step("hello")
    assert env.observe("agent").startswith("Policy:\n1. ") and env.observe("agent").endswith("Customer: hello")
    env.step("supervisor: hm?")
    assert env.observe("supervisor").startswith("Under review: ") and "Policy" not in env.observe("supervisor")
    env.step("what?")
    assert env.observe("agent") == "Supervisor: what?"


def test_tools_take_whatever_is_written():
    env = begin(ServiceDesk(max_turns=99))
    before = env.database
    for call, error in (
        ("look_up(nobody)", "there is no customer 'nobody'"), ("cancel(5)", "there is no order 5"),
        (f"refund({10**30})", "there is no order"), ("refuse(nobody, 1)", "no customer"),
        (f'refuse("{env.customer}", 99)', "there is no rule 99; rules are 1 to"),
        (f'change_plan("{env.customer}", "free")', "others are"), ("approve(1)", "no tool is called 'approve'"),
    ):  # fmt: skip
        act(env, "hello", f"CALL {call}")
        assert error in env.observe("agent")
        env.step("sorry")
    assert env.database == before and not env.violations


def test_weak_signs_tell_good_work_from_bad():
    agents = fa.play(f"{NAME}@3", fa.Oracle(), seed=2).trajectories
    good = agents["agent"]
    marks = (signs.calls_work, signs.calls_differ, signs.ends_in_words, service_desk.looked_first)
    assert [mark(good) for mark in marks] == [1, 1, 1, 1]
    assert [mark(agents["supervisor"]) for mark in marks] == [None] * 4
    bad = {"agent": fa.Scripted(lambda seen: "CALL cancel(5)"), **PLAYERS}
    worse = fa.play("forge/ServiceDesk-v0@3", bad, seed=2).trajectories["agent"]
    assert signs.calls_work(worse) == 0 and signs.calls_differ(worse) < 0.2 and service_desk.looked_first(worse) == 0
