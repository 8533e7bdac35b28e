"""Episodes that are played again from single decisions on."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
from plain_env import PlainRound

import forge_agents as fa
from forge_agents.rollout.alternatives import ForkRule
from forge_agents.rollout.policy_engine import PolicyEngine, sampling_seed
from forge_agents.rollout.rollout import Rollout

from .fakes import Count, Engine  # noqa: TID252 (tests are no installed package)

MODEL = fa.Policy("m", name="m")
RULE = ForkRule(samples=2, decisions="every", policies={"m"})


class Round(PlainRound):
    """Two rounds of two agents, each rewarded with its numbers."""

    def setup(self, rng):
        self.rounds = 0

    def instructions(self, agent):
        return f"You are {agent}."

    def observe_text(self, agent):
        return f"round {self.rounds}"

    def act_all(self, actions):
        self.rounds += 1
        return fa.Outcome(rewards={agent: float(text) for agent, text in actions.items()}, done=self.rounds == 2)


class Seeded(Engine):
    """Each answer is a digit that follows from the seed. Answers of the second prompt have three tokens."""

    def __init__(self):
        super().__init__()
        self.seeds = []

    async def generate(self, prompt_ids, sampling, *, seed=None):
        self.seeds.append(seed)
        completion = await super().generate(prompt_ids, sampling, seed=seed)
        tokens = (random.Random(seed).randrange(1, 10),) * (1 if len(prompt_ids) == 2 else 3)
        span = replace(completion.versions[0], end=len(tokens))
        return replace(completion, token_ids=tokens, logprobs=(-0.5,) * len(tokens), versions=(span,))


def collect(env=Count, *, size=1, rule=RULE, policies=MODEL, limit=None, engine=None, **options):
    engine = engine or Seeded()
    engines = {"m": PolicyEngine(engine, engine)}
    rollout = Rollout(make_env=env, env_id="t", policies=policies, engines=engines, forks=rule, **options)
    return asyncio.run(rollout.group(5, size, limit=limit and asyncio.Semaphore(limit), rng_key="k"))


def texts(episode):
    return [turn.action for turn in episode.turns]


@pytest.mark.parametrize("env", [Count, Round])
def test_alternatives_continue_the_conversations_with_samples_of_their_own(env):
    engine = Seeded()
    group = collect(env, engine=engine)
    plain = collect(env, rule=None)
    (episode,) = group.episodes
    assert [texts(each) for each in plain.episodes] == [texts(episode)] and plain.alternatives is None
    assert group.alternatives.decisions == tuple((0, turn) for turn in (0, 0, 1, 1, 2, 2, 3, 3))
    assert len(set(engine.seeds)) == len(engine.seeds)
    for (_, index), other in zip(group.alternatives.decisions, group.alternatives.group.episodes, strict=True):
        assert other.error is None and len(other.turns) == 4
        first = index if env is Count else index // 2 * 2  # the others of a round decide the same
        same = [turn for turn in range(4) if turn < first or (env is Round and turn // 2 == index // 2 != turn)]
        for turn in same:
            if turn != index:
                assert other.turns[turn] == episode.turns[turn]
        decided, own = other.turns[index], episode.turns[index]
        assert (decided.agent, decided.prompt_ids, decided.observation) == (own.agent, own.prompt_ids, own.observation)
        for agent, trajectory in other.trajectories.items():
            early, late = trajectory.turns
            assert late.prompt_ids == (*early.prompt_ids, *early.response_ids, 9)  # the conversation goes on
            assert trajectory.reward == sum(int(turn.action) for turn in trajectory.turns), agent
    alternatives = group.alternatives.group.episodes
    assert len({tuple(texts(each)) for each in (episode, *alternatives)}) > 4


def test_only_tokens_that_were_sampled_for_alternatives_count():
    """First answers have one token and second ones three, so from turns 0, 1, 2 and 3 on: 8, 7, 6 and 3 tokens."""
    assert collect().alternatives.tokens == 2 * (8 + 7 + 6 + 3)
    # in rounds, one agent decides again in its own round, and both in the second: 1 + 6 for each of the first two
    assert collect(Round).alternatives.tokens == 2 * (7 + 7 + 3 + 3)


@pytest.mark.parametrize(("decisions", "turns"), [("longest", {2}), (1, {0, 1, 2, 3}), (9, {0, 1, 2, 3})])
def test_decisions_are_chosen_by_the_rule(decisions, turns):
    group = collect(size=40, rule=replace(RULE, samples=1, decisions=decisions))
    chosen = Counter(turn for _, turn in group.alternatives.decisions)
    assert set(chosen) == turns and sum(chosen.values()) == (160 if decisions == 9 else 40)
    assert group.alternatives.decisions == tuple(sorted(group.alternatives.decisions))


def test_only_decisions_of_the_named_policies_are_played_again():
    group = collect(policies={"a": fa.Scripted(lambda _: "1", name="fixed"), "b": MODEL})
    assert {turn for _, turn in group.alternatives.decisions} == {1, 3}


@pytest.mark.parametrize("env", [Count, Round])
def test_a_repeated_rollout_has_the_same_alternatives(env):
    first, second = (collect(env, size=3, rule=replace(RULE, decisions=2), limit=limit) for limit in (None, 1))
    assert first.alternatives.decisions == second.alternatives.decisions
    played = [[texts(each) for each in group.alternatives.group.episodes] for group in (first, second)]
    assert played[0] == played[1] and len(played[0]) == 12


def test_random_players_and_oracles_draw_anew_in_each_alternative():
    class Counting(Count):
        def legal_actions(self, agent):
            return list("0123456789")

    class Oracle:
        def __init__(self, agent, settings, rng):
            self.rng, self.count = rng, 0

        def __call__(self, observation):
            self.count += 1
            return f"{self.count}{self.rng.randrange(1000):03}"

    fa.register("alternatives/Counting-v0", entry_point=Counting, oracle=Oracle)
    for other in (fa.Random(shared=True), fa.Oracle(shared=True)):
        group = collect(lambda: fa.make("alternatives/Counting-v0"), policies={"a": MODEL, "b": other})
        own = texts(group.episodes[0])
        from_first = [texts(each) for each in group.alternatives.group.episodes[:2]]
        assert len({tuple(each[1::2]) for each in (own, *from_first)}) == 3
        if isinstance(other, fa.Oracle):  # the oracle's memory continues
            late = [texts(each) for each in group.alternatives.group.episodes[2:]]
            assert [[answer[0] for answer in each[1::2]] for each in late] == [["1", "2"]] * 2
            assert all(each[1] == own[1] and each[3] != own[3] for each in late)


def test_copies_are_closed_and_at_most_the_limit_plays_at_a_time():
    live, most, copies = set(), [], []

    class Closing(Count):
        def reset(self, *args, **options):
            super().reset(*args, **options)
            live.add(id(self))

        def __deepcopy__(self, memo):
            twin = type(self)()
            twin.__dict__ = {name: list(v) if isinstance(v, list) else dict(v) if isinstance(v, dict) else v
                             for name, v in vars(self).items()}  # fmt: skip
            copies.append(twin)  # an object that lives keeps its id
            live.add(id(twin))
            return twin

        def close(self):
            live.discard(id(self))

    class Busy(Seeded):
        asking = 0

        async def generate(self, *args, **options):
            self.asking += 1
            most.append(self.asking)
            result = await super().generate(*args, **options)
            self.asking -= 1
            return result

    for decisions in ("every", "longest", 1):
        collect(Closing, size=3, limit=2, engine=Busy(), rule=replace(RULE, decisions=decisions))
        assert not live and max(most) == 2 and copies


def test_keys_of_episodes_and_alternatives_differ():
    assert sampling_seed("k/0/0/a/0") != sampling_seed("k/0/0/alternatives/0/0/0/a/0")


class Forgetful(Count):
    """A move other than 1 is illegal, which only the infos of that step say."""

    def step(self, action):
        agent = self.agent_selection
        super().step(action)
        self.infos = {name: {} for name in self.agents}
        if agent in self.infos and action == "2":
            self.infos[agent] = {"illegal": "not 2"}


def test_alternatives_keep_the_record_of_illegal_moves_before_them():
    rule = ForkRule(samples=1, decisions="every", policies={"a", "b"})
    players = {name: fa.Scripted(lambda observation: "2", name=name) for name in "ab"}
    group = collect(Forgetful, rule=rule, policies=players)

    def illegal(episode):
        return [turn.info.get("illegal") for turn in episode.turns]

    assert illegal(group.episodes[0])[:2] == ["not 2", "not 2"]
    for episode in group.alternatives.group.episodes:
        assert illegal(episode) == illegal(group.episodes[0])
