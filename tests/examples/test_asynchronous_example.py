import json
import sys

import pytest


@pytest.fixture
def example(load_example):
    return load_example("asynchronous")


def test_the_time_to_a_reward_lies_on_the_line_between_two_points(example):
    curve = [[0.0, 0.1], [30.0, 0.5], [60.0, 0.4], [90.0, 0.9]]
    assert example.seconds_to(curve, 0.3) == pytest.approx(15)
    assert example.seconds_to(curve, 0.5) == pytest.approx(30)
    assert example.seconds_to(curve, 0.65) == pytest.approx(75)
    assert example.seconds_to(curve, 0.1) == pytest.approx(0)
    assert example.seconds_to(curve, 0.95) is None


def test_runs_that_are_there_become_the_table_and_the_picture(example, tmp_path, monkeypatch, capsys):
    for staleness in (0, 1):
        folder = tmp_path / f"relay-staleness-{staleness}-3"
        folder.mkdir()
        result = {
            "staleness": staleness, "seed": 3, "lr": 2e-5, "curve": [[0, 0.1], [40 + 20 * staleness, 0.9]],
            "before": [0.1, 0.05], "after": [0.9, 0.04], "time/step_s": 8.25, "idle/engines": 0.125,
            "idle/learner": 0.5, "staleness_max": staleness,
        }  # fmt: skip
        (folder / "result.json").write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["asynchronous", "--staleness", "0", "1", "--seeds", "3", "--out", str(tmp_path)])
    monkeypatch.setenv("COLUMNS", "200")
    example.main()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["0", "3", "0.100 ± 0.050", "0.900 ± 0.040", "30", "8.2", "12%", "50%", "0"] in rows
    assert ["1", "3", "0.100 ± 0.050", "0.900 ± 0.040", "45", "8.2", "12%", "50%", "1"] in rows
    example.main(["--staleness", "0", "--seeds", "3", "--out", str(tmp_path), "--reward", "0.95"])
    assert "never" in capsys.readouterr().out
    assert (tmp_path / "asynchronous.png").stat().st_size > 10_000
