import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from refusals import raises
from viewer_runs import episode, record, write_lines

from forge_agents.errors import RunFolderError
from forge_agents.viewer.index import SORTS, EpisodeIndex, Query


def numbers(index, **asked):
    return [row["n"] for row in index.find(Query(sort="oldest", **asked))["rows"]]


@pytest.fixture
def index(run_folder):
    index = EpisodeIndex(run_folder / "episodes.jsonl")
    assert index.update() == 6
    return index


def test_rows_summarize_episodes(index):
    row = index.find(Query(sort="oldest"))["rows"][0]
    assert (row["env"], row["seed"], row["step"]) == ("my/Game-v0", 10, 0)
    assert (row["reward"], row["trained"], row["turns"], row["tokens"]) == (-1.0, 0.25, 4, 8)
    assert row["agents"] == [["a", "hero", -1.0], ["b", "hero", -1.0]]
    assert row["error"] == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"env": "my/Other-v0"}, [4]),
        ({"error": "none"}, [1, 2, 3, 4, 6]),
        ({"error": "any error"}, [5]),
        ({"error": "step: ValueError"}, [5]),
        ({"error": "reset: ValueError"}, []),
        ({"reward_from": 0, "reward_to": 0.5}, [2]),
        ({"step_from": 1, "step_to": 1}, [2]),
        ({"step_from": 2, "env": "my/Game-v0", "error": "none"}, [3, 6]),
        ({"text": "zebra"}, [6]),
        ({"text": "zeb"}, [6]),
        ({"text": "crossing zebra"}, [6]),
        ({"text": '"crossing zebra"'}, []),
        ({"text": '"zebra crossing"'}, [6]),
        ({"text": "no such square"}, [5]),
        ({"text": "what reads OR turn"}, []),
        ({"text": "Other"}, [4]),
        ({"text": '!"'}, [1, 2, 3, 4, 5, 6]),
        ({"text": 'a" OR text:* NEAR( -'}, []),
    ],
)
def test_filters_select_episodes(index, options, expected):
    assert numbers(index, **options) == expected


def test_pages_are_parts_of_one_order(index):
    for sort in SORTS:
        whole = [row["n"] for row in index.find(Query(sort=sort))["rows"]]
        parts = [index.find(Query(sort=sort, offset=at, limit=4)) for at in (0, 4)]
        assert [row["n"] for part in parts for row in part["rows"]] == whole
        assert sorted(whole) == [1, 2, 3, 4, 5, 6]
        assert [part["total"] for part in parts] == [6, 6]
    best = index.find(Query(sort="highest reward"))["rows"]
    assert [row["reward"] for row in best] == [1, 1, 1, 1, 0, -1]


def test_facets_count_environments_and_errors(index):
    assert index.facets() == {
        "envs": [("my/Game-v0", 5), ("my/Other-v0", 1)],
        "errors": [("step: ValueError", 1)],
    }


def test_only_new_lines_are_read(index, run_folder):
    assert index.update() == 0
    write_lines(run_folder / "episodes.jsonl", [episode(seed=99, words="newcomer")])
    assert index.update() == 1
    assert numbers(index, text="newcomer") == [7]


def test_rewritten_file_is_indexed_again(index, run_folder):
    log = run_folder / "episodes.jsonl"
    remaining = log.read_text().splitlines(keepends=True)[:2]
    log.write_text("".join(remaining) + json.dumps(episode(seed=5, words="replayed " * 500)) + "\n")
    raises(RunFolderError, "was rewritten", index.row, 3)
    assert index.update() == 3
    assert numbers(index) == [1, 2, 3]
    assert numbers(index, text="zebra") == []
    assert index.row(3)["seed"] == 5


def test_incomplete_last_line_is_read_later(tmp_path):
    log, line = tmp_path / "episodes.jsonl", json.dumps(episode())
    log.write_text(line + "\n" + line[:300])
    index = EpisodeIndex(log)
    assert index.update() == 1
    status = index.status()
    assert (status["episodes"], status["indexed"], status["problems"]) == (1, len(line) + 1, [])
    with log.open("a") as file:
        file.write(line[300:])  # whole, but for the end of the line
    assert index.update() == 1
    write_lines(log, [])
    with log.open("a") as file:
        file.write("\n" + line + "\nrubbish\n")
    assert index.update() == 1
    status = index.status()
    assert status["episodes"] == 3 and status["problems"][0].startswith("line 4 of")  # its end is no line of its own


def test_damaged_lines_are_reported_and_others_kept(tmp_path):
    log = write_lines(tmp_path / "episodes.jsonl", [episode(), {"format": 9}, episode(seed=8), [1], record()])
    with log.open("ab") as file:
        file.write(b'{"step": 3, "traj\n\xff\xfe\n')
    write_lines(log, [{"step": 1, "env_id": "e", "seed": "x", "trajectories": {}}, episode(seed=9)])
    index = EpisodeIndex(log)
    assert index.update() == 4
    problems = index.status()["problems"]
    assert [problem.split(" is left out: ")[0] for problem in problems] == [
        f"line {line} of episodes.jsonl" for line in (2, 4, 6, 7, 8)
    ]
    assert "neither an episode" in problems[0] and "is not JSON" in problems[2] and "damaged field" in problems[4]
    assert [row["seed"] for row in index.find(Query(sort="oldest"))["rows"]] == [7, 8, 7, 9]


def test_invalid_episode_does_not_hide_others(tmp_path):
    """Half an emoji, as endpoints cut answers off, and numbers that no database holds."""
    odd = [episode(words="a \ud83d"), episode(), episode(seed=2**64), episode(step=10**30)]
    odd[1]["trajectories"]["a"]["turns"][1]["reward"] = 10**400
    index = EpisodeIndex(write_lines(tmp_path / "episodes.jsonl", [episode(), *odd, episode(seed=8)]))
    assert index.update() == 4
    assert [problem.split(" is left out: ")[0] for problem in index.status()["problems"]] == [
        "line 4 of episodes.jsonl",
        "line 5 of episodes.jsonl",
    ]
    assert [row["seed"] for row in index.find(Query(sort="oldest"))["rows"]] == [7, 7, 7, 8]


def test_file_of_garbage_is_read_once(tmp_path):
    log = tmp_path / "episodes.jsonl"
    log.write_text("rubbish\n" * 7)
    index = EpisodeIndex(log)
    assert (index.update(), index.update()) == (0, 0)
    assert index.status()["problems"][-1] == "... and 2 more lines"


def test_records_of_benchmarks_are_found_by_player_and_error(tmp_path):
    log = write_lines(tmp_path / "episodes.jsonl", [record(), record(error="step: ValueError: boom")])
    index = EpisodeIndex(log)
    assert index.update() == 2
    assert numbers(index, text="random", error="step: ValueError") == [2]
    assert index.find(Query(sort="oldest"))["rows"][0]["turns"] == 3


def test_a_missing_file_is_an_empty_list(tmp_path):
    index = EpisodeIndex(tmp_path / "episodes.jsonl")
    assert index.update() == 0
    assert index.find(Query()) == {"total": 0, "rows": []}
    assert index.status() == {"episodes": 0, "bytes": 0, "indexed": 0, "problems": []}


def test_run_folders_are_unchanged(run_folder):
    other = sqlite3.connect(run_folder.parent / "other.db")
    with other:
        other.execute("CREATE TABLE precious (x)")
        other.execute("INSERT INTO precious VALUES (42)")
    (run_folder / ".episodes.index").symlink_to(run_folder.parent / "other.db")
    before = sorted(path.name for path in run_folder.iterdir())
    assert EpisodeIndex(run_folder / "episodes.jsonl").update() == 6
    assert sorted(path.name for path in run_folder.iterdir()) == before
    assert other.execute("SELECT x FROM precious").fetchall() == [(42,)]


def test_lists_are_served_from_other_threads_while_a_run_writes(index, run_folder):
    """Each list that a thread sees is of whole batches: numbers without gaps."""
    stop = threading.Event()

    def read() -> list[int]:
        lengths = []
        while not stop.is_set():
            found = numbers(index)
            assert found == list(range(1, len(found) + 1))
            lengths.append(len(found))
        return lengths

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        for seed in range(20):
            write_lines(run_folder / "episodes.jsonl", [episode(seed=seed)])
            assert index.update() == 1
        stop.set()
    assert all(reader.result() == sorted(reader.result()) for reader in readers)
    assert numbers(index) == list(range(1, 27))


@pytest.mark.parametrize("wrong", [{"sort": "n; DROP TABLE episodes"}, {"offset": -1}, {"limit": 501}, {"limit": -1}])
def test_queries_out_of_range_are_refused(wrong):
    raises(ValueError, next(iter(wrong)), Query, **wrong)
