"""Failed calls are no evidence, limits nest, and a late answer loses only itself."""

import asyncio
import time

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_agents.policy import Endpoint
from forge_verifiers import Composable, ForAgent, Gate, Judge, PerTurn
from forge_verifiers.core.verifier import Assessment, Sum, assessed, max_duration_s
from forge_verifiers.ensemble.panel import Caller
from forge_verifiers.judge import clients
from forge_verifiers.judge.clients import Conversation
from forge_verifiers.judge.prompts import Reply

from .simulated import judges, played, truth  # noqa: TID252 (tests are no installed package)


class Flaky(Composable):
    """Fails on the rows it is told to, abstains on others."""

    name, family, cost = "flaky", None, "model"

    def __init__(self, fails=lambda t: False, abstains=lambda t: False):
        self.fails, self.abstains = fails, abstains

    def score(self, trajectories):
        return self.assess(trajectories).scores

    def assess(self, trajectories):
        failed = {at: "late" for at, t in enumerate(trajectories) if self.fails(t)}
        silent = [at in failed or self.abstains(t) for at, t in enumerate(trajectories)]
        votes = np.array([t.info["votes"][4] for t in trajectories], np.float32)
        return Assessment(scores=np.where(silent, np.float32(np.nan), votes), failed=failed)


class FakeModel:
    """Starts and answers slowly if asked. The verdict is the last digit of the answer."""

    def __init__(self, start_s=0.0, late=""):
        self.start_s, self.late = start_s, late

    async def start(self):
        await asyncio.sleep(self.start_s)

    async def ask(self, question):
        if self.late and self.late in question.text:
            await asyncio.sleep(30)
        return Reply(text="yes", shares={"yes": 0.75, "no": 0.25}, prompt_tokens=1, completion_tokens=1)

    async def stop(self):
        pass

    def max_duration_s(self, questions):
        return 0.3 - clients._SLACK_S  # a late answer is given up soon, and what stands around it has its time


def judge_on(model, start_timeout_s=5.0):
    made = Judge(Endpoint("http://127.0.0.1:9/v1", "stub"), "Is it right?", name="llm")
    made._conversation = Conversation(model, name="llm", start_timeout_s=start_timeout_s)
    return made


def test_slow_start_of_a_judge_exceeds_the_ensemble_timeout():
    with judge_on(FakeModel(start_s=0.5)) as slow:
        slow.close()
        ensemble = Ensemble([*judges(), slow], timeout_s=0.2)
        ensemble.score(played(0))
        row = ensemble.report().verifiers[-1]
        assert (row.scored, row.failed, row.timeouts) == (64, 0, 0)


def test_one_late_answer_of_64_costs_one_answer():
    with judge_on(FakeModel(late=">>>\n3 5\n<<<")) as late:
        ensemble = Ensemble([*judges(), late])
        rows = played(0)
        answers = ensemble._panel.score(rows, np.arange(64))
        assert np.argwhere(~answers.queried).tolist() == [[29, 6]]
        assert np.argwhere(np.isnan(answers.scores)).tolist() == [[29, 6]]
        row = ensemble.report().verifiers[-1]
        assert (row.scored, row.abstained, row.failed, row.timeouts) == (63, 0, 1, 0)
        assert "no answer within" in row.last_error


def test_duration_bounds_of_composed_verifiers():
    inner = judge_on(FakeModel())
    own = inner.max_duration_s(played(0), 1.0)
    plain = Rule(lambda t: 0.5, name="plain")
    rows = played(0)
    assert own > 5 + 0.3 and max_duration_s(plain, rows, 60.0) == 60.0
    assert max_duration_s(Sum([(0.5, inner), (0.5, plain)]), rows, 60.0) == own + 60
    assert max_duration_s(Gate(plain, ForAgent("a", inner)), rows, 60.0) == own + 60
    assert max_duration_s(PerTurn(inner), rows, 60.0) == own
    assert max_duration_s(Ensemble([inner, plain], timeout_s=7.0), rows, 60.0) == own + 7


def test_verifiers_own_limit_is_enforced():
    class Patient(Composable):
        name, family, cost = "patient", None, "cheap"

        def max_duration_s(self, trajectories, default_s):
            return 0.05

        def score(self, trajectories):
            time.sleep(60)  # in a thread for which nothing waits
            return np.zeros(len(trajectories), np.float32)

    (verdict,) = Caller([Patient()], timeout_s=60.0).call({0: played(0)}).values()
    assert verdict.failure == "timeout" and verdict.failed[63] == "no scores after 0.05 s"


def test_failed_rows_keep_their_index_in_composed_verifiers():
    rows = played(0)
    for at, t in enumerate(rows):
        t.info["at"] = at
    flaky = Flaky(fails=lambda t: t.info["at"] == 9, abstains=lambda t: t.info["at"] == 11)
    dead = Flaky(fails=lambda t: t.info["at"] == 9)
    dead.name = "dead"
    odd = Rule(lambda t: float(t.info["at"] % 2), name="odd")
    assert list(assessed(Gate(odd, flaky), rows).failed) == [9]
    assert list(assessed(Gate(flaky, odd), rows).failed) == [9]
    assert list(assessed(ForAgent("a", flaky), rows).failed) == [9]
    assert list(assessed(PerTurn(flaky), rows).failed) == [9]
    assert list(assessed(0.5 * flaky, rows).failed) == [9]
    assert assessed(0.5 * flaky + 0.5 * odd, rows).failed == {}
    assert list(assessed(Ensemble([flaky, dead]), rows).failed) == [9]


def test_outage_does_not_change_the_fit():
    """For half of the run a judge is down, and just then the policy is bad: its silence comes with wrong answers."""
    down = []
    flaky, steady = Flaky(fails=lambda t: bool(down)), Flaky()
    one, other, four = (Ensemble([*judges()[:4], *more], refit_every=2) for more in ([flaky], [steady], []))
    for call in range(24):
        down[:] = [True] * (8 <= call < 16)
        rows = played(call, right=0.15 if down else 0.75)
        for ensemble in (one, other, four):
            ensemble.score(rows)
    one.learning = other.learning = four.learning = False
    rows = [t for call in range(5) for t in played(100 + call)]
    down[:] = [True]
    quiet = one.score(rows)
    assert abs(quiet.mean() - truth(rows).mean()) < abs(four.score(rows).mean() - truth(rows).mean()) + 0.05
    down[:] = []
    assert abs(one.score(rows).mean() - other.score(rows).mean()) < 0.05
    row = one.report().verifiers[-1]
    assert (row.abstained, row.failed) == (0, 8 * 64 + 320)


def test_failed_answers_are_repeated_and_equal_abstentions_shared():
    rows = played(0)
    state = {"down": True}
    flaky = Flaky(fails=lambda t: state["down"], abstains=lambda t: t is rows[0])
    ensemble = Ensemble([*judges(), flaky])
    ensemble.score(rows)
    state["down"] = False
    ensemble.score(rows)
    row = ensemble.report().verifiers[-1]
    assert (row.scored, row.abstained, row.failed, row.cached) == (63, 1, 64, 0)


@pytest.mark.parametrize("combine", ["mean", "majority", "dawid-skene", "weaver", "default"])
def test_window_keeps_the_mask_of_failures(combine):
    ensemble = Ensemble([*judges(), Flaky(fails=lambda t: t.seed % 2 == 0)], combine)
    ensemble.score(played(0))
    state = ensemble.state_dict()
    assert state["window/queried"][:, :6].all() and 0 < state["window/queried"][:, 6].mean() < 1
    again = Ensemble([*judges(), Flaky(fails=lambda t: t.seed % 2 == 0)], combine)
    again.load_state_dict(state)
    assert again.score(played(1)).tobytes() == ensemble.score(played(1)).tobytes()
    with pytest.raises(ValueError, match="lacks window/queried"):
        again.load_state_dict({k: v for k, v in state.items() if k != "window/queried"})
