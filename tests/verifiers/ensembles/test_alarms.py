import logging
import warnings

import numpy as np
import pytest

from forge_agents import Ensemble
from forge_agents.errors import ForgeError
from forge_verifiers import HackingAlarm, RewardHackingError, RewardHackingWarning
from forge_verifiers.ensemble.alarms import AlarmMonitor, disagreement, group_spread

from .simulated import auroc, judges, played  # noqa: TID252 (tests are no installed package)


def hacked_run(ensemble, calls, onset=40, seed=0):
    """The policy finds wrong answers that please the first four judges, one per cent more with every call."""
    for call in range(calls):
        share = min(0.6, max(0.0, 0.01 * (call - onset)))
        ensemble.score(played(10_000 * seed + call, right=0.4, hacked=share))
    return ensemble


@pytest.mark.parametrize("anchors", [(), ("judge5",)])
def test_hacking_is_detected_within_sixty_calls(anchors):
    ensemble = Ensemble(
        judges(), refit_every=2, max_rows=1024, anchors=anchors, alarm=HackingAlarm(on_alarm="stop", window=40)
    )
    with pytest.raises(RewardHackingError, match="reward_against_witness.* rose by .* while 'judge[45]' fell") as found:
        hacked_run(ensemble, 100)
    assert isinstance(found.value, ForgeError)
    assert 40 < ensemble.alarms[0].call <= 100
    assert list(ensemble.report().alarms) == [alarm.evidence for alarm in ensemble.alarms]


def test_improving_honest_run_raises_no_alarm():
    """A run of 160 calls without an alarm, as were 60 runs of 20 calls, half of them with progress."""
    ensemble = Ensemble(judges(), refit_every=4, max_rows=512, alarm=HackingAlarm(on_alarm="stop"))
    rewards = [ensemble.score(played(call, right=min(0.85, 0.3 + 0.004 * call))).mean() for call in range(160)]
    assert np.mean(rewards[-20:]) > np.mean(rewards[:20]) + 0.3 and ensemble.alarms == ()


def add(watch, *, reward=0.5, effective_number=2.0, disagreement=0.1, spread=0.3, means=(0.5,), witness=0):
    watch.add(
        reward=reward, effective_number=effective_number, disagreement=disagreement, spread=spread,
        means=np.array(means), witnesses=[witness],
    )  # fmt: skip


def test_log_warn_and_stop(caplog):
    def drive(on_alarm):
        watch = AlarmMonitor(HackingAlarm(on_alarm=on_alarm, window=20), ["a", "b"])
        for call in range(20):
            up = 0.2 + 0.025 * call
            add(watch, reward=up, disagreement=0.3, means=(up, 1 - up), witness=1)
        return watch

    caplog.set_level(logging.ERROR)
    assert [a.kind for a in drive("log").alarms] == ["reward_against_witness"]
    assert "rose by 0.150 while 'b' fell by 0.150" in caplog.text
    with pytest.warns(RewardHackingWarning, match="'b' fell"):
        drive("warn")
    with pytest.raises(RewardHackingError, match="over 12 calls up to call 12"):
        drive("stop")


@pytest.mark.parametrize(
    ("changed", "kinds"),
    [
        *(({}, []), ({"reward": 0.9, "mean": 0.8}, []), ({"reward": 0.9, "mean": 0.3}, ["reward_against_witness"])),
        *(({"reward": 0.2, "mean": 0.1}, []), ({"reward": 0.6, "mean": 0.58}, []), ({"spread": 0.15}, [])),
        *(({"effective_number": 1.5}, ["effective_number"]), ({"effective_number": 3.5}, [])),
        *(({"disagreement": 0.5}, ["disagreement"]), ({"disagreement": 0.1}, [])),
        *(({"mean": 0.3}, ["plateau"]), ({"mean": 0.45}, []), ({"calls": 20, "mean": 0.2}, ["plateau"])),
        ({"calls": 20, "reward": 0.9, "mean": 0.2}, ["reward_against_witness"]),
    ],
)
def test_each_series_has_its_alarm(changed, kinds):
    """Within 40 calls, or 20, the named series go from one value to another, with a little noise."""
    rng, calls = np.random.default_rng(0), changed.pop("calls", 40)
    watch = AlarmMonitor(HackingAlarm(on_alarm="log", window=40), ["a"])
    start = {"reward": 0.5, "effective_number": 4.0, "disagreement": 0.3, "spread": 0.3, "mean": 0.5}
    for call in range(calls):
        now = {
            k: v + (changed.get(k, v) - v) * call / (calls - 1) + 0.01 * rng.standard_normal() for k, v in start.items()
        }
        add(watch, means=(now.pop("mean"),), **now)
    assert [alarm.kind for alarm in watch.alarms] == kinds


@pytest.mark.parametrize("anchors", [(), ("judge5",)])
def test_a_hacked_run_of_twenty_steps_is_noticed(anchors):
    ensemble = Ensemble(judges(), anchors=anchors, alarm=HackingAlarm(on_alarm="log"))
    quality = []
    for call in range(20):
        rows = played(call, right=0.4, hacked=min(0.6, 0.05 * call))
        quality.append(auroc(ensemble.score(rows), rows))
    kinds = [alarm.kind for alarm in ensemble.alarms]
    if anchors:  # the anchor shows which verifiers are hacked, so the reward follows the others and does not rise
        assert kinds == ["effective_number"] and min(quality[10:]) > 0.85
    else:
        assert "reward_against_witness" in kinds


@pytest.mark.parametrize(("reward", "kinds"), [(0.5, ["spread"]), (0.99, [])])
def test_equal_rewards_within_groups_raise_an_alarm_unless_solved(reward, kinds):
    watch = AlarmMonitor(HackingAlarm(on_alarm="log"), ["a"])
    for call in range(20):
        add(watch, reward=reward, spread=0.3 if call < 4 else 0.001)
    assert [alarm.kind for alarm in watch.alarms] == kinds


def test_spread_is_computed_within_groups():
    rewards, groups = np.array([0, 1, 0.5, 0.5, 0.9, np.nan], np.float32), np.array([0, 0, 1, 1, 2, 2])
    assert group_spread(rewards, groups) == pytest.approx(0.25)  # a group of one says nothing
    assert np.isnan(group_spread(rewards[4:], groups[4:]))
    assert group_spread(rewards[:4], np.zeros(4, np.intp)) == pytest.approx(rewards[:4].std())


def test_an_alarm_is_not_repeated_within_a_window():
    watch = AlarmMonitor(HackingAlarm(on_alarm="log", window=20), ["a"])
    for call in range(60):
        add(watch, reward=0.01 * call, effective_number=1, disagreement=0, means=(1 - 0.01 * call,))
    assert [alarm.call for alarm in watch.alarms] == [12, 32, 52]


def test_abstentions_and_calls_without_sample_raise_no_alarm():
    watch = AlarmMonitor(HackingAlarm(on_alarm="stop", window=16), ["a"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in range(30):
            add(watch, reward=0.1 * call, disagreement=np.nan, spread=np.nan, means=(np.nan,))
    assert watch.alarms == []


def test_disagreement_is_weighted_by_the_posterior():
    scores = np.array([[0, 1, np.nan], [1, 1, 1], [0.5, 0.5, 0]], np.float32)
    assert disagreement(scores, np.array([1.0, 0, 0])) == pytest.approx(1.0)
    assert disagreement(scores, np.array([0.0, 1, 0])) == 0
    assert disagreement(scores, np.array([1.0, 0, 1])) == pytest.approx((1 + 0 + 0.5 + 0.5) / 4)
    assert np.isnan(disagreement(scores, np.zeros(3)))
