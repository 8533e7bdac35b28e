import json
import math
import os
from pathlib import Path

import pytest
from refusals import raises
from viewer_runs import episode, metrics, record, write_lines

from forge_agents.episodes import stored
from forge_agents.errors import RunFolderError
from forge_agents.viewer import runs, save_page
from forge_agents.viewer.index import Query
from forge_agents.viewer.runs import MAX_POINTS, Run, find_runs


def only(folder):
    (run,) = find_runs([folder])
    run.update()
    return run


def test_status_lists_the_content_of_a_run(run_folder):
    status = only(run_folder).status()
    assert (status["name"], status["steps"], status["episodes"]["episodes"]) == ("first", 3, 6)
    assert status["has"] == {"metrics": True, "episodes": True, "verifiers": False, "tables": False, "settings": True}
    assert status["problems"] == []


def test_status_has_the_stop_reason(run_folder):
    run = only(run_folder)
    assert run.status()["ending"] is None
    file = run_folder / "ending.json"
    file.write_text(json.dumps({"step": 2, "ending": "solved", "reason": "solved: all of them"}))
    assert run.status()["ending"] == {"kind": "solved", "step": 2, "reason": "solved: all of them"}
    for damaged in ('{"step": 2, "end', "[]", '{"step": "x"}'):
        file.write_text(damaged)
        assert run.status()["ending"] is None
    file.unlink()  # a resumed run
    assert run.status()["ending"] is None


def test_the_stamp_changes_with_every_file(run_folder):
    run = only(run_folder)
    before = run.status()["stamp"]
    assert run.status()["stamp"] == before
    write_lines(run_folder / "metrics.jsonl", metrics(1, start=3))
    assert run.status()["stamp"] != before
    assert run.status()["steps"] == 4


def test_page_is_saved_with_an_episode_of_another_version(run_folder, tmp_path):
    strange = {"env_id": "e", "seed": 1, "trajectories": {"a": {"turns": [{"reward": 1.0}]}}}
    write_lines(run_folder / "episodes.jsonl", [strange])
    text = save_page([run_folder], tmp_path / "page.html").read_text()
    assert "episode 7 of first was written by another version (KeyError: 'index')" in text
    assert "zebra crossing a 0" in text


def test_page_replaces_only_a_page_of_this_command(run_folder, tmp_path):
    target = tmp_path / "important.txt"
    target.write_text("mine")
    with pytest.raises(RunFolderError, match=r"important\.txt is a file of another program, so it is not replaced"):
        save_page([run_folder], target)
    assert target.read_text() == "mine"
    save_page([run_folder], tmp_path / "page.html", episodes=0)
    assert "zebra crossing a 0" in save_page([run_folder], tmp_path / "page.html").read_text()


def test_metrics_are_columns_with_none_for_missing_values(run_folder):
    result = only(run_folder).metrics()
    assert result["step"] == [0, 1, 2] and result["every"] == 1
    assert result["series"]["reward/mean"] == [0.0, 0.1, 0.2]
    assert result["series"]["learner/loss"] == [-0.1, None, -0.1]


def test_long_runs_are_thinned_and_keep_their_ends(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", metrics(2 * MAX_POINTS + 5))
    result = only(tmp_path).metrics()
    assert result["every"] == 3 and len(result["step"]) <= MAX_POINTS + 1
    assert result["step"][:2] == [0, 3] and result["step"][-1] == 2 * MAX_POINTS + 4
    assert len(result["series"]["reward/mean"]) == len(result["step"])


def test_rows_of_a_long_run_are_kept_thinned_and_repeated_steps_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "MAX_POINTS", 10)
    monkeypatch.setattr(runs, "_MAX_ROWS", 40)
    file, run = tmp_path / "metrics.jsonl", None
    for first, last in [(0, 30), (30, 100), (100, 1000), (951, 990), (700, 731)]:
        write_lines(file, metrics(last - first, start=first))
        run = run or only(tmp_path)
        result, status = run.metrics(), run.status()
        assert status["steps"] == last
        assert result["step"] == [*range(0, last - 1, result["every"]), last - 1] and len(result["step"]) <= 11
        assert result["series"]["reward/mean"][-1] == metrics(1, start=last - 1)[0]["reward/mean"]
        assert len(run._metric_lines._rows) <= 41
    assert status["problems"] == ["339 rows of metrics.jsonl are left out: later rows repeat their steps"]


@pytest.mark.parametrize("every", [2, 3, 10, 16, 500])
def test_thinned_runs_keep_evaluations(tmp_path, monkeypatch, every):
    """Evaluations follow every tenth step, say, and of 1,500 steps the odd ones stay."""
    monkeypatch.setattr(runs, "MAX_POINTS", 10)
    monkeypatch.setattr(runs, "_MAX_ROWS", 40)
    run = None
    for last in (15, 40, 400, 2000):
        evaluated = {step: step / 7 for step in range(every, last + 1, every)}
        rows = [
            {"step": step, "reward/mean": 0.5, **({"eval/reward": evaluated[step]} if step in evaluated else {})}
            for step in range(1, last + 1)
        ]
        written = run.status()["steps"] if run else 0
        write_lines(tmp_path / "metrics.jsonl", rows[written:])
        run = run or only(tmp_path)
        result = run.metrics()
        curves = {
            name: {step: value for step, value in zip(result["step"], values, strict=True) if value is not None}
            for name, values in result["series"].items()
        }
        assert list(curves["reward/mean"]) == [*range(1, last, result["every"]), last]
        shown = curves.get("eval/reward", {})
        assert shown == {step: pytest.approx(evaluated[step], rel=1e-5) for step in shown}
        groups = {(step - 1) // result["every"] for step in evaluated}
        assert {(step - 1) // result["every"] for step in shown} == groups, "one in each stretch that has one"
        assert len(shown) <= len(groups) + 1 and len(run._metric_lines._rows) <= 90


def test_thinning_of_curves_with_few_values_takes_linear_time(tmp_path, monkeypatch):
    visited, thinned = [], runs._thinned
    monkeypatch.setattr(runs, "_MAX_ROWS", 40)
    monkeypatch.setattr(runs, "_thinned", lambda rows, *args: visited.append(len(rows)) or thinned(rows, *args))
    success = [{"step": step, f"curriculum/success/{step % 37}": 0.5} for step in range(5000)]
    write_lines(tmp_path / "metrics.jsonl", success)
    only(tmp_path).metrics()
    assert 0 < sum(visited) <= 4 * len(success)


def test_damaged_metrics_are_reported_and_others_shown(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('broken\n{"no": "step"}\n{"step": 9, "reward/mean": NaN}\n{"step": 10, "rew')
    run = only(run_folder)
    problem, stepless = run.status()["problems"]
    assert problem.startswith("line 4 of metrics.jsonl is left out: it is not JSON") and "damaged" in problem
    assert stepless == "line 5 of metrics.jsonl is left out: its step is not a whole number"
    assert run.metrics()["step"] == [0, 1, 2, 9]
    assert run.metrics()["series"]["reward/mean"][-1] is None
    (run_folder / "config.yaml").write_text("a: [1")
    assert "config.yaml holds no settings" in run.status()["problems"][-1]


def test_appended_and_replaced_metrics_are_read(run_folder):
    run, log = only(run_folder), run_folder / "metrics.jsonl"
    line = json.dumps({"step": 3, "reward/mean": 0.3})
    for text, steps in ((line[:9], 3), (line[9:], 4), ("\n" + line.replace("3,", "4,") + "\n", 5)):
        with log.open("a") as file:
            file.write(text)
        assert run.metrics()["step"] == [*range(steps)]
    assert run.status()["problems"] == []
    write_lines(run_folder / "draft", metrics(2, start=5)).replace(log)  # as a resumed run does
    assert run.metrics()["step"] == [5, 6]
    log.unlink()
    assert run.metrics()["step"] == []


def test_repeated_steps_replace_earlier_rows(tmp_path):
    """As after a run that was killed between its metrics and its checkpoint."""
    repeated = [{"step": 3, "reward/mean": 0.9}, {"step": 4, "reward/mean": 0.8}]
    write_lines(tmp_path / "metrics.jsonl", [*metrics(6), *repeated])
    run = only(tmp_path)
    assert run.metrics()["step"] == [0, 1, 2, 3, 4] and run.status()["steps"] == 5
    assert run.metrics()["series"]["reward/mean"][2:] == [0.2, 0.9, 0.8]
    assert run.status()["problems"] == ["3 rows of metrics.jsonl are left out: later rows repeat their steps"]


def test_new_run_is_shown_empty(tmp_path):
    (tmp_path / "config.yaml").write_text("env: [x]\n")
    run = only(tmp_path)
    status = run.status()
    assert (status["steps"], status["problems"], status["has"]["episodes"]) == (0, [], False)
    assert run.metrics() == {"step": [], "series": {}, "every": 1}
    assert run.verifiers() == {"latest": None, "step": [], "series": {}}
    assert run.tables() == [] and run.settings() == {"env": ["x"]}


def test_folders_of_runs_are_searched_and_named(tmp_path):
    for parent in ("x", "y"):
        for child in ("trained", "control"):
            write_lines(tmp_path / parent / child / "metrics.jsonl", metrics(1))
    assert [run.name for run in find_runs([tmp_path / "x"])] == ["control", "trained"]
    names = [run.name for run in find_runs([tmp_path / "x", tmp_path / "y"])]
    assert names == ["x/control", "x/trained", "y/control", "y/trained"]
    assert len(find_runs([tmp_path / "x" / "trained", tmp_path / "x" / "trained" / "metrics.jsonl"])) == 1
    (tmp_path / "x" / "compared.json").write_text('{\n "kind": "forge-agents benchmark"}')  # of --json
    assert [run.name for run in find_runs([tmp_path / "x"])] == ["x", "control", "trained"], "a report hides no run"


def test_a_folder_that_cannot_be_read_hides_no_run(tmp_path, monkeypatch, caplog):
    write_lines(tmp_path / "mine" / "metrics.jsonl", metrics(1))
    (tmp_path / "lost+found").mkdir()
    is_file = Path.is_file

    def refusing(path, **options):
        if path.parent.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return is_file(path, **options)

    monkeypatch.setattr(Path, "is_file", refusing)
    assert [run.name for run in find_runs([tmp_path])] == ["mine"]
    assert "lost+found is left out, because it cannot be read (Permission denied)" in caplog.text


def test_dates_in_the_settings_are_shown_as_text(run_folder, tmp_path):
    (run_folder / "config.yaml").write_text("from: 2026-01-02\nat: [2026-01-02 03:04:05]\n")
    (run,) = find_runs([run_folder])
    assert run.settings() == {"from": "2026-01-02", "at": ["2026-01-02 03:04:05"]}
    assert "2026-01-02 03:04:05" in save_page([run_folder], tmp_path / "page.html").read_text()


def test_paths_without_a_run_are_explained(tmp_path):
    (tmp_path / "empty").mkdir()
    raises(RunFolderError, r"empty holds no run: .*metrics\.jsonl.*Give the out_dir", find_runs, [tmp_path / "empty"])
    raises(RunFolderError, r"emtpy is not a folder.* Did you mean 'empty'", find_runs, [tmp_path / "emtpy"])


def test_a_league_is_a_table_by_rating(tmp_path):
    rival = {"name": "hero-000000", "kind": "start", "version": 0, "rating": 20.0, "rating_sigma": 3.0, "games": 8,
             "win_rate": 0.75, "chance": 1.0}  # fmt: skip
    league = {"policy": "hero", "rating": 27.123456, "rating_sigma": 2.0, "opponents": [rival]}
    (tmp_path / "league.json").write_text(json.dumps(league))
    (table,) = only(tmp_path).tables()
    assert table["heads"][:4] == ("name", "kind", "rating", "rating_sigma")
    assert [row[:3] for row in table["rows"]] == [("hero", "learns", "27.12"), ("hero-000000", "start", "20")]
    (tmp_path / "league.json").write_text('{"policy": ')
    assert "Another version" in only(tmp_path).tables()[0]["note"]


def test_benchmark_reports_are_shown_or_marked_as_damaged(tmp_path):
    write_lines(tmp_path / "episodes.jsonl", [record()])
    (tmp_path / "mine.json").write_text('{\n "kind": "forge-agents benchmark",\n "format": 99}')
    (tmp_path / "other.json").write_text("{}")
    (table,) = only(tmp_path).tables()
    assert table["title"] == "mine.json" and table["rows"] == () and "mine.json" in table["note"]


def test_verifiers_give_the_newest_report_and_curves(tmp_path):
    def row(step, weight):
        one = {"name": "rule", "weight": weight, "accuracy": None, "tpr": 0.9, "fpr": math.nan, "last_error": ""}
        return {"step": step, "name": "e", "effective_number": 1.5, "verifiers": [one]}

    write_lines(tmp_path / "verifiers.jsonl", [row(0, 0.5), {"odd": 1}, row(1, 0.25)])
    result = only(tmp_path).verifiers()
    assert result["latest"]["step"] == 1 and result["latest"]["verifiers"][0]["fpr"] is None
    assert result["step"] == [0, 1]
    assert result["series"]["weight/rule"] == [0.5, 0.25] and result["series"]["fpr/rule"] == [None, None]


def test_newest_warnings_are_problems_of_the_run(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", metrics(1))
    rows = [{"step": step, "warning": f"role {step}"} for step in range(1, 8)]
    write_lines(tmp_path / "warnings.jsonl", [*rows, {"warning": "no step"}])
    assert only(tmp_path).status()["problems"] == [f"step {step}: role {step}" for step in range(3, 8)]


def test_episode_of_another_version_is_reported(tmp_path):
    row = episode()
    del row["trajectories"]["a"]["turns"][0]["index"]
    write_lines(tmp_path / "episodes.jsonl", [row])
    raises(RunFolderError, r"episode 1 of .* was written by another version \(KeyError", only(tmp_path).episode, 1)
    raises(KeyError, "there is no episode 2", only(tmp_path).episode, 2)


HUGE = 10**400
DEEP = "[" * 500 + "]" * 500


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("metrics.jsonl", [f'{{"step": 7, "reward/mean": {HUGE}, "learner/loss": -{HUGE}, "x": {DEEP}}}']),
        ("metrics.jsonl", [f'{{"step": {HUGE}}}', '{"step": true}', f'{{"step": {"9" * 5000}}}']),
        ("verifiers.jsonl", [f'{{"step": 1, "effective_number": {HUGE}, "verifiers": [{{"tpr": -{HUGE}}}, 3, []]}}']),
        ("warnings.jsonl", [f'{{"step": {HUGE}, "warning": 1}}', f'{{"step": 1, "warning": {DEEP}}}']),
        ("verifiers.jsonl", ['{"step": 1, "verifiers": [{"name": "\\ud800", "weight": 1e999}]}']),
        ("league.json", [f'{{"rating": {HUGE}, "opponents": [{{"name": "\\ud800", "games": {"9" * 4000}}}]}}']),
        ("league.json", [f'{{"rating": 1, "opponents": [{{"name": {DEEP}}}]}}']),
        ("ending.json", [f'{{"step": {HUGE}, "reason": "r"}}']),
        ("ending.json", ['{"step": 3, "ending": "\\ud800"}']),
        ("episodes.jsonl", [f'{{"trajectories": {{}}, "env_id": "e", "seed": {seed}}}' for seed in ("1e999", HUGE)]),
        ("episodes.jsonl", [json.dumps({**episode(step=1, seed=1, words="w", reward=1.0), "step": math.inf})]),
        ("board.json", [f'{{"kind": "forge-agents benchmark", "format": 3, "players": {DEEP}}}']),
        ("board.json", [f'{{"kind": "forge-agents benchmark", "format": {"[" * 100_000}']),
        ("board.json", ['{"kind": "forge-agents benchmark", "format": 99, "provenance": []}']),
        ("config.yaml", [f"a: {HUGE}", f"0x{'f' * 900}: .inf", '"\\ud800": 1']),
    ],
)
def test_no_value_in_a_run_file_breaks_a_page(run_folder, serve, name, lines):
    with (run_folder / name).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    viewer = serve(run_folder)
    for what in ("", "/0/metrics", "/0/settings", "/0/verifiers", "/0/tables", "/0/facets", "/0/episodes"):
        status, _, body = viewer.get(f"api/runs{what}")
        assert status == 200, (what, body)
    steps = viewer.get("api/runs/0/metrics")[2]["step"]
    assert steps[:3] == [0, 1, 2] and all(abs(step) < 2**53 for step in steps)
    save_page([run_folder], run_folder.parent / "page.html")


def test_no_value_in_an_episode_breaks_its_page(run_folder, serve):
    odd = json.loads(json.dumps(episode(seed=99)))
    odd["error"] = {"where": math.nan, "message": "m"}
    odd["trajectories"]["a"]["turns"][0] |= {
        "response_ids": [math.nan],
        "versions": [{"version": math.inf, "start": 0, "end": 1}],
    }
    odd["trajectories"]["a"]["turns"][0]["reward"] = math.inf
    with (run_folder / "episodes.jsonl").open("a") as file:
        print(json.dumps(odd), file=file)
    viewer = serve(run_folder)
    (listed,) = (row for row in viewer.get("api/runs/0/episodes?limit=500")[2]["rows"] if row["seed"] == 99)
    status, _, shown = viewer.get(f"api/runs/0/episodes/{listed['n']}")
    assert status == 200 and shown["error"] == {"where": None, "message": "m"}
    first = next(turn for turn in shown["turns"] if turn["agent"] == "a")
    assert (first["ids"], first["versions"], first["reward"]) == ([None], [[None, 0, 1]], None)
    save_page([run_folder], run_folder.parent / "page.html")


def test_index_errors_are_problems_of_the_run(run_folder):
    run = Run(run_folder, name="r", number=0)
    run.index._database.close()
    run.update()
    (problem,) = run.status()["problems"]
    assert "episodes.jsonl failed (" in problem and run.status()["steps"] == 3


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "episodes.jsonl", "board.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "link to nowhere", "link to itself"])
def test_folder_with_links_or_pipes_is_refused(run_folder, tmp_path, name, kind):
    (tmp_path / "secret").write_text("token: s3cret\n")
    (run_folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run_folder / name)  # to open it would wait for ever
    else:
        target = {"link": tmp_path / "secret", "link to nowhere": tmp_path / "nothing", "link to itself": name}[kind]
        (run_folder / name).symlink_to(target)
    raises(RunFolderError, f"{name} is (a link|not a file)", find_runs, [run_folder])
    (run_folder / name).unlink()
    (run_folder / "notes.md").symlink_to(tmp_path / "secret")  # as people do, and nothing here opens it
    (tmp_path / "disk").mkdir()
    (run_folder / "checkpoints").symlink_to(tmp_path / "disk")  # as people do
    assert len(find_runs([run_folder])) == 1 or name != "board.json"


FILES = ("metrics.jsonl", "episodes.jsonl", "verifiers.jsonl", "warnings.jsonl", "config.yaml", "league.json")


@pytest.mark.parametrize("name", [*FILES, "ending.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_file_that_becomes_a_link_or_a_pipe_is_not_opened(run_folder, tmp_path, name, kind):
    """Another user may own the folder. Opening a pipe would wait without end."""
    run = only(run_folder)
    (tmp_path / "secret").write_text('{"step": 1, "warning": "s3cret", "ending": "s3cret", "policy": "s3cret"}\n')
    (run_folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run_folder / name)
        writer = os.open(run_folder / name, os.O_RDWR | os.O_NONBLOCK)  # without the check, reading fails or is empty
        os.write(writer, b'{"step": 1, "warning": "s3cret"}\n')
    else:
        (run_folder / name).symlink_to(tmp_path / "secret")
    run.update()
    pages = [run.status(), run.metrics(), run.settings(), run.verifiers(), run.tables()]
    assert "s3cret" not in repr(pages)
    if kind == "pipe":
        assert os.read(writer, 100) == b'{"step": 1, "warning": "s3cret"}\n'
        os.close(writer)


def test_a_pipe_in_a_folder_next_to_a_run_is_not_opened(run_folder):
    """Opening it would wait for ever."""
    (run_folder.parent / "evil").mkdir()
    os.mkfifo(run_folder.parent / "evil" / "x.json")
    assert [run.name for run in find_runs([run_folder.parent])] == ["first"]


@pytest.mark.parametrize("value", ["[{}]", "{{<<: [{}]}}"])
def test_nested_aliases_and_rows_are_problems_not_crashes(run_folder, value):
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {value.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, 12)]
    (run_folder / "config.yaml").write_text("\n".join(lines))
    deep = "[" * 200_000
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with (run_folder / name).open("a") as file:
            file.write(f'{{"step": {deep}\n')
    run = only(run_folder)
    run.update()
    assert run.settings() == {} and len(run.metrics()["step"]) == 3
    assert "config.yaml holds no settings" in " ".join(run.status()["problems"])
    assert run.index.find(Query())["total"] == 6


@pytest.mark.parametrize("name", ["config.yaml", "league.json", "wandb.id", "metrics.jsonl", "episodes.jsonl"])
def test_a_sparse_file_is_refused(run_folder, name):
    (run_folder / name).write_text("{")
    os.truncate(run_folder / name, 1 << 40)  # reading a log of this size would stall the page of all runs
    raises(RunFolderError, f"{name} has 1099511627776 bytes", find_runs, [run_folder])


def test_a_line_larger_than_any_episode_is_left_out(run_folder, monkeypatch):
    """A sparse file may have a line of terabytes."""
    monkeypatch.setattr(stored, "MAX_LINE_BYTES", 10_000)
    for name, line in (("metrics.jsonl", {"step": 5}), ("episodes.jsonl", episode(seed=8))):
        with (run_folder / name).open("a") as file:
            file.write("\0" * 25_000 + "\n" + json.dumps(line) + "\n")
    run = only(run_folder)
    assert "line 4 of metrics.jsonl is left out: it has more than 0 MiB" in run.status()["problems"]
    assert run.metrics()["step"] == [0, 1, 2, 5] and run.index.find(Query())["rows"][0]["seed"] == 8


@pytest.mark.parametrize(
    "name",
    ["x.json", "metrics.jsonl", "verifiers.jsonl", "episodes.jsonl", "config.yaml", "ending.json", "league.json"],
)
def test_a_folder_in_place_of_a_file_is_a_problem_of_its_run_only(run_folder, serve, name):
    """The page polls all runs at once."""
    other = run_folder.parent / "other"
    write_lines(other / "metrics.jsonl", metrics(3))
    write_lines(other / "episodes.jsonl", [])
    (other / name).unlink(missing_ok=True)
    (other / name).mkdir()
    viewer = serve(run_folder.parent)
    status, _, body = viewer.get("api/runs")
    assert status == 200 and [run["name"] for run in body["runs"]] == ["first", "other"]
    assert body["runs"][0]["steps"] == 3
    for what in ("metrics", "settings", "verifiers", "tables", "facets", "episodes"):
        assert viewer.get(f"api/runs/1/{what}")[0] in (200, 409)


def test_rows_keep_numbers_and_lines_of_many_values_are_left_out(run_folder):
    nested = [{"": 0}] * 1000
    write_lines(run_folder / "metrics.jsonl", [{"step": step, "x": nested, "y": step} for step in range(3, 9)])
    verifiers = [{"name": "a", "weight": 0.5, "more": nested}]
    write_lines(run_folder / "verifiers.jsonl", [{"step": step, "verifiers": verifiers} for step in range(9)])
    for name in ("metrics.jsonl", "verifiers.jsonl", "episodes.jsonl"):
        with (run_folder / name).open("a") as file:
            file.write('{"step": 99, "x": [' + "{}," * 500_000 + "0]}\n")
    run = only(run_folder)
    assert run.metrics()["step"] == [*range(9)] and run.metrics()["series"]["y"][3:] == [*range(3, 9)]
    assert run.metrics()["series"]["x"] == [None] * 9 and run.verifiers()["series"]["weight/a"] == [0.5] * 9
    rows = [*run._metric_lines._rows.values(), *run._verifier_lines._rows.values()]
    assert all(values.typecode == "d" and len(values) < 10 for _, values in rows)
    assert len(run.verifiers()["latest"]["verifiers"][0]["more"]) == 1000
    with (run_folder / "episodes.jsonl").open("a") as file:
        numbers = (number * (2**61 - 1) for number in range(2000))  # whose hashes are equal
        turns = [{"index": number, "action": "a"} for number in numbers]
        print(json.dumps({"env_id": "e", "seed": 1, "trajectories": {"a": {"turns": turns}}}), file=file)
    run.update()
    problems = run.status()["problems"]
    assert any("whole numbers of more than 20 digits with one hash, more than 300" in problem for problem in problems)
    assert sum("left out: it has 500002 brackets, more than 500000" in problem for problem in problems) == 3


def test_small_files_do_not_stand_for_gigabytes(run_folder):
    """Values by name and step, and cells by row and column, are the product of two small numbers of the file."""
    many = 20_000
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, **{f"m{n}": 1.0 for n in range(many)}}) + "\n" + "x\n" * many)
    write_lines(run_folder / "verifiers.jsonl", [{"step": 0, "verifiers": [{"name": str(n)} for n in range(many)]}])
    opponents = [{f"{row}-{column}": 1 for column in range(20)} for row in range(2000)]
    (run_folder / "league.json").write_text(json.dumps({"policy": "hero", "opponents": opponents}))
    (run_folder / "episodes.jsonl").write_text("x\n" * many)
    run = only(run_folder)
    assert len(run.metrics()["series"]) == len(run.verifiers()["series"]) == runs._MAX_SERIES
    (league,) = run.tables()
    assert (len(league["rows"]), len(league["heads"])) == (1000, 50) and "1001 more rows" in league["note"]
    problems = run.status()["problems"]
    assert len(problems) < 20 and "... and 19995 more lines of metrics.jsonl" in problems
    assert any("curves of metrics.jsonl are left out" in problem for problem in problems)
    assert problems[-1] == "... and at least 995 more lines"
    assert len(run.index._problems) == 1000


def test_curves_that_stand_for_far_more_than_the_file_holds_are_left_out(run_folder):
    """One row of 9,999 names and 1,000 rows without any took 500 MB, and 60 MB on the page."""
    rows = [{"step": 0, **{f"{n:x}": 1 for n in range(9999)}}, *({"step": n} for n in range(1, 1000))]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps({**row, "reward": 1.5}) + "\n" for row in rows))
    run = only(run_folder)
    series = run.metrics()["series"]
    assert series["reward"] == [1.5] * 1000 and 200 < len(series) < 250
    assert (
        f"{10_000 - len(series)} curves of metrics.jsonl are left out: they have too few values"
        in (run.status()["problems"])
    )


def test_a_curve_with_few_values_is_kept_in_a_run_of_usual_size(run_folder):
    usual = {f"m{n}": n for n in range(40)}
    rows = [{"step": n, **usual, **({f"eval/{k}": k for k in range(100)} if n % 100 == 0 else {})} for n in range(1000)]
    write_lines(run_folder / "metrics.jsonl", rows)
    assert len(only(run_folder).metrics()["series"]) == 140


def test_reports_are_computed_once_per_change(tmp_path, monkeypatch):
    """A report of 60 players takes 10 s at each click, and a stranger's folder may have any number of them."""
    computed = []

    def tables(file):
        computed.append(file.name)
        return [{"title": file.name}]

    monkeypatch.setattr("forge_agents.viewer.runs._board_tables", tables)
    boards = [tmp_path / f"{number}.json" for number in range(10)]
    boards[0].write_text('{"kind": "forge-agents benchmark"}')
    run = only(tmp_path)
    assert run.tables() == run.tables() == [{"title": "0.json"}] and computed == ["0.json"]
    boards[0].write_text('{"kind": "forge-agents benchmark" }')
    assert run.tables() == [{"title": "0.json"}] and computed == ["0.json"] * 2
    for board in boards:
        board.write_text('{"kind": "forge-agents benchmark"}')
    assert len(run.tables()) == 10 and len(run._computed) == 8
    pages = [run.computed(("verifiers", run.stamps()), lambda: len(computed)) for _ in range(2)]
    (tmp_path / "verifiers.jsonl").write_text("{}\n")
    assert pages == [len(computed)] * 2 and run.computed(("verifiers", run.stamps()), lambda: -1) == -1
