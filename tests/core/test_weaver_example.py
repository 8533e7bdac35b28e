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


def test_every_weak_verifier_is_fooled_by_some_wrong_answer_or_rejects_the_right_one(weaver):
    right, fooling = answered("15"), {"parity": "13", "threes": "12", "size": "14", "rough": "14"}
    for verifier in weaver.weak_verifiers():
        if verifier.name in fooling:
            wrong = answered(fooling[verifier.name])
            assert verifier.score([wrong])[0] > 0.5, verifier.name
        elif verifier.name != "self_consistency":
            assert verifier.score([right])[0] == 0, verifier.name
    assert len({v.family for v in weaver.weak_verifiers() if v.family}) == 2


def test_arms_differ_in_the_reward_and_auroc_counts_ties_half(weaver):
    batch = [answered("15"), answered("14"), answered("none")]
    assert weaver.reward_of("single", "parity").score(batch)[:2].tolist() == [1, 0]
    assert weaver.reward_of("ours", "parity").name == "ensemble"
    assert weaver.auroc(np.array([0.9, 0.5, np.nan, 0.5]), np.array([1, 1, 0, 0])) == pytest.approx(0.875)
