import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import forge_agents as fa
from forge_agents.bench.code import _import_statements, _modules
from forge_agents.bench.fingerprints import code_of, player_facts, with_content
from forge_agents.envs.spec import EnvSpec
from forge_agents.serving import memory


def test_environment_hash_covers_imported_modules(tmp_path, monkeypatch):
    package = tmp_path / "hashed_game"
    (package / "deep").mkdir(parents=True)
    for name, text in {
        "__init__.py": "import hashed_game.aside",
        "aside.py": "",
        "game.py": "from . import rules\nfrom .deep import words\nimport json\n\ndef make():\n    pass\n",
        "rules.py": "def win():\n    from hashed_game.late import ODDS\n",
        "late.py": "ODDS = 1",
        "deep/__init__.py": "",
        "deep/words.py": "from ..tasks import TASKS",
        "tasks.py": "TASKS = 1",
    }.items():
        (package / name).write_text(text)
    (tmp_path / "lone_game.py").write_text("import lone_words\nimport numpy\n\ndef make():\n    pass\n")
    (tmp_path / "lone_words.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("hashed_game.game", "lone_game"):
        fa.register(f"hash/{name.partition('.')[0]}-v0", entry_point=f"{name}:make")
    specs = {name: fa.spec(f"hash/{name}-v0") for name in ("hashed_game", "lone_game")}

    def changed(file, which="hashed_game"):
        before = code_of(specs[which])
        with (tmp_path / file).open("a") as more:
            more.write("\n# changed")
        return code_of(specs[which]) != before

    assert all(changed(f"hashed_game/{name}.py") for name in ("game", "rules", "late", "deep/words", "tasks"))
    assert not changed("hashed_game/aside.py") and not changed("hashed_game/__init__.py")
    assert changed("lone_game.py", "lone_game") and changed("lone_words.py", "lone_game")


def test_computing_data_type_of_a_model_is_shown_and_does_not_change_its_fingerprint(tiny_models, monkeypatch):
    model, shown = fa.Policy(str(tiny_models(dtype="bfloat16")), name="m"), []
    for fast in (True, False):
        monkeypatch.setattr(memory, "has_fast_bfloat16", lambda fast=fast: fast)
        shown.append(player_facts(model))
    assert [facts["dtype"] for facts in shown] == ["bfloat16", "float32"]
    assert shown[0]["fingerprint"] == shown[1]["fingerprint"]
    assert shown[0]["fingerprint"] != player_facts(model, fa.EngineConfig(dtype="float32"))["fingerprint"]


def test_environment_hash_covers_the_repair_tasks():
    import forge_envs.teams.repair

    assert "forge_envs.teams.repair_tasks" in _modules(vars(forge_envs.teams.repair))


def _helper(seen):
    return "a"


def _player(seen):
    return next(_helper(s) for s in (seen,))


def test_function_hash_covers_called_functions(monkeypatch):
    before = player_facts(fa.Scripted(_player))["code"]
    assert before == player_facts(fa.Scripted(_player))["code"]

    def other(seen):
        return "b"

    monkeypatch.setitem(globals(), "_helper", other)
    assert player_facts(fa.Scripted(_player))["code"] != before


COIN = """
import dataclasses, functools, json
import coin_help
BAD, MANY, SEEN = False, frozenset({"b", "a"}), []

@dataclasses.dataclass
class Rules:
    words: frozenset = frozenset({"alpha", "beta", "gamma"})

RULES = Rules()

def good(seen, words={"x", "y", "z"}):
    SEEN.append(seen)
    return "z" if BAD and MANY and RULES and words else coin_help.last(seen)

@functools.cache
def cached(seen):
    return "c"

def uses(seen):
    return cached(seen)

def maker(inner):
    return lambda seen: inner(seen)

class Bot:
    def __init__(self, bold):
        self.bold = bold

    def __call__(self, seen):
        return cached(seen) if self.bold else "fold"

    def play(self, seen):
        return self(seen)

if __name__ == "__main__":
    from coin_sweep import results
"""


@pytest.fixture
def coin(tmp_path, monkeypatch):
    """A module of players, a neighboring module, and a module that must not run."""
    (tmp_path / "coin_help.py").write_text("def last(seen):\n    return 'z'\n")
    (tmp_path / "coin_sweep.py").write_text("raise SystemExit(3)\nprint 'of another Python'")
    (tmp_path / "coin_player.py").write_text(COIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import coin_player

    yield coin_player
    for name in ("coin_player", "coin_help"):
        sys.modules.pop(name, None)


def code(function):
    return player_facts(fa.Scripted(function))["code"]


def test_function_hash_covers_constants_and_neighboring_modules(coin, tmp_path, monkeypatch):
    first = code(coin.good)
    coin.SEEN.append("played")
    assert code(coin.good) == first, "playing changes no code"
    monkeypatch.setattr(coin, "BAD", True)
    assert code(coin.good) != first
    monkeypatch.setattr(coin, "BAD", False)
    (tmp_path / "coin_help.py").write_text("def last(seen):\n    return 'q'\n")
    assert code(coin.good) != first


def test_player_hash_covers_attributes_and_closures(coin):
    bold, meek = coin.Bot(bold=True), coin.Bot(bold=False)
    players = [bold, meek, bold.play, meek.play, functools.partial(coin.Bot.play, bold), coin.maker(bold),
               coin.maker(meek), coin.cached, coin.uses, functools.partial(coin.good, words={"q"})]  # fmt: skip
    assert len({code(player) for player in players}) == len(players)
    assert code(coin.Bot(bold=True)) == code(bold), "what it is, not where"


def test_hash_is_equal_in_every_process_and_runs_no_code(coin, tmp_path):
    script = (
        "import forge_agents as fa, coin_player as c\nfrom forge_agents.bench.fingerprints import player_facts\n"
        "print(*[player_facts(fa.Scripted(p))['code'] for p in (c.good, c.Bot(True), c.uses, c.maker(c.good))])"
    )
    output = set()
    for salt in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
        output.add(subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True).stdout)
    hashes = map(code, (coin.good, coin.Bot(True), coin.uses, coin.maker(coin.good)))
    assert output == {" ".join(hashes).encode() + b"\n"}


def test_imports_of_an_unchanged_source_are_read_once(coin):
    first = code(coin.uses)
    misses = _import_statements.cache_info().misses
    assert code(coin.uses) == first and _import_statements.cache_info().misses == misses > 0


def test_function_arguments_are_hashed_by_code(coin):
    def registered(rule):
        fa.register("hash/Ruled-v0", entry_point="coin_player:maker", inner=rule, words={"x", "y"})
        return code_of(fa.spec("hash/Ruled-v0"))

    assert registered(coin.good) == registered(coin.good) != registered(coin.uses)


def test_changed_task_data_change_the_environment_hash(tmp_path):
    path = tmp_path / "tasks.jsonl"
    given = {"str": str(path), "path": path}
    prints = []
    for text in ('"a"\n', '"b"\n', '"b"\n'):
        path.write_text(text)
        prints.append({
            name: code_of(EnvSpec(id="my/Tasks-v0", entry_point=fa.Program, kwargs={"tasks": tasks}))
            for name, tasks in given.items()
        })  # fmt: skip
    for name in given:
        first, changed, again = (each[name] for each in prints)
        assert first != changed == again
    assert with_content("no-file.jsonl") == "no-file.jsonl" and with_content([1]) == [1]
    long = "You are a poet. " * 500
    assert with_content(long) == long, "a text that is no path"
    datasets = pytest.importorskip("datasets")
    one, other = (datasets.Dataset.from_list([{"a": text}]) for text in "ab")
    assert with_content(one) == with_content(one) != with_content(other)
    for data in (one, other):
        data.save_to_disk(str(tmp_path / "saved"))
        prints.append(with_content(str(tmp_path / "saved")))
    assert prints[-2] != prints[-1]


PROGRAM = """
from forge_agents.bench.code import described
from forge_agents.bench.fingerprints import digest

class Player:
    word = WORD
    words = frozenset(["a", "b", "c", "d"])
    def __call__(self, observation):
        return "METHOD" if observation in {"x", "y", "z"} else ""

print(digest(described(lambda observation: "METHOD")), digest(described(Player())))
"""


def test_code_from_stdin_is_told_apart_by_its_constants():
    prints = [
        subprocess.run(
            [sys.executable, "-"],
            input=PROGRAM.replace("WORD", word).replace("METHOD", method),
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True, text=True, check=True, timeout=300,
        ).stdout.split()
        for salt, word, method in (("0", "1", "a"), ("1", "2", "a"), ("2", "1", "b"), ("3", "1", "a"))
    ]  # fmt: skip
    assert prints[0] == prints[3]
    assert prints[0][0] == prints[1][0] != prints[2][0]
    assert len({player for _, player in prints}) == 3


def with_middle(entry):
    values = np.zeros(5000, dtype=np.float32)
    values[2500] = entry == "b"
    return values


class _Averages:
    def __init__(self, entry):
        self.entry = entry

    def __array__(self, dtype=None, copy=None):
        return np.zeros(2)


@pytest.mark.parametrize(
    "data",
    [
        with_middle,
        lambda entry: torch.from_numpy(with_middle(entry)).requires_grad_(),
        lambda entry: torch.from_numpy(with_middle(entry)).requires_grad_().bfloat16(),
        lambda entry: pd.DataFrame(with_middle(entry)),
        lambda entry: pd.DataFrame({entry: [1.0]}),
        lambda entry: pd.Series([1.0], index=[entry]),
        lambda entry: pd.DataFrame({"names": ["x"] * 250 + [entry] + ["x"] * 250}),
        _Averages,
    ],
    ids=["array", "tensor", "half tensor", "table", "columns", "rows", "table of texts", "object of the user"],
)
def test_all_data_of_a_player_count(data):
    def digest_of(entry):
        values = data(entry)
        return player_facts(fa.Scripted(lambda observation: str(values)))["fingerprint"]

    assert digest_of("a") == digest_of("a") != digest_of("b")


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(3).to(torch.float8_e4m3fn)],
    ids=["sparse", "without data", "8 bits"],
)
def test_player_with_a_tensor_that_is_no_array_has_a_fingerprint(tensor):
    assert player_facts(fa.Scripted(lambda observation: str(tensor)))["fingerprint"]


def test_token_in_the_address_of_an_endpoint_is_hidden_but_counts(monkeypatch):
    """Facts of players are part of reports, which are published."""
    facts, other = (
        player_facts(fa.Endpoint(f"https://models.example/{key}0123456789abcdefABCDEF/v1", "m")) for key in "xy"
    )
    assert facts["url"] == other["url"] == "https://models.example/(hidden)/v1"
    assert facts["fingerprint"] != other["fingerprint"]
    monkeypatch.setenv("SOME_KEY", "hush-hush")
    assert "hush" not in json.dumps(player_facts(fa.Endpoint("http://127.0.0.1:1/v1", "m", api_key_env="SOME_KEY")))


def test_model_fingerprint_covers_weights_sampling_and_context_only(tiny_llama, tmp_path):
    copy = shutil.copytree(tiny_llama, tmp_path / "elsewhere")

    def facts(engine=None, **sampling):
        return player_facts(fa.Policy(str(copy), name="other", sampling=fa.Sampling(**sampling)), engine)

    mine = player_facts(fa.Policy(str(tiny_llama)))
    assert mine["sampling"].keys() == {
        "temperature",
        "top_p",
        "max_tokens",
        "stop",
    }  # as in reports of earlier versions
    assert str(tmp_path) not in json.dumps(facts()) and facts(top_k=3)["sampling"]["top_k"] == 3
    in_training = {"initial_temperature": 2.0, "temperature_steps": 9}
    equal = [facts(), facts(**in_training), facts(fa.EngineConfig(threads=3))]
    assert {each["fingerprint"] for each in equal} == {mine["fingerprint"]}
    halves = dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 0.5)
    counts = dict.fromkeys(("top_k", "max_tokens", "max_reasoning_tokens"), 7)
    changes = {**halves, **counts, "repetition_penalty": 2.0, "bad_words": ("x",), "stop": ("x",)}
    assert {*changes, *in_training} == {field.name for field in dataclasses.fields(fa.Sampling)}
    other = [facts(**{name: value}) for name, value in changes.items()] + [facts(fa.EngineConfig(max_model_len=64))]
    assert len({each["fingerprint"] for each in other} - {mine["fingerprint"]}) == len(other)
    assert {each["weights"] for each in other} == {mine["weights"]}
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert facts()["weights"] != mine["weights"], "one bit of one weight"


def test_environment_code_and_arguments_change_its_hash():
    kuhn, again, relay, tools = (
        code_of(fa.spec(f"forge/{name}-v0")) for name in ("KuhnPoker", "KuhnPoker", "Relay", "ToolRelay")
    )
    assert kuhn == again and len({kuhn, relay, tools}) == 3
