import math
import time

import pytest
from adapter_play import plausible, play, survives
from hostile_strings import HOSTILE_STRINGS

import forge_agents as fa
from forge_envs.adapters.excluded import REASONING_GYM_EXCLUDED
from forge_envs.adapters.harmless import PYTHON_SCORERS, SYMPY_SCORERS, refusal

pytest.importorskip("reasoning_gym")

from forge_agents.types import Trajectory, Turn
from forge_envs.adapters.reasoning_gym import ReasoningGymScore, levels


def answered(env, seed, text):
    env.reset(seed=seed)
    env.step(text)
    return env.rewards["solver"], env.infos["solver"]


def test_the_gold_answer_scores_one_and_another_less():
    env = fa.make("reasoning-gym/leg_counting-v0")
    env.reset(seed=7)
    assert "legs" in env.observe("solver") and "<answer>" in env.instructions("solver")
    gold = answered(env, 7, "-1")[1]["answer"]
    assert answered(env, 7, f"I count. <answer> {gold} </answer> done")[0] == 1.0
    assert answered(env, 7, gold)[1]["outcome"] == "solved"
    reward, info = answered(env, 7, "-1")
    assert reward < 1 and info["outcome"] != "solved" and info["reasoning_gym"]["generator"] == "leg_counting"


def test_settings_and_levels_make_questions_harder():
    few = fa.make("reasoning-gym/chain_sum-v0", min_terms=2, max_terms=2)
    many = fa.make("reasoning-gym/chain_sum-v0", min_terms=9, max_terms=9)
    lengths = []
    for env in (few, many):
        env.reset(seed=1)
        lengths.append(env.observe("solver").count(" + ") + env.observe("solver").count(" - "))
    assert lengths == [1, 8]
    assert levels("chain_sum") >= 3
    sizes = []
    for level in (0, 3):
        env = fa.make("reasoning-gym/chain_sum-v0", level=level)
        total = 0
        for seed in range(10):
            env.reset(seed=seed)
            total += len(env.observe("solver"))
        sizes.append(total)
    assert sizes[1] > 1.1 * sizes[0]


@pytest.mark.parametrize("wrong", [{"no_such_field": 1}, {"level": -1}, {"min_terms": 9, "max_terms": 2}])
def test_wrong_settings_are_told_at_once(wrong):
    with pytest.raises(ValueError, match="chain_sum"):
        fa.make("reasoning-gym/chain_sum-v0", **wrong)


def test_the_verifier_makes_the_question_again_and_scores_like_the_reward():
    env, scored = fa.make("reasoning-gym/countdown-v0"), []
    env.reset(seed=3)
    for text in ("<answer>1</answer>", f"<answer>{env._entry['answer']}</answer>"):
        reward, info = answered(env, 3, text)
        turn = Turn(agent="solver", index=0, observation="", action=text, reward=reward)
        scored.append((Trajectory(agent="solver", policy="p", turns=(turn,), info=info), reward))
    verifier = ReasoningGymScore()
    assert verifier.score([t for t, _ in scored]).tolist() == pytest.approx([r for _, r in scored])
    assert scored[1][1] == 1.0 > scored[0][1]
    assert math.isnan(verifier([Trajectory(agent="a", policy="p", turns=())])[0])


@pytest.mark.parametrize("generator", sorted(PYTHON_SCORERS | SYMPY_SCORERS))
def test_scorers_that_evaluate_see_no_code(generator, tmp_path):
    mark = tmp_path / "mark"
    for text in (f"open({str(mark)!r}, 'w')", f"__import__('os').system('touch {mark}')", "9**9**9**9", "2**99999999"):
        started = time.monotonic()
        reward, info = answered(fa.make(f"reasoning-gym/{generator}-v0"), 0, f"<answer>{text}</answer>")
        assert info.get("refused") and reward == 0.0, text
        assert time.monotonic() - started < 5
    assert not mark.exists()
    env = fa.make(f"reasoning-gym/{generator}-v0")
    for seed in range(3):
        env.reset(seed=seed)
        assert answered(env, seed, f"<answer>{env._entry['answer']}</answer>")[0] == 1.0


MORE = ("a.b", "x._y", "foo(1)", "9**9**9", "1e99999", "gamma(9)", "2**(10**9)", "(x+1)**99", "tan(tan(tan(x)))")


@pytest.mark.parametrize("text", [*MORE, "x" * 3000])
def test_formulas_that_are_more_than_formulas_are_refused(text):
    assert refusal(text, "simple_integration")


def test_sums_of_numbers_hold_no_functions_or_powers():
    assert refusal("(3 + 4.5) * 2 / (1 - 7)", "countdown") == ""
    assert refusal("exp(exp(99))", "countdown") and refusal("2**3", "countdown") and refusal("2* *3", "puzzle24")
    assert refusal("x**3/3 + sin(2*x)/2 + C", "simple_integration") == ""


def test_random_episodes_of_many_generators():
    for env_id in fa.list_envs("reasoning-gym")[::6]:
        infos = play(fa.make(env_id), 0, plausible)[-1]
        assert 0.0 <= infos["solver"]["score"] <= 1.0


@pytest.mark.parametrize("generator", ["spiral_matrix", "coin_flip", "knights_knaves", "puzzle24"])
def test_hostile_texts_are_answers_like_others(generator):
    survives(f"reasoning-gym/{generator}-v0", HOSTILE_STRINGS)


def test_a_hundred_generators_are_listed():
    listed = fa.list_envs("reasoning-gym")
    assert len(listed) >= 100 and not {f"reasoning-gym/{name}-v0" for name in REASONING_GYM_EXCLUDED} & set(listed)
