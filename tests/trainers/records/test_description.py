"""Descriptions of Python objects in config.yaml."""

import datetime as dt
import fractions
import functools
import importlib
import json
import operator
import re
import textwrap

import numpy as np
import pytest
import torch
import yaml

import forge_agents as fa
import forge_verifiers as fv
from forge_trainers.records.description import describe

REWARD = """
import extraction

WEIGHT = 0.5

def helper(text):
    return WEIGHT * len(extraction.letters(text))

def reward(trajectories):
    return [helper(t.text) for t in trajectories]

def make(bonus):
    return lambda trajectories: [bonus for t in trajectories]

class Graded:
    def __init__(self, scale, api_key=""):
        self._scale, self.api_key = scale, api_key

    def __call__(self, trajectories):
        return [self._scale * helper(t.text) for t in trajectories]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Imports a version of the user's module anew."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # two versions may be written within a second

    def load(reward=REWARD, extraction="def letters(text):\n    return text\n"):
        (tmp_path / "graded_reward.py").write_text(textwrap.dedent(reward))
        (tmp_path / "extraction.py").write_text(extraction)
        importlib.invalidate_caches()
        for name in ("extraction", "graded_reward"):
            result = importlib.reload(importlib.import_module(name))
        return result

    return load


def test_a_function_is_described_by_its_path_and_a_hash_of_its_source(module):
    result = describe(module().reward)
    assert result["function"] == "graded_reward:reward" and len(result["source"]) == 16
    assert describe(module().reward) == result, "the same in every process"


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"reward": REWARD.replace("WEIGHT = 0.5", "WEIGHT = 0.7")}, True),
        ({"reward": REWARD.replace("WEIGHT * len", "-WEIGHT * len")}, True),
        ({"reward": REWARD.replace("[helper(t.text) for", "[1 - helper(t.text) for")}, True),
        ({"extraction": "def letters(text):\n    return text.strip()\n"}, True),  # an imported module of the user
        ({"reward": REWARD + "\ndef unused():\n    return 1\n"}, False),
    ],
)
def test_hash_of_a_reward_covers_its_helpers_and_nothing_else(module, changes, differs):
    before = describe(module().reward)
    assert (describe(module(**changes).reward) != before) == differs


def test_closures_partials_lambdas_and_methods_show_their_values(module):
    result = module()
    assert describe(result.make(1)) != describe(result.make(2))
    assert describe(functools.partial(result.reward, k=1)) != describe(functools.partial(result.reward, k=2))
    assert describe(lambda ts, k=1: k) != describe(lambda ts, k=2: k)
    assert describe(result.Graded(1).__call__) != describe(result.Graded(2).__call__)


def test_an_object_shows_its_class_and_attributes_and_hides_keys(module):
    result = describe(module().Graded(2.5, api_key="sk-abcdefgh12345678"))
    assert (result["class"], result["scale"], result["api_key"]) == ("graded_reward:Graded", 2.5, "(hidden)")
    assert "12345678" not in json.dumps(describe({"url": "http://me:12345678@host", "header": "Bearer 12345678"}))


def test_credentials_are_hidden_wherever_they_stand(module):
    secret, result = "sk-proj-AbCd-1234567890", module()
    values = [
        result.make(secret),
        functools.partial(result.reward, secret),
        functools.partial(result.Graded, 2.0, "plain-secret"),
        {"headers": {"X-Api-Key": "plain-secret"}, "auth": ("me", "plain-secret")},
        ["npx", "server", "--api-key", "plain-secret", "--token=plain-secret"],
        {"url": "https://me:plain-secret@host/?api_key=plain-secret"},
    ]
    shown = json.dumps(describe(values))
    assert secret not in shown and "plain-secret" not in shown and "npx" in shown and "headers" in shown


def test_verifiers_of_an_ensemble_are_described_with_arguments():
    ensemble = fa.Ensemble([fv.Exact(), fv.Repetition(size=3)], combine="mean", refit_every=4)
    result = describe(0.5 * ensemble + 0.5 * fv.Format())
    inner = result["terms"][0][1]
    assert inner["combine"] == "mean" and inner["refit_every"] == 4
    assert inner["verifiers"][1] == {"class": "forge_verifiers.rules.text:Repetition", "size": 3}
    assert [weight for weight, _ in result["terms"]] == [0.5, 0.5]


def test_players_and_several_rewards_show_their_parts(module):
    scripted = fa.Scripted(module().helper, name="rival")
    assert describe(scripted)["fn"]["function"] == "graded_reward:helper"
    columns = describe(fa.MultiReward({"a": module().reward, "b": fv.Exact()}, {"a": 0.2}))
    assert columns["weights"] == {"a": 0.2, "b": 1.0} and columns["rewards"]["b"]["class"].endswith(":Exact")


def test_every_description_is_plain_yaml_of_bounded_size():
    cycle = [1]
    cycle.append(cycle)
    values = {
        "nan": float("nan"),
        "array": np.arange(3),
        "many": list(range(10_000)),
        "text": "x" * 10_000,
        "set": {"b", "a"},
        "cycle": cycle,
        "lock": __import__("threading").Lock(),
        1: object(),
    }
    text = yaml.safe_dump(describe(values))
    assert len(text) < 3_000 and yaml.safe_load(text) == describe(values)
    assert describe({"many": list(range(10_000))}) != describe({"many": [*range(9_999), 1]})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (dt.date(2026, 1, 1), dt.date(2026, 1, 2)),
        (fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (operator.itemgetter("a"), operator.itemgetter("b")),
        (torch.arange(3), torch.arange(1, 4)),
        (range(3), range(4)),
        (set(range(100)), set(range(1, 101))),
    ],
)
def test_values_of_libraries_show_what_they_hold(first, second):
    assert describe(first) != describe(second)
    assert describe(object()) == {"class": "builtins:object"}


def test_code_without_a_source_file_and_cached_functions_have_a_hash(module):
    functions = [{}, {}]
    for number, names in enumerate(functions):
        exec(f"def reward(ts): return {number}", names)
    assert describe(functions[0]["reward"]) != describe(functions[1]["reward"])
    assert describe(functools.cache(module().helper))["source"]
    one, two = lambda ts: 1, lambda ts: 2
    assert describe(one) != describe(two)


def test_judges_at_different_addresses_have_different_hashes():
    def judge(service):
        return fv.Judge(fa.Endpoint(f"http://10.0.0.1:8000/sales-assistant-{service}/v1", "m"), "Is it right?")

    assert "sales-assistant" not in json.dumps(describe(judge("v2"))), "such a part may be a token"
    first, same, other = (describe(judge(name), whole_addresses=True) for name in ("v2", "v2", "v3"))
    assert first == same != other
    key = describe({"url": "http://user:secret-2024@host/v1"}, whole_addresses=True)
    assert "secret-2024" not in json.dumps(key)
