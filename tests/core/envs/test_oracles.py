"""Oracles are created per agent and episode, and read only that agent's observations."""

import asyncio
import random
from dataclasses import replace

import pytest
from refusals import raises

import forge_agents as fa
from forge_agents.bench.entrants import read_player
from forge_agents.bench.fingerprints import player_facts
from forge_agents.envs import registry
from forge_agents.envs.oracles import oracle_of
from forge_agents.errors import ForgeError
from forge_agents.rollout import Rollout

AGENTS = ["ann", "ben", "cat"]


class Turns(fa.TurnEnv):
    """Each agent reads its name and a number, and earns a reward for answering with both, twice."""

    possible_agents = AGENTS

    def __init__(self, top=100, sharp=False):
        super().__init__()
        self.top, self.sharp = top, sharp

    def setup(self, rng):
        self.numbers = {agent: int(rng.integers(self.top)) for agent in self.agents}
        self.turn = 0

    def instructions(self, agent):
        return "Say it again."

    def observe_text(self, agent):
        return f"{agent} has {self.numbers[agent]}"

    def act(self, agent, action):
        self.turn += 1
        reward = {agent: float(action == f"{agent}: {self.observe_text(agent)}, {self.turn // 4}")}
        return fa.Outcome(rewards=reward, done=self.turn == 2 * len(AGENTS))


class AtOnce(fa.ParallelTurnEnv):
    possible_agents = AGENTS
    setup, instructions, observe_text = Turns.setup, Turns.instructions, Turns.observe_text
    top = 100

    def act_all(self, actions):
        self.turn += 1
        said = {agent: f"{agent}: {self.observe_text(agent)}, {self.turn - 1}" for agent in actions}
        return fa.Outcome(rewards={a: float(actions[a] == said[a]) for a in actions}, done=self.turn == 2)


class Knows:
    """Answers with its agent, the observation and the number of earlier calls."""

    made: list = []

    def __init__(self, agent, settings, rng):
        self.agent, self.asked = agent, 0
        Knows.made.append((agent, dict(settings), rng.random()))

    def __call__(self, seen):
        self.asked += 1
        return f"{self.agent}: {seen}, {self.asked - 1}"


@pytest.fixture(autouse=True)
def _registered(own_registry, monkeypatch):
    monkeypatch.setattr(Knows, "made", [])
    fa.register("t/Turns-v0", entry_point=Turns, levels=[{"top": 5}, {"top": 50}], oracle=Knows, sharp=True)
    fa.register("t/AtOnce-v0", entry_point=AtOnce, oracle=Knows)
    fa.register("t/Alone-v0", entry_point=Turns)


@pytest.mark.parametrize(
    ("env_id", "arguments"),
    [
        ("t/Turns-v0", {}), ("t/Turns-v0@2", {}), ("t/AtOnce-v0", {}), ("t/AtOnce-v0", {"role_shuffle": True}),
        ("t/Turns-v0", {"role_shuffle": True, "invalid_action": "ask", "observation_window": 40, "max_turns": 9}),
    ],
)  # fmt: skip
def test_each_agent_and_episode_has_its_own_player(env_id, arguments):
    for seed in range(3):
        episode = fa.play(env_id, fa.Oracle(), seed=seed, env_args=arguments)
        assert episode.rewards == dict.fromkeys(AGENTS, 2.0), episode
        assert {trajectory.policy for trajectory in episode.trajectories.values()} == {"oracle"}
    assert [agent for agent, *_ in Knows.made].count("ben") == 3


def test_oracle_gets_constructor_arguments_with_defaults():
    for id_ in ("t/Turns-v0", "t/Turns-v0@1"):
        fa.play(id_, fa.Oracle(), env_args={"reward_scale": 0.5})
    told = [settings for _, settings, _ in Knows.made]
    assert told == [{"top": 100, "sharp": True}] * 3 + [{"top": 5, "sharp": True}] * 3


def test_oracle_rng_depends_on_seed_agent_and_group_index():
    def drawn(sibling_count=1, **given):
        Knows.made.clear()
        rollout = Rollout(make_env=lambda: fa.make("t/Turns-v0"), env_id="t/Turns-v0", policies=fa.Oracle(**given))
        asyncio.run(rollout.group(3, sibling_count))
        return sorted(number for *_, number in Knows.made)

    assert drawn() == drawn() and len(set(drawn())) == 3
    assert len(set(drawn(2))) == 6 and set(drawn()) < set(drawn(2))
    assert len(set(drawn(2, shared=True))) == 3 and not set(drawn(seed=1)) & set(drawn())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tmp: fa.play("t/Alone-v0", fa.Oracle()),
        lambda tmp: fa.play(Turns, {"ann": fa.Oracle(), "ben": fa.Random(), "cat": fa.Random()}),
        lambda tmp: fa.benchmark({"best": "oracle"}, ["t/Turns-v0", "t/Alone-v0"], episodes=1, out_dir=tmp),
        lambda tmp: fa.demonstrations("t/Alone-v0", 2),
    ],
)  # fmt: skip
def test_environment_without_oracle_is_refused_before_playing(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(Turns, "setup", lambda self, rng: pytest.fail("it was played"))
    raises(ValueError, r"(t/Alone-v0|Turns) has no oracle.*t/AtOnce-v0, t/Turns-v0.*oracle=\.\.\.\)", wrong, tmp_path)
    assert not any(tmp_path.iterdir())


def test_oracle_is_imported_at_first_play_and_errors_are_explained():
    fa.register("t/Late-v0", entry_point=Turns, oracle="no_such_module:Oracle")
    fa.register("t/Wrong-v0", entry_point=Turns, oracle="forge_envs.oracles.library:Orakle")
    assert fa.make("t/Late-v0").spec.oracle == "no_such_module:Oracle"
    with pytest.raises(ForgeError, match="the oracle 'no_such_module:Oracle' of t/Late-v0 cannot be imported"):
        fa.play("t/Late-v0", fa.Oracle())
    raises(ForgeError, "oracle .*Orakle.*Did you mean 'Oracle'", fa.play, "t/Wrong-v0", fa.Oracle())
    with pytest.raises(ValueError, match="oracle of t/Odd-v0 is 'somewhere'. Write"):
        fa.register("t/Odd-v0", entry_point=Turns, oracle="somewhere")
    raises(TypeError, "oracle of t/Odd-v0 is int", fa.register, "t/Odd-v0", entry_point=Turns, oracle=3)


def test_failing_oracle_fails_only_its_episode():
    fa.register("t/Mute-v0", entry_point=Turns, oracle=lambda agent, settings, rng: lambda seen: None)
    fa.register("t/Broken-v0", entry_point=Turns, oracle=lambda agent: "too few arguments")
    for id_, said in (("t/Mute-v0", "returned NoneType for 'ann'"), ("t/Broken-v0", "takes 1 positional argument")):
        with pytest.warns(RuntimeWarning, match="failed in policy"):
            assert said in fa.play(id_, fa.Oracle()).error.message


def test_keyword_oracle_selects_it_and_its_code_is_fingerprinted(tmp_path):
    assert read_player("oracle") == fa.Oracle()
    report = fa.benchmark({"best": "oracle", "random": "random"}, "t/Turns-v0", episodes=2, samples=2, out_dir=tmp_path)
    alone = [record for record in report.records if set(record.lineup.values()) == {"best"}]
    assert len(alone) == 4 and all({agent.reward for agent in record.seats.values()} == {2.0} for record in alone)
    assert len({number for *_, number in Knows.made}) == 2 * 2 * len(AGENTS), "samples draw anew, line-ups do not"
    spec = fa.spec("t/Turns-v0")
    other = replace(spec, oracle=random.Random)
    prints = [
        player_facts(fa.Oracle(seed=seed), specs=[one])["fingerprint"]
        for seed, one in ((0, spec), (0, replace(spec)), (1, spec), (0, other))
    ]
    assert report.players["best"]["fingerprint"] == prints[0] == prints[1] and len(set(prints)) == 3


def test_every_registered_oracle_can_be_imported():
    ids = [id_ for id_ in registry.ids_with_oracles() if id_.startswith("forge/")]
    assert len(ids) >= 15 and all(oracle_of(fa.spec(id_), id_) for id_ in ids)
