import argparse

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.types import Trajectory, Turn


@pytest.fixture
def weaver(load_example):
    return load_example("weaver_vs_gold")


def answered(text, a=7, b=8, seed=0):
    turn = Turn(agent="solver", index=0, observation="", action=text, reward=0.0)
    info = {"a": a, "b": b}
    return Trajectory(agent="solver", policy="p", turns=(turn,), env_id="sums", seed=seed, info=info)


def test_the_environment_of_the_experiment_keeps_the_contract(weaver):
    assert fa.check_env(weaver.Sums).ok


def test_no_verifier_knows_the_sum_and_all_that_read_the_answer_pass_wrong_ones(weaver):
    """Whatever passes the right answer passes wrong ones as well, alone and all together, in most questions."""
    own = [v for v in weaver.weak_verifiers("m") if v.cost == "cheap" and not v.sees_groups]
    for a in range(1, 21):
        for b in range(1, 21):
            rows = [answered(str(n), a, b) for n in range(70)]
            scores = np.prod([v.score(rows) for v in own], axis=0)
            best = np.flatnonzero(scores == scores.max())
            assert len(best) >= 5 or a + b not in best


def test_the_noisy_test_is_often_wrong(weaver):
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    right = np.mean([weaver.noisy_test(answered(f"It is {a + b}.", a, b)) for a, b in pairs])
    near = np.mean([weaver.noisy_test(answered(str(a + b + 1), a, b)) for a, b in pairs])
    assert 0.6 < right < 0.8 and 0.6 < near < 0.8
    assert not weaver.noisy_test(answered("no number"))


def test_there_are_eight_and_the_judges_share_one_model(weaver):
    verifiers = weaver.weak_verifiers("m")
    judges = [v for v in verifiers if v.name.startswith("judge")]
    assert len(verifiers) == 8 and len(judges) == 3
    assert len({id(judge._conversation) for judge in judges}) == 1
    assert weaver.weak_verifiers("m") is verifiers  # so that runs of one study share the engine


def test_arms_differ_in_the_reward_and_auroc_counts_ties_half(weaver):
    batch = [answered("15"), answered("14"), answered("none")]
    assert weaver.reward_of("single", "one number", weaver.weak_verifiers("m")).score(batch).tolist() == [1, 1, 0]
    assert weaver.reward_of("ours", "brief", weaver.weak_verifiers("m")).name == "ensemble"
    assert weaver.reward_of("gold", None, []).name == "env_reward"
    assert weaver.auroc(np.array([0.9, 0.5, np.nan, 0.5]), np.array([1, 1, 0, 0])) == pytest.approx(0.875)
    assert np.isnan(weaver.auroc(np.array([0.9, 0.5]), np.array([1, 1])))


def test_where_all_answers_are_right_no_verifier_is_called_the_best(weaver, tmp_path, monkeypatch):
    found = {"survey_before": {"brief": {"auroc": float("nan"), "accuracy": 1.0}}}
    monkeypatch.setattr(weaver, "run", lambda *_: found)
    asked = argparse.Namespace(seeds=[0], arms=["ours"], out=tmp_path, episodes=2)
    with pytest.raises(SystemExit, match="2 held-out seeds before training are all right or all wrong"):
        weaver.study(asked)


def test_a_run_that_was_not_finished_begins_again(weaver, tmp_path, monkeypatch):
    (tmp_path / "gold-0" / "checkpoints").mkdir(parents=True)
    seen = []

    class BegunError(Exception):
        pass

    def trainer(*_, out_dir, **__):
        seen.append(out_dir.exists())
        raise BegunError

    monkeypatch.setattr(weaver.fa, "GRPOTrainer", trainer, raising=False)
    asked = argparse.Namespace(task="sums", out=tmp_path, model="m", eval_every=1, episodes=1, steps=1)
    with pytest.raises(BegunError):
        weaver.run("gold", 0, tmp_path / "gold-0", None, asked)
    assert seen == [False]


PAGE = "[4] Ulmford lies on the river Neva. Its mayor is Jonas Berg.\n[9] Berg & Ulmford makes bells."
QUESTION = "On which river does Ulmford lie?"


def looked_up(given, cited, read=PAGE, question=QUESTION):
    turns = (
        Turn(agent="searcher", index=0, observation=question, action="CALL", reward=0.0),
        Turn(agent="searcher", index=1, observation=read, action=f"{given} {cited}", reward=0.0),
    )
    info = {"given": given, "cited": cited, "question": question, "tool_calls": 1, "tool_errors": 0}
    return Trajectory(agent="searcher", policy="p", turns=turns, env_id="library", seed=0, info=info)


def test_signs_of_the_library_tell_an_answer_that_was_read_from_one_that_was_not(weaver):
    cases = {
        "was read": ([("neva", [4]), ("bells", [])], [("which", [4]), ("thames", [4]), ("", [4])]),
        "cites what was read": ([("neva", [4]), ("thames", [9, 4])], [("neva", []), ("neva", [5])]),
        "on a cited page": ([("neva", [4]), ("bells", [4, 9])], [("neva", [9]), ("nev", [4]), ("neva", [])]),
        "fits the question": ([("neva", []), ("jonas berg", [])], [("1911", []), ("neva river lies", []), ("", [])]),
    }
    by_name = {verifier.name: verifier for verifier in weaver.library_verifiers("m")}
    assert len(by_name) == 10
    for name, (good, bad) in cases.items():
        scores = by_name[name].score([looked_up(*each) for each in (*good, *bad)]).tolist()
        assert scores == [1] * len(good) + [0] * len(bad), name
    year = "In which year was Jonas Berg born?"
    assert by_name["fits the question"].score([looked_up("1911", [], question=year)]).tolist() == [1]
    assert by_name["cites what was read"].score([looked_up("neva", [4, 5])]).tolist() == [0.5]


def test_no_judge_of_the_library_knows_the_answer_and_none_fails_where_there_is_none(weaver):
    """All signs together pass the mayor for the river, and an episode that was cut off is judged, too."""
    own = [v for v in weaver.library_verifiers("m") if v.cost == "cheap" and not v.sees_groups]
    right, mayor = looked_up("neva", [4]), looked_up("jonas berg", [4])
    turn = Turn(agent="searcher", index=0, observation=QUESTION, action="CALL", reward=0.0)
    cut = Trajectory(agent="searcher", policy="p", turns=(turn,), env_id="library", seed=0, info={})
    for verifier in own:
        scores = verifier.score([right, mayor, cut])
        assert scores[0] == scores[1], verifier.name
        assert not scores[2] > 0 or verifier.name == "brief", verifier.name
