import argparse

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.types import Trajectory, Turn


@pytest.fixture
def weaver(load_example):
    return load_example("weaver_vs_gold")


def sums_trajectory(text, a=7, b=8, seed=0):
    turn = Turn(agent="solver", index=0, observation="", action=text, reward=0.0)
    info = {"a": a, "b": b}
    return Trajectory(agent="solver", policy="p", turns=(turn,), env_id="sums", seed=seed, info=info)


def test_environment_passes_its_checks(weaver):
    assert fa.check_env(weaver.Sums).ok


def test_verifiers_that_accept_the_right_sum_also_accept_wrong_ones(weaver):
    rules = [v for v in weaver.weak_verifiers("m") if v.cost == "cheap" and not v.sees_groups]
    for a in range(1, 21):
        for b in range(1, 21):
            rows = [sums_trajectory(str(n), a, b) for n in range(70)]
            scores = np.prod([v.score(rows) for v in rules], axis=0)
            best = np.flatnonzero(scores == scores.max())
            assert len(best) >= 5 or a + b not in best


def test_noisy_test_is_often_wrong(weaver):
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    right = np.mean([weaver.noisy_test(sums_trajectory(f"It is {a + b}.", a, b)) for a, b in pairs])
    near = np.mean([weaver.noisy_test(sums_trajectory(str(a + b + 1), a, b)) for a, b in pairs])
    assert 0.6 < right < 0.8 and 0.6 < near < 0.8
    assert not weaver.noisy_test(sums_trajectory("no number"))


def test_judges_share_one_engine(weaver):
    verifiers = weaver.weak_verifiers("m")
    judges = [v for v in verifiers if v.name.startswith("judge")]
    assert len(verifiers) == 8 and len(judges) == 3
    assert len({id(judge._conversation) for judge in judges}) == 1
    assert weaver.weak_verifiers("m") is verifiers  # so that runs of one study share the engine


def test_arms_differ_in_the_reward_and_auroc_counts_ties_half(weaver):
    batch = [sums_trajectory("15"), sums_trajectory("14"), sums_trajectory("none")]
    assert weaver.reward_of("single", "one number", weaver.weak_verifiers("m")).score(batch).tolist() == [1, 1, 0]
    assert weaver.reward_of("ours", "brief", weaver.weak_verifiers("m")).name == "ensemble"
    assert weaver.reward_of("gold", None, []).name == "env_reward"
    assert weaver.auroc(np.array([0.9, 0.5, np.nan, 0.5]), np.array([1, 1, 0, 0])) == pytest.approx(0.875)
    assert np.isnan(weaver.auroc(np.array([0.9, 0.5]), np.array([1, 1])))


def test_no_verifier_is_chosen_if_all_answers_are_right(weaver, tmp_path, monkeypatch):
    result = {"survey_before": {"brief": {"auroc": float("nan"), "accuracy": 1.0}}}
    monkeypatch.setattr(weaver, "run", lambda *_: result)
    args = argparse.Namespace(seeds=[0], arms=["ours"], out=tmp_path, episodes=2)
    with pytest.raises(SystemExit, match="2 held-out seeds before training are all right or all wrong"):
        weaver.study(args)


PAGE = "[4] Ulmford lies on the river Neva. Its mayor is Jonas Berg.\n[9] Berg & Ulmford makes bells."
QUESTION = "On which river does Ulmford lie?"


def library_trajectory(given, cited, read=PAGE, question=QUESTION):
    turns = (
        Turn(agent="searcher", index=0, observation=question, action="CALL", reward=0.0),
        Turn(agent="searcher", index=1, observation=read, action=f"{given} {cited}", reward=0.0),
    )
    info = {"given": given, "cited": cited, "question": question, "tool_calls": 1, "tool_errors": 0}
    return Trajectory(agent="searcher", policy="p", turns=turns, env_id="library", seed=0, info=info)


def test_library_rules_accept_answers_that_were_read(weaver):
    cases = {
        "was read": ([("neva", [4]), ("bells", [])], [("which", [4]), ("thames", [4]), ("", [4])]),
        "cites what was read": ([("neva", [4]), ("thames", [9, 4])], [("neva", []), ("neva", [5])]),
        "on a cited page": ([("neva", [4]), ("bells", [4, 9])], [("neva", [9]), ("nev", [4]), ("neva", [])]),
        "fits the question": ([("neva", []), ("jonas berg", [])], [("1911", []), ("neva river lies", []), ("", [])]),
    }
    by_name = {verifier.name: verifier for verifier in weaver.library_verifiers("m")}
    assert len(by_name) == 10
    for name, (good, bad) in cases.items():
        scores = by_name[name].score([library_trajectory(*each) for each in (*good, *bad)]).tolist()
        assert scores == [1] * len(good) + [0] * len(bad), name
    year = "In which year was Jonas Berg born?"
    assert by_name["fits the question"].score([library_trajectory("1911", [], question=year)]).tolist() == [1]
    assert by_name["cites what was read"].score([library_trajectory("neva", [4, 5])]).tolist() == [0.5]


def test_library_rules_do_not_know_the_answer_and_accept_episodes_without_one(weaver):
    rules = [v for v in weaver.library_verifiers("m") if v.cost == "cheap" and not v.sees_groups]
    right, mayor = library_trajectory("neva", [4]), library_trajectory("jonas berg", [4])
    turn = Turn(agent="searcher", index=0, observation=QUESTION, action="CALL", reward=0.0)
    cut = Trajectory(agent="searcher", policy="p", turns=(turn,), env_id="library", seed=0, info={})
    for verifier in rules:
        scores = verifier.score([right, mayor, cut])
        assert scores[0] == scores[1], verifier.name
        assert not scores[2] > 0 or verifier.name == "brief", verifier.name
