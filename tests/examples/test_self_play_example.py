import asyncio
import json
import types

import numpy as np
import pytest

from forge_agents.bench import exploitability


@pytest.fixture
def example(load_example):
    return load_example("self_play")


@pytest.fixture
def tables(load_example):
    return load_example("self_play_table")


def test_a_table_in_the_league_gets_hard_to_exploit(tables):
    curve, standings = asyncio.run(tables.train_table(0, 60))
    assert curve[0] == [0, pytest.approx(11 / 24)], "it starts with even play"
    assert np.mean([value for _, value in curve[-3:]]) < 0.2
    assert standings.latest.version == 60 and len(standings.opponents) == 8
    assert sum(one.games for one in standings.opponents) > 500 and standings.sigma < 3


def test_a_table_that_does_not_learn_stays_as_exploitable(tables):
    curve, _ = asyncio.run(tables.train_table(0, 10, lr=0.0))
    assert curve[-1][1] == pytest.approx(11 / 24)


def test_the_gradient_raises_what_paid(tables):
    table = tables.Tabular()
    strategy = table.chances
    assert exploitability(tables.GAME, strategy) == pytest.approx(11 / 24)
    seen = "Your card: King. Moves: none. Your move: check or bet?"
    turn = type("T", (), {"agent": "player_0", "observation": seen, "action": "bet"})
    table.learn([(turn, 1.0)], lr=1.0, entropy=0.0)
    assert strategy("player_0", seen, ("check", "bet"))["bet"] == pytest.approx(1 / (1 + np.exp(-1.0)))


def test_finished_runs_are_not_repeated(example, tmp_path):
    (tmp_path / "league-3").mkdir()
    (tmp_path / "league-3/result.json").write_text(json.dumps({"curve": [[10, 0.3, 0.1, 0.0]]}))
    assert example.train("some-model", 3, types.SimpleNamespace(out=tmp_path)) == [[10, 0.3, 0.1, 0.0]]
    (tmp_path / "export").mkdir()
    assert example.taught("some-model", tmp_path) == tmp_path / "export"


def test_every_legal_action_is_taught_once(example):
    rows = example.answers()
    assert len(rows) == 24 and {row["completion"] for row in rows} == {"check", "bet", "call", "fold"}
    longest = max(rows, key=lambda row: len(row["prompt"]))
    assert [message["role"] for message in longest["prompt"]] == ["system", "user", "assistant", "user"]
    assert longest["prompt"][2]["content"] == "check" and "opponent bet" in longest["prompt"][3]["content"]
