"""`tests/perf/gpu_stages.py` on the CPU: its parts run, one that fails costs only itself, and goals are decided."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from local_processes import use_local_processes

PERF = Path(__file__).parents[1] / "perf"


@pytest.fixture(scope="module")
def stages() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PERF)
        yield importlib.import_module("gpu_stages")


def read(out: Path, stage: int) -> dict:
    return json.loads((out / f"stage-{stage}.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_parts_train_on_the_cpu_and_write_what_they_measure(stages, tmp_path, monkeypatch):
    """The learner's part runs in a process of its own, the parts of whole runs without processes."""
    words = ["--model", "tiny-random", "--quick", "--out", str(tmp_path)]
    assert stages.main(["--stage", "2", "--parts", "learner_1.7b", *words]) == 0
    learned = read(tmp_path, 2)["learner_1.7b"]
    assert learned["tokens"] > 0 and learned["tokens_per_s"] > 0
    assert json.loads((tmp_path / "learner_1.7b.json").read_text())["tokens"] == learned["tokens"]

    use_local_processes(monkeypatch)
    monkeypatch.setattr(stages.parts.Colocation, "_change", stages.parts.Colocation._change)  # a part replaces it
    monkeypatch.setattr(stages, "in_child", lambda function, options, *, timeout_s, env, **arguments:
                        function(options, **arguments))  # fmt: skip
    assert stages.main(["--stage", "3", "--parts", "turns_1.7b", "adapters", *words]) == 0
    results = read(tmp_path, 3)
    assert results["turns_1.7b"]["used_bytes"] == [None, None], "one value for each step, none without a GPU"
    assert results["turns_1.7b"]["learner/logprob_gap_mean"] < 0.05
    assert set(results["adapters"]["gaps"]) == {"alice", "bob", "carol"}
    assert all(0 < gap < 0.05 for gap in results["adapters"]["gaps"].values())
    assert json.loads((tmp_path / "adapters.json").read_text())["gaps"] == results["adapters"]["gaps"]


def test_a_part_that_fails_or_has_no_time_left_costs_only_itself(stages, tmp_path, monkeypatch, capsys):
    def fail(function, options, *, timeout_s, env, file):
        if function is stages.parts.machine:
            Path(file).write_text('{"python": "3.12"}')
            raise stages.ChildFailedError("parts:machine did not finish within 1 s")
        return {"equal": 1, "answers": 2}

    monkeypatch.setattr(stages, "in_child", fail)
    words = ["--stage", "1", "--out", str(tmp_path), "--model", "tiny-random"]
    assert stages.main([*words, "--parts", "machine", "greedy"]) == 1
    results = read(tmp_path, 1)
    assert results["machine"]["python"] == "3.12" and "did not finish" in results["machine"]["error"]
    assert results["goals"]["greedy answers equal to the CPU's"] == {"value": 0.5, "goal": ">= 1", "reached": False}
    assert "failed: machine. Goals missed: greedy answers" in capsys.readouterr().out
    assert stages.main([*words, "--parts", "learns", "--limit_s", "20"]) == 1
    assert read(tmp_path, 1)["learns"] == {"error": "left out: 20 s were left"}


def test_goals_follow_from_the_numbers(stages):
    row = {"layout": "shared", "learner GB expected": 10.0, "learner GB peak": 9.5, "GPU GB expected": 70.0,
           "GPU GB in use": 80.0, "weights back s": 0.3}  # fmt: skip
    goals = stages.checks({
        "learns": {"learner/logprob_gap_mean": 0.03, "curve": [[0, 0.2, 0.1], [10, 0.92, 0.05]]},
        "rollout": {"128": {"tokens_per_s": 90.0}}, "rollout_llm": {"128": {"tokens_per_s": 100.0}},
        "step": {"numbers": {"wall_s": 2.0}}, "step_trl": {"wall_s": 4.0},
        "layouts_0.6b": {"layouts": [row]},
        "turns_1.7b": {"switches": [["learner", 2.5], ["engines", 3.5]]},
        "growth": {"used_bytes": [50, 90, 100, 100, 100.5]},
    })  # fmt: skip
    assert {name: (each["value"], each["reached"]) for name, each in goals.items()} == {
        "gap between sampler and learner": (0.03, True),
        "held-out reward": (0.92, True),
        "rollout of 128 tokens over vLLM's LLM": (0.9, False),
        "seconds of a step over TRL's": (0.5, True),
        "layouts_0.6b, shared: learner, measured over expected": (0.95, True),
        "layouts_0.6b, shared: learner, at least": (0.95, True),
        "layouts_0.6b, shared: GPU, measured over expected": (1.1429, False),
        "layouts_0.6b, shared: GPU, at least": (1.1429, True),
        "seconds to return 0.6B": (0.3, False),
        "longest switch at 1.7B": (3.5, False),
        "memory after the last step over the third": (1.005, True),
    }


def test_unknown_part_is_refused(stages, tmp_path, capsys):
    with pytest.raises(SystemExit):
        stages.main(["--stage", "3", "--parts", "greedy", "--out", str(tmp_path)])
    assert "stage 3 has no part 'greedy'. It has layouts, turns_1.7b" in capsys.readouterr().err


def test_an_example_reports_the_results_of_all_its_arms(stages, tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_STAGES_WORK", str(tmp_path / "work"))
    example = tmp_path / "example.py"
    example.write_text(
        "import sys, pathlib\n"
        "assert sys.argv[1:4] == ['--groups', '2', '--model']\n"
        "for arm, reward in (('trained', 0.9), ('control', 0.1)):\n"
        "    folder = pathlib.Path(sys.argv[-1], arm); folder.mkdir(parents=True)\n"
        "    (folder / 'result.json').write_text(f'[{reward}]')\n"
        "sys.exit('the end')\n"
    )
    options = stages.Options(model="m")
    result = stages.parts.script(options, str(tmp_path / "part.json"), words=[str(example), "--groups", "2"])
    assert result == {"status": 1, "results": [[0.1], [0.9]], "output": "the end\n"}


@pytest.mark.parametrize(("tokens", "answer"), [([1, 2, 9], [1, 2]), ([1, 2], [1, 2]), ([9, 9], [9]), ([], [])])
def test_greedy_answers_are_compared_without_the_token_that_ended_them(stages, tokens, answer):
    assert stages.parts._without_end(tokens, {8, 9}) == answer
