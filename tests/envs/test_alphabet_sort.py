import pytest
from hypothesis import given
from hypothesis import strategies as st
from team_play import begin

import forge_agents as fa
from forge_envs.games.alphabet_sort import NAMES, AlphabetSort, list_similarity, read_names


def names_of(observation):
    return observation.split(": ")[1].split(", ")


def test_sorting_everything_so_far_earns_one_per_turn():
    env = begin(fa.make("forge/AlphabetSort-v0", num_names=5, num_added=3, turns=3), 1)
    names, total = [], 0.0
    for size in (5, 8, 11):
        observation, reward, *_ = env.last()
        total += reward
        names += names_of(observation)
        assert len(names) == size
        env.step("\n".join(sorted(names)))
    assert env.last()[2] and total + env.last()[1] == 3.0
    assert env.infos["sorter"]["answer"] == "\n".join(sorted(names))


def test_forgetting_the_earlier_names_costs():
    env = begin(AlphabetSort(num_names=4, num_added=2, turns=2))
    env.step(", ".join(sorted(names_of(env.observe("sorter")))))
    assert env.rewards["sorter"] == 1.0
    env.step(", ".join(sorted(names_of(env.observe("sorter")))))
    assert env.rewards["sorter"] == pytest.approx(2 / 6)


@given(st.lists(st.integers(0, 6), max_size=9), st.permutations(range(6)))
def test_similarity_agrees_with_the_textbook_recursion(given_names, gold):
    def lcs(a, b):
        if not a or not b:
            return 0
        return 1 + lcs(a[1:], b[1:]) if a[0] == b[0] else max(lcs(a[1:], b), lcs(a, b[1:]))

    expected = lcs(tuple(given_names), tuple(gold)) / max(len(given_names), len(gold))
    assert list_similarity([str(n) for n in given_names], [str(n) for n in gold]) == pytest.approx(expected)


def test_answers_may_be_decorated():
    assert read_names('1. Anna\n- **Bob**\n\n * "Carl".\n4) dora; Emil, ') == ["anna", "bob", "carl", "dora", "emil"]
    assert read_names("Ada" + "." * 200_000 + "b") == ["ada" + "." * 200_000 + "b"], "read at once"
    assert read_names("`Ada`\n```\nBob") == ["ada", "bob"]
    assert read_names("**1. Ada**\n(2) Bob\n* Cy\n**Di**") == ["ada", "bob", "cy", "di"]


def test_sharpness_makes_half_right_worth_less():
    env = begin(AlphabetSort(num_names=4, turns=1, sharpness=3.0))
    env.step(min(names_of(env.observe("sorter"))))
    assert env.rewards["sorter"] == pytest.approx(0.25**3)


def test_the_first_list_is_never_sorted_already():
    env = AlphabetSort(num_names=2, turns=1)
    for seed in range(100):
        env.reset(seed=seed)
        shown = names_of(env.observe("sorter"))
        assert shown != sorted(shown)


def test_names_differ_and_are_plain():
    assert len(set(NAMES)) == len(NAMES) >= 100 and all(name.isalpha() and name.istitle() for name in NAMES)
