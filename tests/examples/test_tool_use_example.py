import json
import types

import pytest

import forge_agents as fa
from forge_agents.policy import Scripted
from forge_agents.rollout.rollout import Rollout


@pytest.fixture
def example(load_example):
    return load_example("tool_use")


def trainer(asker):
    """Plays held-out seeds with a scripted asker and an answerer that repeats what it reads."""
    import asyncio

    def evaluate(env_id, episodes):
        echo = Scripted(lambda text: text, name="echo")
        rollout = Rollout(
            make_env=lambda: fa.make(env_id), env_id=env_id, policies={"asker": Scripted(asker), "answerer": echo}
        )
        return [asyncio.run(rollout.group(seed, 1)).episodes[0] for seed in range(episodes)]

    return types.SimpleNamespace(evaluate=lambda *a, **k: types.SimpleNamespace(episodes=evaluate(*a, **k)))


def question(observation):
    return observation.splitlines()[-2].removeprefix("Question: ")


@pytest.mark.parametrize(
    ("asker", "shares"),
    [
        (lambda text: f"CALL calculator({question(text)})" if "Answer:" in text else text, [1, 1, 1]),
        (lambda text: "CALL calculator(2 + 3)" if "Answer:" in text else text, [1, 0, 0]),
        (lambda text: "CALL calculator(two)" if "Answer:" in text else "5", [0, 0, 0]),
        (lambda text: str(sum(map(int, question(text).split(" + ")))), [0, 0, 1]),
    ],
)
def test_the_measures_tell_calls_from_right_calls_from_right_answers(example, asker, shares):
    measured = example.measure(trainer(asker), 6)
    assert [share for share, _, _ in measured] == shares
    assert all(0 <= low <= share <= high <= 1 for share, low, high in measured)


def test_the_interval_is_wilsons(example):
    share, low, high = example.interval([1.0] * 8 + [0.0] * 32)
    assert (share, round(low, 3), round(high, 3)) == (0.2, 0.105, 0.348)


def test_the_table_shows_both_runs(example, tmp_path, monkeypatch, capsys):
    seen = []

    def run(folder, args, *, steps, lr):
        seen.append((folder.name, steps, lr))
        folder.mkdir()
        return [example.interval([0.0, 1.0])] * 3, [example.interval([1.0, 1.0])] * 3

    monkeypatch.setattr(example, "run", run)
    monkeypatch.setattr("sys.argv", ["tool_use.py", "--steps", "3", "--out", str(tmp_path)])
    example.main()
    assert seen == [("trained", 3, 2e-5), ("control", 10, 0.0)]
    assert "control, lr 0" in capsys.readouterr().out
    result = json.loads((tmp_path / "control" / "result.json").read_text())
    assert (result["arm"], result["seed"], result["before"][0], result["after"][0]) == ("control", 0, 0.5, 1.0)
