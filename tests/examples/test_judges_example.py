"""`examples/judges.py` with a server whose errors are known, so that the accuracies of the table are."""

import hashlib
import itertools
import json
import re

import numpy as np
import pytest


def is_noise(*key, percent):
    """Whether the judge errs here: in `percent` of all cases, independently."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") % 100 < percent


def sum_of(text):
    a, b = re.search(r"What is (\d+) \+ (\d+)\?", text).groups()
    return int(a) + int(b)


ERRORS = (25, 0, 5, 45, 45)
"""Errors of each rubric's judge, in percent of the texts, independent of each other."""


def verdict(rubric, total, number):
    """The second judge does not look and always says yes."""
    return rubric == 1 or (number == total) != is_noise(rubric, total, number, percent=ERRORS[rubric])


def mark(total, number):
    """RULER gives 9 or 2, in a third of the groups the wrong way around, and 5 in a sixth."""
    if total % 6 == 0:
        return 5
    return 9 if (number == total) != (total % 6 in (1, 2)) else 2


@pytest.fixture
def judges(load_example):
    return load_example("judges")


@pytest.fixture
def server(judges, serve_chat):
    def reply(request):
        system, user = (message["content"] for message in request["messages"])
        total, question = sum_of(user), re.sub(r"What is \d+ \+ \d+\?", "", user)
        fenced = question.rpartition("\n\n")[0]
        numbers = [int(number) for number in re.findall(r"(?<![\w+-])\d{2,3}(?![\w+-])", fenced)]
        if "Compare the" in user:
            return json.dumps({str(place): mark(total, number) for place, number in enumerate(numbers, 1)})
        (number,) = numbers
        rubric = next(place for place, text in enumerate(judges.RUBRICS) if text in system)
        return "yes" if verdict(rubric, total, number) else "no"

    return serve_chat(reply)


def accuracies(rows, score):
    """The two accuracies by group, counted one by one."""
    result = []
    for _, group in itertools.groupby(rows, key=lambda row: row.seed):
        members = [(row.info["answer"], int(re.search(r"\d+", row.turns[0].action)[0])) for row in group]
        scored = [(score(total, number), number == total) for total, number in members]
        best = [right for value, right in scored if value == max(scored)[0]]
        pairs = [
            1.0 if good > bad else 0.5 if good == bad else 0.0
            for (good, right), (bad, other) in itertools.product(scored, scored)
            if right and not other
        ]
        result.append((sum(best) / len(best), sum(pairs) / len(pairs)))
    return np.array(result)


def test_table_has_the_accuracies_of_judges_with_known_errors(judges, server, capsys):
    words = ["--url", server.url, "--model", "stub", "--groups", "60"]
    table = {name: (values, calls, tokens) for name, values, calls, tokens in judges.main(words)}
    rows = judges.answers(60, 6)
    expected = {
        "random choice": lambda total, number: 0.0,
        "single judge": lambda total, number: float(verdict(0, total, number)),
        "RULER": mark,
        "mean of 5 judges": lambda total, number: sum(verdict(k, total, number) for k in range(5)),
    }
    for name, score in expected.items():
        assert np.allclose(table[name][0], accuracies(rows, score)), name
    mean = {name: values.mean(axis=0) for name, (values, _, _) in table.items()}
    assert mean["random choice"][1] == 0.5
    assert mean["single judge"] == pytest.approx([0.709, 0.752], abs=1e-3)
    for name in ("Weaver of 5 judges", "default ensemble of 5"):
        assert (mean[name] > mean["mean of 5 judges"]).all() and (mean[name] > mean["single judge"]).all(), name
    num_texts = len({(row.seed, row.turns[0].action) for row in rows})
    assert num_texts == 360
    calls = {name: number for name, (_, number, _) in table.items()}
    assert calls["RULER"] == 60 and calls["single judge"] == 360 and calls["mean of 5 judges"] == 5 * 360
    assert {name: tokens for name, (_, _, tokens) in table.items()} == {name: 12 * n for name, n in calls.items()}
    assert f"{mean['RULER'][0]:.3f} ±" in capsys.readouterr().out
