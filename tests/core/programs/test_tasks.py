"""Tasks of programs: where they come from, and which of them training and evaluations play."""

import csv
import json
import os
import runpy
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel
from refusals import raises

import forge_agents as fa
from forge_agents.bench.plan import seeds_of
from forge_agents.envs.seeds import DEMONSTRATIONS_FROM, HELD_OUT_FROM, index_of_seed, is_held_out
from forge_agents.errors import ForgeError
from forge_agents.programs import arrow_files
from forge_agents.programs.tasks import Tasks
from forge_trainers.rl.tasks import TaskSampler

ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(10) for b in range(20)]
SAMPLED = range(1000)
EVALUATED = range(HELD_OUT_FROM, HELD_OUT_FROM + 200)


def drawn(tasks, seeds):
    """Return the number of draws of each task, as JSON."""
    return Counter(json.dumps(tasks.of(seed, np.random.default_rng(seed), "my/Crew-v0"), default=str) for seed in seeds)


def test_training_and_evaluation_cover_disjoint_parts():
    tasks = Tasks(ROWS)
    training, evaluation = drawn(tasks, range(600)), drawn(tasks, range(HELD_OUT_FROM, HELD_OUT_FROM + 58))
    assert not training.keys() & evaluation.keys()
    assert (len(training), len(evaluation)) == (160, 40)
    assert max(evaluation.values()) - min(evaluation.values()) == 1, "no task comes again before all have come"
    benchmark = drawn(tasks, seeds_of(0, 400))
    assert benchmark.keys() == evaluation.keys()
    demonstrations = drawn(tasks, range(DEMONSTRATIONS_FROM, DEMONSTRATIONS_FROM + 50))
    assert demonstrations.keys() <= training.keys(), "a task that is imitated is trained on"


def test_trainers_and_benchmarks_play_different_parts():
    def program(task, client):
        requests = [{"role": "user", "content": task["question"]}]
        return client.chat.completions.create(model="agent", messages=requests).choices[0].message.content

    fa.register("my/Split-v0", entry_point=fa.Program, program=program, tasks=ROWS)
    sampler = TaskSampler("my/Split-v0")

    def questions(seeds):
        return {fa.play("my/Split-v0", fa.Scripted(lambda seen: "3"), seed=seed).turns[0].observation for seed in seeds}

    training = {question for step in range(4) for question in questions(t.seed for t in sampler.tasks(0, step, 8))}
    held_out = questions(task.seed for task in sampler.held_out(12))
    benchmark = set()

    def notes(seen):
        benchmark.add(seen)
        return "3"

    fa.benchmark({"me": fa.Scripted(notes)}, "my/Split-v0", episodes=12)
    everything = {row["question"] for row in ROWS}
    expected = {json.loads(row)["question"] for row in drawn(Tasks(ROWS), EVALUATED)}
    assert len(held_out) == 12 and held_out | benchmark <= expected and training <= everything - expected


def test_training_plays_all_tasks_before_repeating_any():
    fa.register("my/Epochs-v0", entry_point=fa.Program, program=lambda task, client: 0, tasks=ROWS)
    fa.register("my/Drawn-v0", entry_point=fa.Program, program=lambda task, client: 0, tasks=lambda rng: 0)
    sampler, tasks = TaskSampler("my/Epochs-v0"), Tasks(ROWS)
    assert fa.make("my/Epochs-v0").num_training_tasks == 160 and fa.make("my/Drawn-v0").num_training_tasks is None
    for seed in (0, 7):
        seeds = [task.seed for step in range(40) for task in sampler.tasks(seed, step, 8)]
        assert len(set(seeds)) == 320 and max(seeds) < HELD_OUT_FROM
        assert set(drawn(tasks, seeds[:160]).values()) == set(drawn(tasks, seeds[160:]).values()) == {1}
        resample = [task.seed for task in sampler.tasks(seed, 0, 8, resample=1)]
        assert not set(resample) & set(seeds) and max(resample) < HELD_OUT_FROM
    assert [t.seed for t in sampler.tasks(0, 3, 8)] == [t.seed for t in TaskSampler("my/Epochs-v0").tasks(0, 3, 8)]
    assert sampler.tasks(0, 0, 8) != sampler.tasks(7, 0, 8)
    plain = [task.seed for task in TaskSampler("my/Drawn-v0").tasks(0, 0, 8)]
    assert plain == [task.seed for task in TaskSampler("forge/KuhnPoker-v0").tasks(0, 0, 8)], "as in other environments"


def test_evaluations_of_several_lists_leave_out_no_task():
    for name in ("my/First-v0", "my/Second-v0"):
        fa.register(name, entry_point=fa.Program, program=lambda task, client: 0, tasks=ROWS)
    held_out = TaskSampler({"my/First-v0": 1.0, "my/Second-v0": 3.0}).held_out(80)
    for name in ("my/First-v0", "my/Second-v0"):
        seeds = [task.seed for task in held_out if task.env_id == name]
        assert set(drawn(Tasks(ROWS), seeds).values()) == {1} and len(seeds) == 40
    assert [task.number for task in held_out] == list(range(80))


def test_training_on_several_lists_plays_all_tasks_of_each_before_repeating_any():
    for name in ("my/Third-v0", "my/Fourth-v0"):
        fa.register(name, entry_point=fa.Program, program=lambda task, client: 0, tasks=ROWS)
    shares = {"my/Third-v0": 1.0, "forge/KuhnPoker-v0": 0.5, "my/Fourth-v0": 3.0}
    sampler, steps = TaskSampler(shares), [120, *range(119), *range(121, 240)]  # in any order
    steps.insert(120, 119)
    by_step = {step: sampler.tasks(0, step, 8) for step in steps}
    for name in ("my/Third-v0", "my/Fourth-v0"):
        seeds = [task.seed for step in sorted(by_step) for task in by_step[step] if task.env_id == name]
        count = Counter(drawn(Tasks(ROWS), seeds).values())
        assert len(count) <= 2 and max(count) - min(count) <= 1 and min(count) >= 2, count
    assert by_step[200] == TaskSampler(shares).tasks(0, 200, 8), "as after a resume"


def test_split_is_independent_of_process_and_order():
    held_out = drawn(Tasks(ROWS), EVALUATED).keys()
    assert drawn(Tasks(ROWS[::-1]), EVALUATED).keys() == held_out
    assert drawn(Tasks(tuple(dict(reversed(row.items())) for row in ROWS)), EVALUATED).keys() != set()
    script = (
        "import json, numpy as np; from forge_agents.programs.tasks import Tasks\n"
        f"rows = json.loads({json.dumps(json.dumps(ROWS))})\n"
        f"print(json.dumps([Tasks(rows).of({HELD_OUT_FROM} + n, None, '-') for n in range(40)]))"
    )
    message = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert {json.dumps(row) for row in json.loads(message)} == held_out


def test_equal_tasks_are_in_one_part():
    rows = [{"question": f"q{n % 30}"} for n in range(300)]
    training, evaluation = drawn(Tasks(rows), SAMPLED), drawn(Tasks(rows), EVALUATED)
    assert not training.keys() & evaluation.keys() and len(training) + len(evaluation) == 30


@pytest.mark.parametrize("key", ["id", "ID", "uuid", "task_id", "__index_level_0__"])
def test_rows_that_differ_only_in_their_number_are_equal(key):
    rows = [{key: n, "question": f"What is {n % 9} + {n % 7}?", "answer": n % 9 + n % 7} for n in range(300)]

    def questions(seeds):
        return {Tasks(rows).of(seed, np.random.default_rng(seed), "my/Crew-v0")["question"] for seed in seeds}

    training, evaluation = questions(SAMPLED), questions(range(HELD_OUT_FROM, HELD_OUT_FROM + 300))
    assert not training & evaluation and len(training) + len(evaluation) == 63
    assert 8 <= len(evaluation) <= 18, "about a fifth is held out"
    with pytest.warns(RuntimeWarning, match="1 of the 1 tasks of eval_tasks are in tasks, too"):
        Tasks(rows, [{**rows[0], key: "other"}])


@pytest.mark.parametrize(
    "rows",
    [
        [{"id": n} for n in range(60)],  # the program looks the task up
        [{"id": n, "split": "train"} for n in range(60)],
        [{"id": n, "level": n % 20} for n in range(1000)],
    ],
)
def test_row_numbers_that_are_the_task_are_compared(rows):
    training, evaluation = drawn(Tasks(rows), SAMPLED), drawn(Tasks(rows), EVALUATED)
    assert len(training) == 0.8 * len(rows) and len(evaluation) == min(200, 0.2 * len(rows))
    assert not training.keys() & evaluation.keys()


def numbered(n):
    return {"question": f"What is {n % 9} + {n % 7}?", "answer": n % 9 + n % 7}


@pytest.mark.parametrize(
    "task",
    [
        lambda n: numbered(n) | {"extra_info": {"index": n, "split": "train"}},
        lambda n: numbered(n) | {"extra_info.index": n},
        lambda n: numbered(n) | {"meta": [{"id": f"a{n}"}]},
        lambda n: numbered(n) | {"qid": n},
        lambda n: numbered(n) | {"problem_idx": n, "id": n},
        lambda n: numbered(n) | {"questionId": n, "Unnamed: 0": n},
        lambda n: numbered(n) | {"": n},
        lambda n: numbered(n)["question"].replace(" ", " " * (1 + n % 2)) + "\n" * (n % 3),
        lambda n: numbered(n)["question"] + ("caf\u00e9", "cafe\u0301")[n % 2],
        lambda n: numbered(n) | {"day": date(2026, 1, 2), "price": Decimal("0.10"), "id": n},
        lambda n: numbered(n) | {"file": Path("a.py"), "data": b"\xff", "index": n},
    ],
)
def test_equal_tasks_with_other_numbers_or_blanks_are_in_one_part(task):
    rows = [task(n) for n in range(300)]

    def questions(seeds):
        tasks = [Tasks(rows).of(seed, None, "my/Crew-v0") for seed in seeds]
        texts = [task["question"] if isinstance(task, dict) else task for task in tasks]
        return {" ".join(text.split()).replace("e\u0301", "\u00e9") for text in texts}

    training, evaluation = questions(range(HELD_OUT_FROM)[:1000]), questions(range(HELD_OUT_FROM, HELD_OUT_FROM + 100))
    assert not training & evaluation and len(training) + len(evaluation) == 63
    with pytest.warns(RuntimeWarning, match="20 of the 20 tasks of eval_tasks are in tasks, too"):
        Tasks(rows, [task(n) for n in range(1, 21)])


def test_equal_rows_of_a_numpy_array_are_in_one_part():
    rows = np.array([f"q{n % 30}" for n in range(300)])
    training, evaluation = drawn(Tasks(rows), SAMPLED), drawn(Tasks(rows), EVALUATED)
    assert not training.keys() & evaluation.keys() and len(training) + len(evaluation) == 30


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (ROWS, [1, 5, 17, 28, 29, 30, 32, 56, 60, 64, 65, 71]),
        ([{"qid": str(n), **row} for n, row in enumerate(ROWS)], [1, 5, 17, 28, 29, 30, 32, 56, 60, 64, 65, 71]),
        ([date(2020, 1, 1) + timedelta(n) for n in range(100)], [3, 8, 9, 11, 19, 20, 26, 29, 31, 32, 43, 57]),
    ],
)
def test_split_of_distinct_tasks_never_changes(rows, expected):
    tasks = Tasks(rows)
    held_out = [tasks.of(HELD_OUT_FROM + n, None, "-") for n in range(len(rows) // 5)]
    assert sorted(map(rows.index, held_out))[:12] == expected, "a run of an older version resumes with its split"


@pytest.mark.parametrize(
    "rows",
    [
        [{"a": a, "b": b} for a in range(10) for b in range(20)],
        [{"kind": "fibonacci", "args": {"index": n}} for n in range(200)],
        [{"prompt": "Sort", "values": [n % 7, n]} for n in range(200)],
        [" " * n for n in range(200)],
    ],
)
def test_numbers_and_blanks_of_the_task_are_compared(rows):
    assert len(drawn(Tasks(rows), SAMPLED)) == 160 and len(drawn(Tasks(rows), EVALUATED)) == 40


@dataclass(frozen=True)
class Sum:
    a: int


class Model(BaseModel):
    a: int


class Opaque:
    def __init__(self, a):
        self.a = a

    def __repr__(self):
        return f"Opaque({self.a})"


class Lazy:
    """Items that are made when they are asked for."""

    def __len__(self):
        return 50

    def __getitem__(self, number):
        return f"task {number}"


@pytest.mark.parametrize(
    "tasks",
    [
        range(50), [f"q{n}" for n in range(50)], [Sum(n) for n in range(50)], [Model(a=n) for n in range(50)],
        [Opaque(n) for n in range(50)], [{"words": np.arange(n)} for n in range(50)], Lazy(),
    ],
)  # fmt: skip
def test_tasks_of_all_types_are_split(tasks):
    training, evaluation = drawn(Tasks(tasks), SAMPLED), drawn(Tasks(tasks), EVALUATED)
    assert (len(training), len(evaluation)) == (40, 10) and not training.keys() & evaluation.keys()


def test_two_lists_are_played_completely():
    tasks = Tasks(ROWS[:30], ROWS[30:35])
    assert len(drawn(tasks, range(30))) == 30 and len(drawn(tasks, range(HELD_OUT_FROM, HELD_OUT_FROM + 5))) == 5
    functions = Tasks(lambda rng: int(rng.integers(10**6)), lambda rng: -int(rng.integers(1, 10**6)))
    assert all(int(task) >= 0 for task in drawn(functions, range(9)))
    assert all(int(task) < 0 for task in drawn(functions, range(HELD_OUT_FROM, HELD_OUT_FROM + 9)))


def test_evaluation_on_training_tasks_is_warned_about():
    few = Tasks(ROWS[:4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(drawn(few, range(4))) == 4
        drawn(Tasks((None,)), EVALUATED)  # no tasks at all
        same = Tasks(few_rows := ROWS[:4], few_rows)  # on purpose
        assert len(drawn(same, EVALUATED)) == 4
    for tasks in (few, Tasks([ROWS[0]]), Tasks([ROWS[0]] * 50)):
        says = r"evaluation of my/Crew-v0 plays tasks that are also trained on: its \d+ .* at least 10 .* eval_tasks="
        with pytest.warns(RuntimeWarning, match=says):
            drawn(tasks, EVALUATED)


def test_tasks_in_both_lists_are_warned_about():
    with pytest.warns(RuntimeWarning, match="3 of the 8 tasks of eval_tasks are in tasks, too"):
        Tasks(ROWS[:20], ROWS[17:25])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "\n".join(map(json.dumps, ROWS[:20]))),
        ("bom.jsonl", "\ufeff" + "\r\n".join(map(json.dumps, ROWS[:20])) + "\r\n\r\n"),
        ("list.json", json.dumps(ROWS[:20], indent=1)),
        ("A.JSONL", "\n".join(map(json.dumps, ROWS[:20]))),
    ],
)
def test_tasks_are_read_from_a_file(tmp_path, monkeypatch, name, text):
    (tmp_path / name).write_bytes(text.encode())
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = {json.dumps(row) for row in ROWS[:20]}
    for path in (tmp_path / name, str(tmp_path / name), f"~/{name}"):
        tasks = Tasks(path)
        assert drawn(tasks, SAMPLED).keys() | drawn(tasks, EVALUATED).keys() == rows
    (tmp_path / name).write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]) + "\n")
    assert len(drawn(Tasks(str(tmp_path / name)), SAMPLED)) == 2, "a file that changed is read again"


def test_tasks_in_a_file_may_be_texts_and_numbers(tmp_path):
    (tmp_path / "t.jsonl").write_text('"a"\n3\n["b"]\n')
    assert drawn(Tasks(tmp_path / "t.jsonl"), SAMPLED).keys() == {'"a"', "3", '["b"]'}


def test_hugging_face_data_sets_are_tasks(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    data.to_csv(str(tmp_path / "rows.csv"))
    expected = drawn(Tasks(ROWS), EVALUATED).keys()
    for given in (data, tmp_path / "saved", tmp_path / "rows.parquet"):
        tasks = Tasks(given)
        assert drawn(tasks, EVALUATED).keys() == expected, "the same rows are held out as of the list"
        assert len(drawn(tasks, SAMPLED)) == 160
    assert len(drawn(Tasks(tmp_path / "rows.csv"), SAMPLED)) == 160
    splits = data.train_test_split(0.1, seed=0)
    raises(TypeError, r"a DatasetDict with the keys train, test\. .*eval_tasks=data\['test'\]", Tasks, splits)
    assert len(drawn(Tasks(splits["train"], splits["test"]), EVALUATED)) == 20
    with pytest.raises(TypeError, match=r"tasks is a IterableDataset\. .*of a stream list\(data.take\(1000\)\)"):
        Tasks(data.to_iterable_dataset())


def test_parquet_is_read_without_a_cache_that_others_may_lock(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file/cache")
    assert drawn(Tasks(tmp_path / "rows.parquet"), EVALUATED).keys() == drawn(Tasks(ROWS), EVALUATED).keys()


def test_csv_files_keep_their_texts(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        'code,gold,n,x,ok,note\n007,NA,1,0.5,True,"a, ""b"""\n10,null,-2,1,False,\n1e3,None,,3.25,True, c \n'
    )
    rows = [Tasks(path, [0]).of(seed, None, "-") for seed in range(3)]
    assert sorted(rows, key=lambda row: row["x"]) == [
        {"code": "007", "gold": "NA", "n": 1, "x": 0.5, "ok": True, "note": 'a, "b"'},
        {"code": "10", "gold": "null", "n": -2, "x": 1, "ok": False, "note": None},
        {"code": "1e3", "gold": "None", "n": None, "x": 3.25, "ok": True, "note": " c "},
    ]
    assert {type(row["n"]) for row in rows} == {int, type(None)}, "an empty cell makes no 1.0 of 1"
    path.write_text("a,b\n1.50,nan\n2,inf\n")
    assert [Tasks(path, [0]).of(seed, None, "-")["b"] for seed in range(2)] in (["nan", "inf"], ["inf", "nan"])
    for text, says in (
        ("a,b\n1,2\n1,2,3\n", "row 2 has 3 cells, and the header 2. Give each row a cell for each column"),
        ("a,b\n1\n", "row 1 has 1 cells, and the header 2"),
        ('a\n"1" x\n', "rows.csv is not CSV"),
        ('a\n1,"\n', "rows.csv is not CSV"),
        ("", "is empty. Write a header"),
        ("a,b\n", "is empty. Give at least one task"),
    ):
        path.write_text(text)
        raises(ValueError, says, Tasks, path)


def test_csv_files_of_other_programs_are_read_as_by_pandas(tmp_path):
    """A byte order mark, Windows line ends, blank lines, line ends in cells, and columns without their own name."""
    pd = pytest.importorskip("pandas")
    path, long = tmp_path / "rows.csv", "x" * 200_000
    path.write_bytes(f'\ufeff,a,a,\r\n0,"b\r\nc",d,e\r\n\r\n1,\u00e4,{long},\r\n'.encode())
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    rows = [Tasks(path, [0]).of(seed, None, "-") for seed in range(2)]
    assert sorted(rows, key=str) == [
        {"Unnamed: 0": 0, "a": "b\r\nc", "a.1": "d", "Unnamed: 3": "e"},
        {"Unnamed: 0": 1, "a": "\u00e4", "a.1": long, "Unnamed: 3": None},
    ]
    assert list(rows[0]) == list(frame.columns)


def test_reading_csv_leaves_the_limit_of_other_readers(tmp_path):
    """The limit is of the process. A small file of tasks made the user's next read of a longer cell fail."""
    path, before = tmp_path / "rows.csv", csv.field_size_limit()
    path.write_text("a,b\n1,2\n")
    Tasks(path, [0])
    assert csv.field_size_limit() == before >= 1 << 17
    assert list(csv.reader(["x" * 100_000])) == [["x" * 100_000]]


def test_a_file_of_tasks_opens_no_other_file_or_address(tmp_path):
    datasets = pytest.importorskip("datasets")
    import pyarrow.parquet as pq

    text, image = datasets.Value("string"), {"bytes": None, "path": "http://127.0.0.1:9/secret"}
    features = datasets.Features({"question": text, "image": {"bytes": datasets.Value("binary"), "path": text}})
    data = datasets.Dataset.from_list([{"question": str(n), "image": image} for n in range(12)], features)
    data.save_to_disk(str(tmp_path / "saved"))
    facts = json.loads((tmp_path / "saved" / "dataset_info.json").read_text())
    facts["features"]["image"] = {"_type": "Image"}
    (tmp_path / "saved" / "dataset_info.json").write_text(json.dumps(facts))
    schema = {"huggingface": json.dumps({"info": {"features": facts["features"]}})}
    pq.write_table(data.data.table.replace_schema_metadata(schema), tmp_path / "rows.parquet")
    for name in ("rows.parquet", "saved"):
        raises(ValueError, "the rows of image are images, sounds or other files", Tasks, tmp_path / name)
    assert len(drawn(Tasks(data), EVALUATED)) == 2


def test_a_small_file_does_not_stand_for_gigabytes_of_rows(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("forge_agents.programs.arrow_files._FREE_BYTES", 1 << 24)
    import pyarrow as pa
    import pyarrow.parquet as pq

    equal = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, "int32"), ["x" * 1_000_000])
    pq.write_table(pa.table({"question": equal}), tmp_path / "a.parquet", compression="zstd")
    plain = pa.table({"question": pa.array(["y" * 1_000_000] * 30)})
    pq.write_table(plain, tmp_path / "b.parquet", compression="zstd", store_schema=False)
    for name in ("a.parquet", "b.parquet"):
        raises(ValueError, "its rows have more than .*Expected at most 100 times as many", Tasks, tmp_path / name)


@pytest.mark.parametrize("is_nested", [False, True])
def test_data_sets_have_at_most_1000_columns(tmp_path, is_nested):
    """The package datasets takes more than quadratic time for them."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def save(number, name):
        row = {f"c{n}": 1 for n in range(number)}
        table = pa.Table.from_pylist([{"question": row} if is_nested else row])
        pq.write_table(table, tmp_path / f"{name}.parquet")
        (tmp_path / name).mkdir()
        with pa.OSFile(str(tmp_path / name / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)

    save(999, "a")
    save(1001, "b")
    for name in ("a.parquet", "a"):
        arrow_files.check_rows(tmp_path / name)
    for name in ("b.parquet", "b"):
        says = "it has 100[12] columns and fields. Expected at most 1000"
        raises(ValueError, says, arrow_files.check_rows, tmp_path / name)


def test_values_that_take_no_space_in_a_file_count(tmp_path, monkeypatch):
    """A list of two billion nulls takes 500 bytes in a file, and 16 GB as a list."""
    datasets = pytest.importorskip("datasets")
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.table({"question": pa.nulls(1_000_000)})
    nested = pa.table({"question": pa.ListArray.from_arrays(pa.array([0, 1_000_000], "int32"), pa.nulls(1_000_000))})
    pq.write_table(rows, tmp_path / "a.parquet", compression="zstd")
    pq.write_table(nested, tmp_path / "b.parquet", compression="zstd")
    datasets.Dataset(rows).save_to_disk(str(tmp_path / "c"))
    datasets.Dataset(nested).save_to_disk(str(tmp_path / "d"))
    (tmp_path / "d" / "padding").write_bytes(bytes(10**7))
    monkeypatch.setattr("forge_agents.programs.arrow_files._FREE_BYTES", 1 << 24)
    for name in ("a.parquet", "b.parquet", "c", "d"):
        with pytest.raises(
            ValueError, match="its rows have more than [1-3][0-9]{7}. Expected at most 100 times as many"
        ):
            Tasks(tmp_path / name)


def test_a_row_that_exceeds_the_memory_of_its_check_is_refused(tmp_path, monkeypatch):
    """The row of 100 million nulls has 20 kB. Its size is only known once it is decoded, which takes 0.8 GB."""
    pytest.importorskip("datasets")
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(arrow_files, "_FREE_BYTES", 1 << 24)
    monkeypatch.setattr(arrow_files, "_WORKER_BYTES", 240 << 20)
    count = 100_000_000
    nested = pa.table({"question": pa.ListArray.from_arrays(pa.array([0, count], "int32"), pa.nulls(count))})
    pq.write_table(nested, tmp_path / "a.parquet", compression="zstd", data_page_size=1 << 40)
    with pytest.raises(ValueError, match="reading its rows takes more than 256 MiB of memory. Write its tasks"):
        Tasks(tmp_path / "a.parquet")


@pytest.mark.parametrize("end", [20_000, 2**31 - 8])
def test_texts_outside_of_their_file_are_refused(tmp_path, end):
    """Arrow would read them from the memory of this process, or crash."""
    datasets = pytest.importorskip("datasets")
    text, folder = "a" * 4660, tmp_path / "a"
    datasets.Dataset.from_dict({"question": [text]}).save_to_disk(str(folder))
    assert Tasks(folder).of(1, np.random.default_rng(0), "e") == {"question": text}
    (file,) = folder.glob("*.arrow")
    before, after = (np.array([0, last], "int32").tobytes() for last in (len(text), end))
    content = file.read_bytes()
    assert before in content
    file.write_bytes(after.join(content.rsplit(before, 1)))
    sys.modules[Tasks.__module__]._read_rows.cache_clear()
    raises(ValueError, "its rows are damaged .*out of bounds", Tasks, folder)


def test_nested_rows_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    import pyarrow as pa

    rows = [
        {"q": f"{n}", "m": [{"role": "user", "parts": [str(n)] * n}], "none": None, "by": {"a": n}} for n in range(40)
    ]
    data = datasets.Dataset(pa.Table.from_pylist(rows))
    data.save_to_disk(str(tmp_path / "a"))
    data.to_parquet(str(tmp_path / "b.parquet"))
    for name in ("a", "b.parquet"):
        assert list(Tasks(tmp_path / name)._training) == rows
    worker = runpy.run_path(str(Path(arrow_files.__file__).with_name("_arrow_worker.py")))
    (batch,) = data.data.table.slice(3, 30).combine_chunks().to_batches()
    counts = {name: worker["_num_values"](batch.column(name)) for name in batch.schema.names}
    lengths = sum(range(3, 33))
    assert counts == {"q": 30, "m": 30 + 30 * 3 + lengths, "none": 30, "by": 60}


def test_a_data_set_with_compressed_rows_or_foreign_files_is_refused(tmp_path):
    """Loading would decompress all rows, a megabyte for each kilobyte."""
    datasets = pytest.importorskip("datasets")
    import pyarrow as pa

    rows = pa.table({"question": pa.array(["x" * 1_000_000] * 20).dictionary_encode()})
    datasets.Dataset(pa.table({"question": ["a", "b"]})).save_to_disk(str(tmp_path / "a"))
    assert len(Tasks(tmp_path / "a")._training) == 2
    (file,) = (tmp_path / "a").glob("*.arrow")
    tasks = sys.modules[Tasks.__module__]
    for table, codec in ((rows, "zstd"), (rows.cast(pa.schema({"question": pa.string()})), "lz4")):
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=options) as stream:
            stream.write_table(table)
        assert file.stat().st_size < 1_000_000
        tasks._read_rows.cache_clear()
        raises(ValueError, "are compressed. Save the data set with save_to_disk", Tasks, tmp_path / "a")
    for content in (b"x" * 100, file.read_bytes()[:200]):
        file.write_bytes(content)
        raises(ValueError, "its rows are (damaged|compressed)", Tasks, tmp_path / "a")
    (tmp_path / "b").mkdir()
    for folder, named in ((tmp_path / "b", ["../a"]), (tmp_path / "a", ["train"])):
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": named}))
        raises(ValueError, "is not a data set without splits. Give the folder of one split", Tasks, folder)
        (folder / "dataset_dict.json").unlink()
    state = tmp_path / "a" / "state.json"
    foreign = [json.dumps({"_data_files": [{"filename": name}]}) for name in ("../b.arrow", "b.bin")]
    for content in ("{}", "[" * 100_000, *foreign):
        state.write_text(content)
        raises(ValueError, "is damaged|Expected an .arrow file in the same folder", Tasks, tmp_path / "a")
    state.write_text(json.dumps({"_data_files": [{"filename": file.name}] * 2}))
    raises(ValueError, "state.json names a file more than once", Tasks, tmp_path / "a")
    os.truncate(state, 6 << 30)
    raises(ValueError, "state.json has 6442450944 bytes, of which almost none are on the disk", Tasks, tmp_path / "a")
    os.mkfifo(tmp_path / "pipe.jsonl")
    raises(ValueError, "is not a file of tasks", Tasks, tmp_path / "pipe.jsonl")


def test_invalid_tasks_are_rejected(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "notes.txt").write_text("-")
    for given, error, says in (
        (str(tmp_path / "bad.jsonl"), ValueError, r"bad.jsonl:2 is not JSON"),
        (str(tmp_path / "empty.jsonl"), ValueError, "tasks is empty"),
        (str(tmp_path / "notes.txt"), ValueError, "not a file of tasks. Give one that ends in .json, .jsonl"),
        ("gone.jsonl", ValueError, "'gone.jsonl' does not exist. The current folder is"),
        ("/nowhere/gone.jsonl", ValueError, "does not exist. Give the path of a file of tasks"),
        ([], ValueError, "tasks is empty"),
        (7, TypeError, "tasks is a int. Give a list"),
        (None, TypeError, "tasks is a NoneType. Give a list"),
        ({1, 2}, TypeError, "tasks is a set. Give a list"),
        (iter([1]), TypeError, "tasks is a list_iterator. Give a list"),
        ({"a": 1}, TypeError, "tasks is a dict with the keys a"),
        (lambda: 1, TypeError, "tasks .* must take"),
    ):
        raises(error, says, Tasks, given)
    raises(ValueError, "eval_tasks is empty", Tasks, ROWS, [])
    with pytest.raises(ForgeError, match=r"tasks\[\d+\] of my/Crew-v0, a Broken, failed with KeyError"):
        drawn(Tasks(type("Broken", (), {"__len__": lambda s: 9, "__getitem__": lambda s, n: {}[n]})()), [0])


def test_only_evaluation_and_benchmark_seeds_are_held_out():
    assert not any(map(is_held_out, (None, 0, HELD_OUT_FROM - 1, DEMONSTRATIONS_FROM)))
    assert is_held_out(HELD_OUT_FROM) and all(map(is_held_out, seeds_of(3, 50))) and is_held_out(2**40)
    for start in (0, HELD_OUT_FROM):
        places = [index_of_seed(start + n, 7) for n in range(21)]
        assert [sorted(places[n : n + 7]) for n in (0, 7, 14)] == [list(range(7))] * 3 and places[:7] != places[7:14]
    assert len({index_of_seed(HELD_OUT_FROM + 2 * n, 8) for n in range(64)}) == 8, "with two environments in turn"


def test_json_file_with_several_lists_is_rejected(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"train": [1, 2], "test": [3]}))
    raises(TypeError, "tasks is a dict with the keys train, test. Give a list of tasks", Tasks, path)
    path.write_text(json.dumps({"question": "?", "answer": "!"}))
    assert Tasks(path).num_training == 1
