import asyncio
import math

import numpy as np
import pytest

import forge_agents as fa
from forge_agents import Ensemble, EnvReward, Rule, check_verifier
from forge_agents.errors import ArgumentError
from forge_agents.types import Episode, EpisodeGroup, Trajectory, Turn
from forge_trainers.rl.rewards import assess, check_env_rewards
from forge_trainers.rl.scoring import score
from forge_verifiers import Assessment, Composable, ForAgent, Gate, PerTurn, ScoreError
from forge_verifiers.core.verifier import Sum, checked_scores
from forge_verifiers.distillation import distill


def told(value, agent="a", seed=0):
    turn = Turn(agent=agent, index=0, observation="", action=str(value), reward=0.0)
    return Trajectory(agent=agent, policy="p", turns=(turn,), env_id="t", seed=seed)


def reads(name="reads", **kwargs):
    return Rule(lambda t: float(t.turns[0].action), name=name, **kwargs)


def always(value, name="always"):
    return Rule(lambda t: value, name=name)


ROWS = [told(0.0), told(0.5), told(1.0)]


def test_sums_and_weights():
    assert (0.5 * reads() + 0.5 * always(1.0))(ROWS).tolist() == [0.5, 0.75, 1.0]
    assert (0.5 * reads()).score(ROWS).tolist() == [0, 0.25, 0.5]
    assert (reads() + always(1.0)).score(ROWS).tolist() == [1.0, 1.5, 2.0]
    three = 0.5 * (reads() + always(0.0)) + always(1.0) * 0.25
    assert [w for w, _ in three.terms] == [0.5, 0.5, 0.25]
    assert three.name == "0.5*reads + 0.5*always + 0.25*always"
    assert sum([reads(), always(1.0)]).score(ROWS).tolist() == [1.0, 1.5, 2.0]


def paid(reward, action="1.0"):
    turn = Turn(agent="a", index=0, observation="", action=action, reward=reward)
    return Trajectory(agent="a", policy="p", turns=(turn,), env_id="t")


@pytest.mark.parametrize("nest", [lambda s: s, lambda s: ForAgent("a", s), lambda s: Gate(always(1.0, "check"), s)])
def test_env_reward_plus_a_weighted_verifier_is_their_weighted_sum(nest):
    reward = nest(EnvReward() + 0.2 * reads())
    assert reward.score([paid(0.3), paid(1.0), paid(1.0, "0.0")]).tolist() == pytest.approx([0.5, 1.2, 1.0])
    assert reward.score_range == pytest.approx((0.0, 1.2))
    assert PerTurn(reward).assess([paid(0.3)]).turns[0].tolist() == pytest.approx([0.5])
    assert asyncio.run(score([group_of(paid(0.3))], reward))[0].rewards["a"].tolist() == pytest.approx([0.5])


def group_of(*trajectories):
    episodes = tuple(Episode(env_id="t", seed=0, trajectories={t.agent: t}) for t in trajectories)
    return EpisodeGroup(env_id="t", seed=0, episodes=episodes)


def test_a_term_that_abstains_adds_nothing():
    assert (0.25 * always(None) + 0.75 * reads()).score(ROWS).tolist() == [0, 0.375, 0.75]
    assert np.isnan((always(None) + always(None)).score(ROWS)).all()
    by_agent = ForAgent("a", reads()) + ForAgent("b", always(1.0))
    assert by_agent.score([told(0.5), told(0.5, "b"), told(0.5, "c")]).tolist() == pytest.approx(
        [0.5, 1.0, math.nan], nan_ok=True
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda wide: Ensemble([wide, always(1.0)]),
        lambda wide: Ensemble([ForAgent("a", wide)]),
        lambda wide: Ensemble([Gate(always(1.0), wide)]),
        lambda wide: Ensemble([PerTurn(wide)]),
        lambda wide: Gate(wide, always(1.0)),
        lambda wide: distill(wide, ROWS),
    ],
)
def test_a_sum_beyond_one_is_refused_where_scores_must_lie_in_the_unit_range(use):
    with pytest.raises(ArgumentError, match=r"from 0 to 1\.25 .* Multiply it by 0\.8"):
        use(reads() + 0.25 * always(1.0, "other"))


def test_a_scaled_sum_is_taken_by_ensembles_and_gates():
    mean = 0.8 * (reads() + 0.25 * always(1.0, "other"))
    assert Gate(mean, Ensemble([mean, always(1.0)])).score_range == (0.0, 1.0)


def test_check_verifier_takes_a_sum_in_its_own_range():
    assert check_verifier(reads() + always(1.0), gold=told(1.0), wrong=told(0.0)).ok


@pytest.mark.parametrize("rewards", [(-1.0, 0.5), (0.5, 3.0)])
@pytest.mark.parametrize(
    "reward",
    [
        EnvReward(),
        Ensemble([EnvReward(), reads()]),
        EnvReward() + reads(),
        Ensemble([ForAgent("a", EnvReward())]),
    ],
)
def test_env_rewards_outside_the_range_stop_the_scoring_and_say_the_scale(reward, rewards):
    scale = rf"at least EnvReward\(low={min(rewards[0], 0):g}, high={max(rewards[1], 1):g}\)"
    with pytest.raises(ScoreError, match=scale):
        reward.score([paid(value) for value in rewards])


def test_a_small_range_of_env_rewards_is_as_strict():
    reward = EnvReward(high=1e-10)
    assert reward.score([paid(0.5e-10), paid(1e-10)]).tolist() == [0.5, 1.0]
    with pytest.raises(ScoreError, match=r"at least EnvReward\(low=0, high=3e-10\)"):
        reward.score([paid(3e-10)])
    with pytest.raises(ArgumentError, match=r"my/Big-v0: .* pays 3e-10"):
        check_env_rewards(reward, {"my/Big-v0": 3e-10})


@pytest.mark.parametrize("unbounded", [lambda trajectory: 3.0, lambda trajectories: [-1.0] * len(trajectories)])
def test_an_unbounded_function_in_an_ensemble_stops_the_scoring(unbounded):
    with pytest.raises(ScoreError, match=r"Scale scores to \[0, 1\]"):
        Ensemble([unbounded, reads()]).score(ROWS)


def test_a_run_is_refused_before_it_starts_where_the_environment_pays_more():
    reward = Ensemble([EnvReward(), reads()])
    check_env_rewards(reward, {"my/Small-v0": 1.0, "my/Silent-v0": None})
    with pytest.raises(ArgumentError, match=r"my/Big-v0: .* pays 3\. .* EnvReward\(low=0, high=3\)"):
        check_env_rewards(fa.MultiReward({"quality": reward}), {"my/Big-v0": 3.0})
    check_env_rewards(EnvReward(high=3) + reads(), {"my/Big-v0": 3.0})


@pytest.mark.parametrize("weight", [0, -1, math.inf, math.nan])
def test_a_sum_needs_terms_with_positive_weights(weight):
    with pytest.raises(ValueError, match="reads"):
        weight * reads()
    with pytest.raises(ValueError, match="no terms"):
        Sum([])


def test_gate_scores_zero_and_skips_the_second_verifier():
    requests = []
    judge = Rule(lambda t: requests.append(t) or 0.7, name="judge", cost="expensive")
    gate = Gate(reads("check"), judge)
    assert gate.score(ROWS).tolist() == pytest.approx([0, 0.7, 0.7])
    assert requests == ROWS[1:] and gate.cost == "expensive"
    assert np.isnan(Gate(always(None), judge).score(ROWS)).all()


def number_of(t):
    return float(t.turns[-1].action) / 100


def texts(*actions):
    return [told(action, seed=seed) for seed, action in enumerate(actions)]


def test_a_verifier_that_fails_on_the_few_answers_it_got_loses_only_these():
    gate = Gate(lambda t: t.turns[-1].action.startswith("1"), number_of)
    result = gate.assess(texts("20", "1x", "30"))
    assert result.scores.tolist() == pytest.approx([0.0, math.nan, 0.0], nan_ok=True)
    assert result.failed[1].startswith("ValueError: could not convert") and len(result.failed) == 1
    with pytest.raises(ValueError, match="could not convert"):  # on all of them: the mistake may be the verifier's
        gate.assess(texts("1x", "1y"))
    ensemble = Ensemble(
        [gate, Rule(lambda t: 0.5, name="half"), Rule(lambda t: len(t.turns[-1].action) == 2, name="two")]
    )
    assert ensemble.scores(texts("20", "1x", "15"))[:, 0].tolist() == pytest.approx([0.0, math.nan, 0.15], nan_ok=True)


def test_for_agent_scores_only_its_agent():
    both = [told(0.25, "asker"), told(0.5, "answerer")]
    seat = ForAgent("answerer", reads())
    assert seat.name == "answerer:reads"
    assert seat.score(both).tolist() == pytest.approx([math.nan, 0.5], nan_ok=True)
    assert (seat + ForAgent("asker", always(1.0))).score(both).tolist() == [1.0, 0.5]


class Odd(Composable):
    name, family, cost = "odd", None, "cheap"

    def __init__(self, returns):
        self.returns = returns

    def score(self, trajectories):
        return self.returns


@pytest.mark.parametrize("returns", [[0.1], [0, 1, 2], [0, 0, -0.5], [0, 0, math.inf], "abc", [[0], [0], [0]], None])
def test_scores_against_the_contract_name_the_verifier(returns):
    for verifier in (Odd(returns), 0.5 * Odd(returns), Gate(always(True), Odd(returns)), Ensemble([Odd(returns)])):
        with pytest.raises(ScoreError, match="'odd'"):
            checked_scores(verifier, ROWS)


def test_masked_scores_are_abstentions():
    def masked(trajectories):
        return np.ma.array([0.1, 0.9, 0.3], mask=[False, True, False])

    expected = pytest.approx([0.1, math.nan, 0.3], nan_ok=True)
    assert checked_scores(Rule(masked), ROWS).tolist() == expected
    assert assess(masked, ROWS, "masked").scores.tolist() == expected


@pytest.mark.parametrize("names", [("style", "style/short"), ("style/short", "style")])
def test_a_reward_whose_name_begins_like_another_is_resumed(names):
    def build():
        return fa.MultiReward({name: Ensemble([reads(), always(0.5)]) for name in names})

    one, other = build(), build()
    one(ROWS)
    other.load_state_dict(one.state_dict())
    assert [part.version for part in other.parts().values()] == [1, 1]


def test_state_is_nested():
    def build():
        return Gate(always(True), 0.5 * Ensemble([reads(), always(0.5)]) + 0.5 * ForAgent("a", Ensemble([reads()])))

    one, other = build(), build()
    one.score(ROWS)
    other.load_state_dict(one.state_dict())
    assert "then/0/version" in one.state_dict() and "then/1/verifier/version" in one.state_dict()
    assert one.score(ROWS).tobytes() == other.score(ROWS).tobytes()
    with pytest.raises(ValueError, match="no part"):
        other.load_state_dict({"elsewhere/x": np.array(1)})


def test_failed_term_counts_as_its_mean_in_scores_of_turns_too():
    def fails_once(trajectory):
        if trajectory.turns[-1].action == "c":
            raise OSError("no answer")
        return {"a": 1.0, "b": 0.5}[trajectory.turns[-1].action]

    total = PerTurn(Rule(lambda trajectory: 0.5, name="half")) + Rule(fails_once)
    result = total.assess([paid(0.0, "a"), paid(0.0, "b"), paid(0.0, "c")])
    assert result.scores.tolist() == [1.5, 1.0, 1.25]
    assert [turns.tolist() for turns in result.turns] == [[1.5], [1.0], [1.25]]


def test_noise_of_a_sum_is_that_of_its_weighted_terms():
    class Noisy(Composable):
        family, cost = None, "cheap"

        def __init__(self, name, noise):
            self.name, self.noise = name, noise

        def score(self, trajectories):
            return np.full(len(trajectories), 0.5, np.float32)

        def assess(self, trajectories):
            return Assessment(scores=self.score(trajectories), noise=np.full(len(trajectories), self.noise, np.float32))

    noise = (2 * Noisy("a", 0.2) + Noisy("b", 0.3) + reads()).assess(ROWS).noise
    assert noise.tolist() == pytest.approx([0.5] * 3)
    assert (reads() + always(1.0)).assess(ROWS).noise is None


def test_for_agent_refuses_a_list_of_agents():
    with pytest.raises(TypeError, match=r"^agent=\['a', 'b'\] of ForAgent must be the name of one agent"):
        ForAgent(["a", "b"], always(1.0))
