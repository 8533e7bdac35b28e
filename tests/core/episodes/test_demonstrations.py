"""Games of an environment's oracle, on seeds that nothing else plays."""

import asyncio

from refusals import raises

import forge_agents as fa
from forge_agents.envs.seeds import BENCHMARKS_FROM, DEMONSTRATIONS_FROM, HELD_OUT_FROM, is_held_out

LEVEL = "forge/Codewords-v0@1"


def test_demonstrations_are_reproducible_and_extend():
    games = fa.demonstrations(LEVEL, 5, seed=2)
    assert [e.turns for e in games] == [e.turns for e in fa.demonstrations(LEVEL, 7, seed=2)[:5]]
    assert {tuple(e.rewards.values()) for e in games} == {(1.0, 1.0)} and {e.env_id for e in games} == {LEVEL}
    assert {t.policy for e in games for t in e.trajectories.values()} == {"oracle"}
    assert not {e.seed for e in games} & {e.seed for e in fa.demonstrations(LEVEL, 5)}


def test_seeds_of_demonstrations_are_reserved():
    seeds = [episode.seed for episode in fa.demonstrations("forge/KuhnPoker-v0", 40)]
    assert len(set(seeds)) == 40 and HELD_OUT_FROM + 2**28 < DEMONSTRATIONS_FROM
    assert DEMONSTRATIONS_FROM <= min(seeds) <= max(seeds) < BENCHMARKS_FROM
    assert not any(map(is_held_out, seeds)), "an imitated task counts as trained on"


def test_demonstrations_of_some_agents_with_arguments():
    (whole,), (part,) = (
        fa.demonstrations("forge/Codewords-v0", 1, env_args={"groups": 3}, agents=seats) for seats in ((), ["guesser"])
    )
    assert list(part.trajectories) == ["guesser"] and part.trajectories["guesser"] == whole.trajectories["guesser"]
    assert set(whole.trajectories) == {"master", "guesser"} and "Clue: " in part.turns[0].observation
    assert len(part.turns) >= 3, "a clue for each group"


def test_invalid_demonstrations_are_refused():
    raises(ValueError, "games=0", fa.demonstrations, LEVEL, 0)
    raises(ValueError, "no agent 'gueser'.*Did you mean 'guesser'", fa.demonstrations, LEVEL, 1, agents=["gueser"])
    raises(TypeError, "agents is the string 'guesser'", fa.demonstrations, LEVEL, 1, agents="guesser")
    raises(KeyError, "no forge/Codewords-v0@9", fa.demonstrations, "forge/Codewords-v0@9", 1)


def test_demonstrations_run_in_a_notebook():
    async def cell():
        return fa.demonstrations(LEVEL, 1)

    assert asyncio.run(cell())[0].error is None
