"""Episodes of a run as a table."""

import dataclasses
import gc
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from refusals import raises

import forge_agents as fa
from forge_agents.errors import RunFolderError
from forge_trainers.records.run_folder import RunFolder

KUHN = "forge/KuhnPoker-v0"
HERO = fa.Scripted(lambda seen: "bet", name="hero")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six steps of two games, of which one failed in step 3."""
    folder = tmp_path_factory.mktemp("runs") / "duel"
    remaining = RunFolder(folder, {})
    for step in range(6):
        rival = fa.Random(name="late" if step > 3 else "rival")
        episode = fa.play(KUHN, {"player_0": HERO, "player_1": rival}, seed=step)
        other = fa.play("forge/Relay-v0", fa.Scripted(lambda seen, said=1 if step == 3 else "7": said), seed=step)
        learned = {"player_0": [0.5] * len(episode.trajectories["player_0"].turns)}
        rewards = [{"player_0": 2.0, "player_1": math.nan}, {}]
        remaining.keep_episodes(step, [episode, other], rewards, [learned, {}], trained=["hero"])
    remaining.close()
    return folder


def test_records_summarize_episodes(run):
    table = fa.load_episodes(run)
    first = fa.play(KUHN, {"player_0": HERO, "player_1": fa.Random(name="rival")}, seed=0)
    assert len(table) == 12 and [row["episode"] for row in table] == list(range(12))
    row = table[0]
    assert (row["step"], row["env_id"], row["seed"], row["error"]) == (0, KUHN, 0, "")
    assert (row["agents"], row["policies"]) == (["player_0", "player_1"], ["hero", "rival"])
    assert row["rewards"] == [*first.rewards.values()] and row["reward"] == first.rewards["player_0"]
    assert row["trained_rewards"][0] == 2.0 and math.isnan(row["trained_rewards"][1])
    assert table[1]["trained_rewards"] == [None, None]
    assert (row["trained_reward"], row["turns"], row["end_reason"]) == (2.0, len(first.turns), "terminated")
    assert table[-1]["step"] == 5 and [r["episode"] for r in table[2:4]] == [2, 3] and len({*map(tuple, table)}) == 1
    assert [turn.action for turn in table.episode(0).turns] == [turn.action for turn in first.turns]
    assert [episode.seed for episode in table.episodes()] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    with pytest.raises(IndexError):
        table[12]


def test_records_of_turns_have_texts_and_advantages(run):
    turns = list(fa.load_episodes(run, env=KUHN, step=2).turns())
    episode = fa.load_episodes(run, env=KUHN, step=2).episode(0)
    assert [(row["agent"], row["action"], row["turn"]) for row in turns] == [
        (turn.agent, turn.action, turn.index) for turn in episode.turns
    ]
    assert {(row["episode"], row["step"], row["seed"]) for row in turns} == {(4, 2, 2)}
    assert {row["agent"]: row["advantage"] for row in turns} == {"player_0": 0.5, "player_1": None}


def test_records_of_turns_have_branches(tmp_path):
    first, *_ = fa.play(KUHN, fa.Random(), seed=0).trajectories["player_0"].turns
    turns = tuple(
        dataclasses.replace(first, index=n, branch=n, session=n, forked_from=0 if n else None) for n in range(2)
    )
    of = fa.Trajectory(agent="player_0", policy="hero", turns=turns)
    episode = fa.Episode(env_id=KUHN, seed=0, trajectories={"player_0": of})
    RunFolder(tmp_path / "run", {}).keep_episodes(0, [episode], [{}], [{}], trained=["hero"])
    table = fa.load_episodes(tmp_path / "run")
    assert [(row["branch"], row["session"], row["forked_from"]) for row in table.turns()] == [(0, 0, None), (1, 1, 0)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"env": KUHN}, [0, 2, 4, 6, 8, 10]),
        ({"step": 1}, [2, 3]),
        ({"step": range(1, 3), "env": KUHN}, [2, 4]),
        ({"policy": "late"}, [8, 10]),
        ({"failed": True}, [7]),
        ({"failed": False, "step": 3}, [6]),
        ({"where": lambda row: row["seed"] > 4}, [10, 11]),
        ({"step": 99}, []),
    ],
)
def test_filters(run, options, expected):
    assert [row["episode"] for row in fa.load_episodes(run, **options)] == expected


def test_environment_is_found_without_its_module(run, tmp_path):
    line = json.loads((run / "episodes.jsonl").read_text().splitlines()[0])
    (tmp_path / "episodes.jsonl").write_text(json.dumps({**line, "env_id": f"my_env:{KUHN}"}) + "\n")
    assert len(fa.load_episodes(tmp_path, env=KUHN)) == len(fa.load_episodes(tmp_path, env=f"my_env:{KUHN}")) == 1
    raises(ValueError, f"has episodes of my_env:{KUHN}", fa.load_episodes, tmp_path, env=f"other:{KUHN}")


def test_filter_without_possible_match_is_refused(run):
    with pytest.raises(ValueError, match=r"env='forge/KuhnPokr-v0'.*forge/Relay-v0. Did you mean 'forge/KuhnPoker-v0'"):
        len(fa.load_episodes(run, env="forge/KuhnPokr-v0"))
    raises(ValueError, "policy='heroo'.*Did you mean 'hero'", fa.load_episodes, run, policy="heroo")
    raises(ValueError, "Steps count from 1", fa.load_episodes, run, step=-1)


def test_pandas_and_datasets_accept_a_table(run):
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    table = fa.load_episodes(run)
    frame = pandas.DataFrame(table)
    assert len(frame) == 12 and frame.groupby("env_id").turns.sum()[KUHN] >= 12
    assert frame.error[7] == "policy: TypeError"
    long = frame.explode(["agents", "policies", "rewards"])
    assert (long.policies == "hero").sum() == 6
    assert set(pandas.DataFrame(table.turns()).agent) == {"player_0", "player_1", "asker", "answerer"}
    data = datasets.Dataset.from_list(table)
    assert data.num_rows == 12 and data[0]["policies"] == ["hero", "rival"] and data[1] == table[1]
    assert datasets.Dataset.from_list(list(table.turns())).num_rows == sum(row["turns"] for row in table)


def test_table_of_a_growing_or_replaced_file_is_consistent(run, tmp_path):
    file = tmp_path / "episodes.jsonl"
    lines = (run / "episodes.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][:50])
    table = fa.load_episodes(file)
    assert len(table) == 2, "a half-written last line is not there yet"
    draft = tmp_path / "draft"
    draft.write_text(lines[4])
    draft.replace(file)
    assert table.episode(1).env_id == "forge/Relay-v0", "what was loaded stays what it was"
    assert [row["seed"] for row in fa.load_episodes(tmp_path)] == [2]


def test_file_is_closed_with_its_table_and_after_an_error(run):
    def open_files():
        return [path for fd in Path("/proc/self/fd").iterdir() if (path := os.path.realpath(fd)).startswith(str(run))]

    gc.collect()
    table = fa.load_episodes(run)
    assert len(open_files()) == 1
    file = table._file
    del table
    with pytest.raises(ValueError, match="has episodes of") as error:  # its traceback holds the local variables
        fa.load_episodes(run, env="forge/Other-v0")
    assert file.closed and error.tb and open_files() == []


def test_threads_and_forked_processes_share_a_table(run, tmp_path):
    row = json.loads((run / "episodes.jsonl").read_text().splitlines()[0])
    with (tmp_path / "episodes.jsonl").open("w") as file:
        file.writelines(json.dumps({**row, "seed": seed}) + "\n" for seed in range(300))
    table = fa.load_episodes(tmp_path)

    def right(start):
        return all(table.episode(at).seed == table[at]["seed"] == at for at in range(start, 300, 4))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(right, range(16)))
    children = []
    for start in range(4):
        if not (child := os.fork()):
            good = False
            try:
                good = all(right(start) for _ in range(5))
            finally:
                os._exit(int(not good))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4


def test_damaged_foreign_and_missing_files_are_named(run, tmp_path):
    line = (run / "episodes.jsonl").read_text().splitlines()[0]
    file = tmp_path / "episodes.jsonl"
    for text, message in (("{bad", "it is not JSON"), ('{"step": 1}', "neither an episode"), ("[]", "damaged|neither")):
        file.write_text(f"{line}\n\n{text}\n{line}\n")
        raises(RunFolderError, f"line 3 of .*{message}", fa.load_episodes, tmp_path)
    raises(KeyError, "nothing", fa.load_episodes, run, where=lambda row: row["nothing"])
    file.write_text(json.dumps({**json.loads(line), "trajectories": {}, "env_id": "a\x1b[2J"}) + "\n")
    assert len(fa.load_episodes(tmp_path, where=lambda row: row["reward"] > 0.5)) == 0, "an episode without agents"
    raises(ValueError, r"has episodes of a\\x1b\[2J", fa.load_episodes, tmp_path, env="a")
    record = {"lineup": {"a": "p"}, "seats": {"a": {}}, "env": "e", "seed": 1, "rewards": [1]}
    file.write_text(json.dumps(record) + "\n")
    assert fa.load_episodes(tmp_path)[0]["trained_rewards"] == [None]
    file.write_text(line.replace('"agent": "player_0"', '"agent": "player_7"') + "\n")
    assert {row["agent"] for row in fa.load_episodes(tmp_path).turns()} == {"player_7", "player_1"}
    file.write_text(json.dumps({**json.loads(line), "format": 9}) + "\n")
    raises(RunFolderError, "format 9, but this version", fa.load_episodes(tmp_path).episode, 0)
    with pytest.raises(RunFolderError, match=r"duell holds no episodes.jsonl. Give the out_dir.*Did you mean 'duel'"):
        fa.load_episodes(run.parent / "duell")
    raises(
        RunFolderError,
        "other.jsonl is a file. Give the folder of a run",
        fa.load_episodes,
        file.rename(tmp_path / "other.jsonl"),
    )
    file.symlink_to(run / "episodes.jsonl")
    raises(RunFolderError, "is a link", fa.load_episodes, tmp_path)


def test_benchmark_records_have_no_turns(tmp_path):
    fa.benchmark({"a": fa.Random(), "b": fa.Random(seed=1)}, KUHN, episodes=2, out_dir=tmp_path, progress=False)
    table = fa.load_episodes(tmp_path, policy="b")
    assert len(table) == 6 and {row["step"] for row in table} == {None} and table[0]["turns"] >= 2
    raises(RunFolderError, "written by a benchmark, which stores .* not their turns", table.episode, 0)
