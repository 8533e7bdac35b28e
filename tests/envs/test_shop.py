import re
from itertools import count

import pytest
from team_play import act, begin, play

from forge_envs.teams.shop import CLERKS_LIMIT, Shop


def number(text):
    return int(text.replace(".", ""))


class Team:
    """Plays all agents from their own observations only. The arguments add mistakes."""

    def __init__(self, *, greedy=False, lax=False, careless=False):
        self.greedy, self.lax, self.careless = greedy, lax, careless
        self.asked = self.refused = False

    def __call__(self, observation, agent):
        return getattr(self, agent)(observation)

    def customer(self, seen):
        if wish := re.match(r"You want to buy: (\d+) x (\w+)\. You can spend ([\d.]+) in all", seen):
            self.quantity, self.item, self.budget = int(wish[1]), wish[2], number(wish[3])
            return f"{self.quantity} x {self.item}, at most {wish[3]} in all, please."
        if self.greedy:
            return "LEAVE"
        offer = re.search(r"Offer: .* for ([\d.]+)\.$", seen)
        return "ACCEPT" if offer and (self.careless or number(offer[1]) <= self.budget) else "LEAVE"

    def clerk(self, seen):
        if wish := re.match(r"Customer: (\d+) x (\w+), at most ([\d.]+)", seen):
            self.want = int(wish[1]), wish[2], number(wish[3])
            return f'CALL stock("{wish[2]}")'
        quantity, item, budget = self.want
        if stock := re.match(r"\w+: ([\d.]+) each, (\d+) in stock", seen):
            full = number(stock[1]) * quantity
            self.discount = 0 if self.careless else max(0, -((budget - full) * 100 // full))
            if int(stock[2]) < quantity:
                return "We have not enough of these."
            if self.discount > CLERKS_LIMIT:
                return f"manager: may I give {self.discount} % on {item}?"
        if seen.startswith("Manager: no"):
            return "That price is too low for us."
        if seen.startswith("Offered"):
            return "Here is my offer."
        return f"CALL offer(item={item}, quantity={quantity}, discount={self.discount})"

    def manager(self, seen):
        if wish := re.match(r"Clerk: manager: may I give (\d+) % on (\w+)", seen):
            self.question = int(wish[1]), wish[2]
            return f"CALL margin({wish[2]})"
        discount, item = self.question
        if bears := re.search(r"at most (\d+) %", seen):
            return f"CALL approve({item}, {discount})" if self.lax or discount <= int(bears[1]) else "no"
        return "yes"


def played(seed, **habits):
    env = Shop(tool_format="plain")
    return env, play(env, Team(**habits), seed)


def test_a_perfect_team_always_earns_one():
    cases = {True: 0, False: 0}
    for seed in range(40):
        env, reward = played(seed)
        assert reward == 1.0, f"{seed}\n{env.render()}"
        cases[env.deal] += 1
    assert min(cases.values()) >= 5


@pytest.mark.parametrize(("habit", "least", "most"), [("greedy", 0.1, 0.5), ("lax", 0.7, 0.99), ("careless", 0.1, 0.9)])
def test_every_bad_habit_costs(habit, least, most):
    rewards = [played(seed, **{habit: True})[1] for seed in range(30)]
    assert least <= sum(rewards) / len(rewards) <= most
    assert (0.5 in rewards) == (habit == "lax")


def wanting(**changes):
    env = Shop(tool_format="plain", num_goods=3)
    env.reset(seed=next(seed for seed in count() if _deal(seed)))
    for name, value in changes.items():
        setattr(env, name, value)
    return env


def _deal(seed):
    env = begin(Shop(num_goods=3), seed)
    return env.deal and env.stock_of[env.wanted] > env.quantity


def sell(env, quantity=None, item=None, discount=0):
    env.step("hello")
    act(env, f"CALL offer({item or env.wanted}, {quantity or env.quantity}, {discount})", "please")
    env.step("I ACCEPT, I do not LEAVE")
    return env.rewards["customer"]


def test_the_reward_names_what_went_wrong():
    assert sell(wanting(budget=10**6, bears=dict.fromkeys(wanting().goods, 40))) == 1.0
    assert sell(wanting(budget=10**6, bears=dict.fromkeys(wanting().goods, 4)), discount=5) == 0.5
    assert sell(wanting(budget=1)) == 0.0
    assert sell(wanting(budget=10**6), quantity=wanting().quantity + 1) == 0.0
    env = wanting(budget=10**6)
    assert sell(env, item=next(item for item in env.goods if item != env.wanted), quantity=1) == 0.0
    assert env.infos["clerk"] | {"sound": 0} == env.infos["clerk"] | {"end": "ACCEPT", "satisfied": False, "sound": 0}


def test_rights_are_those_of_the_agent():
    env = wanting()
    assert "CALL" not in env.instructions("customer") and "CALL approve" not in env.instructions("clerk")
    env.step("hello")
    env.step(f"CALL approve({env.wanted}, 40)")
    assert "no tool is called 'approve'; tools: stock, offer" in env.observe("clerk")
    env.step(f"CALL offer({env.wanted}, 1, 11)")
    assert "not allowed" in env.observe("clerk") and env.offered is None
    env.step("manager: help")
    act(env, f"CALL approve({env.wanted}, 20)", "done")
    env.step(f"CALL offer({env.wanted}, 1, 20)")
    assert env.offered.discount == 20
    act(env, f"CALL offer({env.wanted}, 99)", "CALL stock(unicorn)")
    assert env.offered.quantity == 1 and "the shop has no 'unicorn'" in env.observe("clerk")


def test_accept_without_an_offer_is_a_message():
    env = wanting()
    env.step("ACCEPT")
    assert (env.agent_selection, env.observe("clerk")) == ("clerk", "Customer: ACCEPT")


def test_an_endless_talk_is_cut_off():
    env = begin(Shop(max_turns=4))
    for _ in range(4):
        env.step("hm")
    assert all(env.truncations.values()) and env.rewards["clerk"] == 0.0
